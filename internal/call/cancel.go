package call

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Cancel cancels a request, through any gateway: its caller gets CANCELLED, its
// item is deleted where it waits for its first step, and hosts drop it. Cancel
// returns before that is done, and it is best effort: it returns nil also for a
// request that is finished or was never made. An ID that is not a UUID is
// INVALID_REQUEST. BROKER_UNAVAILABLE means that no gateway or host was notified.
func (s *Service) Cancel(ctx context.Context, requestID string) error {
	id, f := parseID(requestID)
	if f != nil {
		return f
	}
	if err := ctx.Err(); err != nil {
		return fault.From(err)
	}
	tenant := budget.TenantOf(ctx)
	if s.cancelPending(id, tenant) {
		return nil
	}
	// It is admitted as a request is, which this gateway knows nothing of.
	if f := s.limiter.Acquire(budget.TenantOf(ctx)); f != nil {
		return f.WithMetadata(requestIDKey, string(id))
	}
	defer s.limiter.Release(budget.TenantOf(ctx))
	if err := s.bus.Cancel(&envelope.Cancel{Mesh: s.settings.Mesh, Tenant: tenant, RequestID: id}); err != nil {
		s.metrics.countCancel(failed)
		return store.Unavailable(err).WithMetadata(requestIDKey, string(id))
	}
	s.metrics.countCancel(notified)
	_ = s.cancels.running.start(func(ctx context.Context) { // no gateway may run it at the moment
		ctx, cancel := context.WithTimeout(budget.WithTenant(ctx, tenant), cancelTimeout)
		defer cancel()
		if record, _, err := s.results.Graph(ctx, id); err == nil && record.Request.Tenant == tenant {
			s.cancels.store(ctx, record.Request)
		}
	})
	return nil
}

// receiveCancel handles cancel messages, this gateway's own among them. Anybody may
// have sent one.
func (s *Service) receiveCancel(data []byte) {
	message, err := envelope.DecodeCancel(data)
	if err != nil || message.Mesh != s.settings.Mesh {
		s.metrics.droppedReply("malformed_cancel")
		return
	}
	s.cancelPending(message.RequestID, message.Tenant)
}

// cancelPending cancels the tenant's request, and reports whether one is pending here.
func (s *Service) cancelPending(id pipeline.RequestID, tenant string) bool {
	isPending := s.table.cancel(id, tenant, cancelledFault())
	return s.unsent.cancel(id, tenant) || isPending
}

// unsent has the calls that wait for a host or for capacity, each with its cancel function. The table has
// calls only once they are sent.
type unsent struct {
	mu    sync.Mutex
	calls map[*envelope.Envelope]context.CancelCauseFunc
}

// join returns a context that ends when the request is cancelled. The caller calls leave after its wait.
func (u *unsent) join(ctx context.Context, env *envelope.Envelope) (waiting context.Context, leave func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.calls == nil {
		u.calls = map[*envelope.Envelope]context.CancelCauseFunc{}
	}
	waiting, cancel := context.WithCancelCause(ctx)
	u.calls[env] = cancel
	return waiting, func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		delete(u.calls, env)
		cancel(nil)
	}
}

// cancel ends the wait of the tenant's request, and reports whether it waits.
func (u *unsent) cancel(id pipeline.RequestID, tenant string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	for env, cancel := range u.calls {
		if env.RequestID == id && env.Tenant == tenant {
			cancel(cancelledFault())
			return true
		}
	}
	return false
}

// cancelledFault returns the fault of a cancelled request.
func cancelledFault() *fault.Fault { return fault.New(fault.Cancelled, "the request was cancelled") }

// requestIDKey is the request's ID among the metadata of a fault.
const requestIDKey = "request_id"

const canonicalIDLength = 36

// parseID takes a UUID in its usual form, in capitals too.
func parseID(text string) (pipeline.RequestID, *fault.Fault) {
	id, err := uuid.Parse(text)
	if err != nil || len(text) != canonicalIDLength {
		return "", fault.InField(fault.InvalidRequest, "request_id", "%.*q is not a UUID", fault.MaxQuoted, text)
	}
	return pipeline.RequestID(id.String()), nil
}

// minLeft: calls with less time left are not cancelled. Hosts drop expired items, and
// under overload every request would otherwise cost a cancel message.
const minLeft = 100 * time.Millisecond

