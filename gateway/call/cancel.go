package call

import (
	"context"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Cancel cancels a request, through any gateway: its caller gets CANCELLED, its
// item is withdrawn where it waits for its first step, and hosts drop it. Cancel
// returns before that is done, and it is best effort: it returns nil also for a
// request that is finished or was never made. An ID that is no UUID is
// INVALID_REQUEST. BROKER_UNAVAILABLE means that no gateway or host was notified.
func (s *Service) Cancel(ctx context.Context, requestID string) error {
	id, f := parseID(requestID)
	if f != nil {
		return f
	}
	if err := ctx.Err(); err != nil {
		return fault.From(err)
	}
	if s.table.cancel(id, cancelledFault()) {
		return nil
	}
	// Its deadline is not known here: no later than any request's.
	deadline := time.Now().Add(s.settings.MaxTimeout)
	if err := s.bus.Cancel(&envelope.Cancel{Mesh: s.settings.Mesh, RequestID: id, Deadline: deadline}); err != nil {
		s.metrics.cancelled(failed)
		return unavailable(err).WithMetadata(requestIDKey, string(id))
	}
	s.metrics.cancelled(notified)
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
	s.table.cancel(message.RequestID, cancelledFault())
}

// cancelledFault is what the caller of a cancelled request gets.
func cancelledFault() *fault.Fault { return fault.New(fault.Cancelled, "the request was cancelled") }

// requestIDKey is the request's ID among the metadata of a fault.
const requestIDKey = "request_id"

const canonicalIDLength = 36

// parseID takes a UUID in its usual form, in capitals too.
func parseID(text string) (pipeline.RequestID, *fault.Fault) {
	id, err := uuid.Parse(text)
	if err != nil || len(text) != canonicalIDLength {
		return "", fault.Newf(fault.InvalidRequest, "request_id: %.*q is no UUID", shown, text).WithViolation("request_id", "no UUID")
	}
	return pipeline.RequestID(id.String()), nil
}

const (
	// cancelTimeout is for the whole of one cancellation, of which most is the wait
	// for its turn where a thousand callers leave at once.
	cancelTimeout = 5 * time.Second
	// brokerTimeout is for each question to the broker.
	brokerTimeout = time.Second
	// maxWithdrawals bounds the withdrawals at a time: the broker's API has one
	// queue for everybody. The others wait their turn.
	maxWithdrawals = 64
)

// cancels cancel what ended calls leave in the mesh, in the background: they
// withdraw the item from its first queue, and notify the hosts. An item that a host
// has in flight is in the queue too, so the cancel message goes out in any case.
type cancels struct {
	bus          *bus.Bus
	withdrawItem func(context.Context, bus.Message, uint64) (bool, error)
	count        func(how string)
	// onWithdrawn, where set, gets what was withdrawn.
	onWithdrawn func(*envelope.Envelope)
	// running are those that wait or withdraw, withdrawals those that withdraw. Once
	// running is stopped, there are only cancel messages.
	running     *tasks
	withdrawals chan struct{}
}

func newCancels(b *bus.Bus, limit int, count func(string)) *cancels {
	return &cancels{bus: b, withdrawItem: b.DeleteQueued, count: count, running: newTasks(limit), withdrawals: make(chan struct{}, maxWithdrawals)}
}

// start cancels what the exchange, which is over, has left in the mesh. It returns at
// once. Where too many are being cancelled there is only the cancel message.
func (c *cancels) start(x *exchange) {
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
	isWithdrawn := o.err == nil && c.withdraw(ctx, s.message, o.receipt.Seq)
	if isWithdrawn && c.onWithdrawn != nil {
		c.onWithdrawn(env)
	}
	if env.StoresResult() {
		c.store(ctx, env)
	}
	c.notify(env, isWithdrawn)
}

// withdraw reports whether the item was in its queue, and is not any more.
func (c *cancels) withdraw(ctx context.Context, m bus.Message, seq uint64) bool {
	select {
	case c.withdrawals <- struct{}{}:
		defer func() { <-c.withdrawals }()
	case <-ctx.Done():
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, brokerTimeout)
	defer cancel()
	was, err := c.withdrawItem(ctx, m, seq)
	return err == nil && was
}

// store makes CANCELLED the stored result of a cancelled request, as its caller got
// it. A result that is there already stays.
func (c *cancels) store(ctx context.Context, env *envelope.Envelope) {
	reply := env.NewReply()
	reply.Fault = cancelledFault()
	message, err := c.bus.Result(env.Result(reply, time.Now()))
	if err != nil {
		return // a fault always encodes, and is small
	}
	ctx, cancel := context.WithTimeout(ctx, brokerTimeout)
	defer cancel()
	// Without it the request is one that never finishes; its caller knows.
	_, _ = c.bus.PublishAndWait(ctx, message)
}

// notify sends the cancel message to the hosts, and counts how the request was cancelled.
func (c *cancels) notify(env *envelope.Envelope, isWithdrawn bool) {
	err := c.bus.Cancel(&envelope.Cancel{Mesh: env.Mesh, RequestID: env.RequestID, Deadline: env.Deadline})
	switch {
	case isWithdrawn:
		c.count(deleted)
	case err == nil:
		c.count(notified)
	default:
		c.count(failed)
	}
}