// leavesWork reports whether a call that ends by err leaves work in the mesh that
// is cancelled: nobody takes the rest of the answer, or it has a gap. A request
// whose result is stored outlives its caller.
func (x *call) leavesWork(err error) bool {
	switch {
	case x.progress.isFinal:
		return false
	case x.isCancelled():
		return true
	case x.env.StoresResult() && !errors.Is(err, errBranchEnded), time.Until(x.env.Deadline) < minLeft:
		return false
	case x.progress.isRejected:
		return true
	}
	switch fault.From(err).Reason {
	case fault.Cancelled, fault.SlowReader, fault.StreamInterrupted:
		return true
	case fault.QueueLost:
		// An item sent once is lost with the queue. One sent again may be in the new
		// queue, and its caller is told to send the request again.
		return x.sending.tries > 1
	}
	return false
}

// isCancelled reports whether the request was cancelled by its ID.
func (x *call) isCancelled() bool {
	if x.pending == nil {
		return false
	}
	_, isCancelled := x.pending.outcome()
	return isCancelled
}

const (
	// cancelTimeout bounds one cancellation, most of which is the wait for other deletes, here and
	// in the broker, when a thousand callers disconnect at once.
	cancelTimeout = 5 * time.Second
	// maxDeletes bounds the concurrent deletes: all clients of the broker share one API
	// queue. Further deletes wait.
	maxDeletes = 64
)

// cancels cancel the work that ended calls leave in the mesh, in the background: they
// delete the item from its first queue, and notify the hosts. An item that a host
// has in flight is in the queue too, so the cancel message goes out in any case.
type cancels struct {
	bus          *bus.Bus
	results      *store.Results
	deleteQueued func(context.Context, bus.Message, uint64) (bool, error)
	count        func(how string)
	// onDeleted, where set, is called for each deleted item.
	onDeleted func(*envelope.Envelope)
	// running are the cancellations in progress. deletes holds a value for each that
	// deletes now. Once running is stopped, there are only cancel messages.
	running *tasks
	deletes chan struct{}
}

func newCancels(b *bus.Bus, results *store.Results, limit int, count func(string)) *cancels {
	return &cancels{bus: b, results: results, deleteQueued: b.DeleteQueued, count: count, running: newTasks(limit), deletes: make(chan struct{}, maxDeletes)}
}

// start cancels the work that the ended call has left in the mesh. It returns at once.
// With too many cancellations in progress it only sends the cancel message.
func (c *cancels) start(x *call) {
	s := x.sending // the call goes on with its own
	if f := c.running.start(func(context.Context) { c.cancel(x.env, &s) }); f != nil {
		c.notify(x.env, false)
	}
}

func (c *cancels) cancel(env *envelope.Envelope, s *sending) {
	ctx, cancel := context.WithTimeout(context.Background(), cancelTimeout)
	defer cancel()
	o := s.awaitOutcome()
	if s.isUnqueued(o) {
		return
	}
	isDeleted := o.err == nil && c.delete(ctx, s.message, o.receipt.Seq)
	if isDeleted && c.onDeleted != nil {
		c.onDeleted(env)
	}
	if env.StoresResult() && env.Path == "" { // nobody asks for a step's
		c.store(ctx, env)
	}
	c.notify(env, isDeleted)
}

// delete deletes the item from its queue, and reports whether it was there. It is false too for an
// item that the broker deletes after the context has ended.
func (c *cancels) delete(ctx context.Context, m bus.Message, seq uint64) bool {
	select {
	case c.deletes <- struct{}{}:
		defer func() { <-c.deletes }()
	case <-ctx.Done():
		return false
	}
	existed, err := c.deleteQueued(ctx, m, seq)
	return err == nil && existed
}

// store makes CANCELLED the stored result of a cancelled request, as its caller got
// it. A result that is there already stays.
func (c *cancels) store(ctx context.Context, env *envelope.Envelope) {
	reply := env.NewReply()
	reply.Fault = cancelledFault()
	message, err := c.results.Result(env.Result(reply, time.Now()))
	if err != nil {
		return // a fault always encodes, and is small
	}
	// Without it the request is one that never finishes; its caller knows.
	_, _ = c.bus.PublishAndWait(ctx, message)
}

// notify sends the cancel message to the hosts, and counts how the request was cancelled.
func (c *cancels) notify(env *envelope.Envelope, isDeleted bool) {
	err := c.bus.Cancel(&envelope.Cancel{Mesh: env.Mesh, Tenant: env.Tenant, RequestID: env.RequestID, Deadline: env.Deadline})
	switch {
	case isDeleted:
		c.count(deleted)
	case err == nil:
		c.count(notified)
	default:
		c.count(failed)
	}
}
