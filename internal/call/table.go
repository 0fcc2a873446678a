package call

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// The dispositions of a reply.
const (
	delivered = meshv1.ReplyDisposition_REPLY_DISPOSITION_DELIVERED
	malformed = meshv1.ReplyDisposition_REPLY_DISPOSITION_MALFORMED
	// unknown means that no call waits for the reply.
	unknown = meshv1.ReplyDisposition_REPLY_DISPOSITION_UNKNOWN
	// duplicate means that the call has its final reply already.
	duplicate = meshv1.ReplyDisposition_REPLY_DISPOSITION_DUPLICATE
	// overflow means that the call has failed, mostly because it reads too slowly.
	overflow = meshv1.ReplyDisposition_REPLY_DISPOSITION_OVERFLOW
)

var (
	errTableFull     = errors.New("the table of pending calls is full")
	errDuplicateCall = errors.New("a call of that execution ID is pending")
)

// table is the correlation table: it pairs replies with the pending calls that wait
// for them. A call registers before it publishes, so no reply comes too early. deliver
// never blocks. A call that leaves too much unread fails, and no other call is
// affected. A final reply, of which each call gets one, does not count as unread.
//
// One lock guards the table and its calls. It is held for about 50 ns at a time, four
// times a request, of which the rest of the gateway takes 30 us and more.
type table struct {
	limits tableLimits

	mu         sync.Mutex
	executions map[pipeline.ExecutionID]*pending
	requests   map[pipeline.RequestID]*pending
	// shared are the bytes that calls have unread beyond freeUnreadBytes each.
	shared int
	// closed is why no call can register any more; nil while calls can.
	closed *fault.Fault
}

type tableLimits struct {
	calls int
	// replies and bytes bound the chunks that one call has unread. One chunk alone may be
	// of any size. shared bounds the bytes of all calls beyond freeUnreadBytes each.
	replies, bytes, shared int
}

// freeUnreadBytes is how many bytes of chunks every call may have unread, regardless of
// other calls. Bytes above it are reserved from the shared bound.
const freeUnreadBytes = 64 << 10

// message is a message of an answer: the bytes that came by the broker, or the reply itself
// where a host in this process handed it over, with about its size in bytes.
type message struct {
	data  []byte
	reply *envelope.Reply
	size  int
}

// decode returns the reply that the message is.
func (m *message) decode() (*envelope.Reply, error) {
	if m.reply != nil {
		return m.reply, nil
	}
	return envelope.DecodeReply(m.data)
}

// pending is a registered call. The table's lock guards its lower half.
type pending struct {
	// execution finds the call for replies, the ID in env for cancel; the execution ID in env
	// may change before it does. A call without env waits for no reply and cannot be
	// cancelled: it can only fail.
	execution pipeline.ExecutionID
	env       *envelope.Envelope
	table     *table
	// graph is nil where the pipeline has no blocks.
	graph *graphRun
	// isLossy calls miss chunks that they leave no space for.
	isLossy bool
	// ready holds a value while next has something.
	ready chan struct{}

	// stages are those in whose memory queues the request may wait, in the order of its
	// route: none for a durable one, while it is handed over in memory, or before its publish is
	// acknowledged or its outcome unknown. since is when it began to wait; zero means now. queuedAt
	// is its sequence number in the queue of its first step, where a host published it there; else 0.
	stages   []pipeline.StageName
	since    time.Time
	queuedAt uint64
	// unread are replies, bytes counts the bytes of the chunks among them, and reserved the part of
	// bytes that is more than freeUnreadBytes.
	unread          []message
	bytes, reserved int
	// location is where the request is shortly before its deadline, and isLocated is true once
	// that is asked for.
	location  atomic.Pointer[location]
	isLocated bool
	// fault ends the call from outside; interrupt, if set, is called then, without a cause.
	fault     *fault.Fault
	interrupt context.CancelCauseFunc
	// isFinal is true once the final reply was delivered.
	isFinal, isCancelled bool
	signals              signals
}

// signals are what calls learn beside replies.
type signals struct {
	// hasNoHost is true where the stage of the first step has no host, isReconnected
	// where replies may be lost with a connection.
	hasNoHost, isReconnected bool
}

func newTable(limits tableLimits) *table {
	return &table{limits: limits, executions: map[pipeline.ExecutionID]*pending{}, requests: map[pipeline.RequestID]*pending{}}
}

// register adds a call. Its errors are errTableFull, errDuplicateCall and the fault of a
// closed table.
func (t *table) register(p *pending) error {
	if p.since.IsZero() {
		p.since = time.Now()
	}
	p.table, p.ready = t, make(chan struct{}, 1)
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed != nil:
		return t.closed
	case len(t.executions) >= t.limits.calls:
		return errTableFull
	case t.executions[p.execution] != nil:
		return errDuplicateCall
	}
	t.executions[p.execution] = p
	if p.env != nil {
		t.requests[p.env.RequestID] = p
	}
	return nil
}

// rename gives the call another execution ID, under which nothing is registered.
func (p *pending) rename(id pipeline.ExecutionID) {
	p.table.mu.Lock()
	defer p.table.mu.Unlock()
	delete(p.table.executions, p.execution)
	p.execution = id
	p.table.executions[id] = p
}

// forgetQueues records that no memory queue holds the request.
func (p *pending) forgetQueues() {
	p.table.mu.Lock()
	defer p.table.mu.Unlock()
	p.stages = nil
}

// recordQueues records that the memory queues of these stages may hold the request since then. The
// first call counts: an earlier publish may have queued the item.
func (p *pending) recordQueues(stages []pipeline.StageName, since time.Time) {
	p.table.mu.Lock()
	defer p.table.mu.Unlock()
	if p.stages == nil {
		p.stages, p.since = stages, since
	}
}

// forget ends the wait. Further calls do nothing.
func (p *pending) forget() {
	t := p.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.executions[p.execution] != p {
		return
	}
	delete(t.executions, p.execution)
	if p.env != nil && t.requests[p.env.RequestID] == p {
		delete(t.requests, p.env.RequestID)
	}
	p.dropLocked()
}

// deliver hands a reply to the call that waits for it.
func (t *table) deliver(id pipeline.ExecutionID, isFinal bool, m message) meshv1.ReplyDisposition {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.executions[id]
	switch {
	case p == nil:
		return unknown
	case p.isFinal:
		return duplicate
	case p.fault != nil:
		return overflow
	case !isFinal && (p.env == nil || !p.env.TakesChunks):
		return delivered // and dropped
	case !isFinal && !p.reserveLocked(m.size):
		if p.isLossy {
			return delivered // and dropped
		}
		p.failLocked(fault.New(fault.SlowReader, "the answer is read too slowly"))
		return overflow
	}
	p.isFinal = isFinal
	p.unread = append(p.unread, m)
	p.wakeLocked()
	return delivered
}

// recordQueued records that the call's item, which was handed over in memory, was published for the
// step at that position.
func (t *table) recordQueued(id pipeline.ExecutionID, position int, seq uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.executions[id]
	if p == nil {
		return
	}
	p.stages, p.since = stagesOf(p.env.Route[position:]), time.Now()
	if position == 0 {
		p.queuedAt = seq
	}
}

// cancel fails the call of the tenant's request by the fault, and reports whether one is
// pending.
func (t *table) cancel(id pipeline.RequestID, tenant string, f *fault.Fault) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.requests[id]
	if p == nil || p.env.Tenant != tenant {
		return false
	}
	if p.failLocked(f) {
		p.isCancelled = true
	}
	return true
}

// find returns a pending request, nil where it is none.
func (t *table) find(id pipeline.RequestID) *pending {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.requests[id]
}

// close fails all calls that have a request, and those to come, by the fault.
func (t *table) close(f *fault.Fault) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = f
	for _, p := range t.requests {
		p.failLocked(f)
	}
}

// each calls visit with every pending call. visit may use its failLocked and
// signalLocked, and nothing else of the table.
func (t *table) each(visit func(*pending)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.executions {
		visit(p)
	}
}

// sizes returns the number of pending calls, and the bytes that they have unread
// beyond freeUnreadBytes each.
func (t *table) sizes() (calls, unread int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.executions), t.shared
}

// event is a fault, a reply or signals for a call, or nothing.
type event struct {
	// fault ends the call. There is nothing else to read then.
	fault *fault.Fault
	reply *message
	signals
}

// next returns the next event, replies in their order.
func (p *pending) next() (e event) {
	p.table.mu.Lock()
	defer p.table.mu.Unlock()
	switch {
	case p.fault != nil:
		return event{fault: p.fault}
	case len(p.unread) > 0:
		m := p.unread[0]
		e.reply, p.unread[0] = &m, message{}
		p.unread = p.unread[1:]
		if len(p.unread) > 0 || !p.isFinal {
			p.releaseLocked(m.size) // else it is the final reply
		}
	default:
		e.signals, p.signals = p.signals, signals{}
	}
	if len(p.unread) > 0 || p.signals != (signals{}) {
		p.wakeLocked()
	}
	return e
}

// publishedAt returns the sequence number at which a host published the item for its first
// step; 0 where none did.
func (p *pending) publishedAt() uint64 {
	p.table.mu.Lock()
	defer p.table.mu.Unlock()
	return p.queuedAt
}

// outcome returns the fault that ended the call from outside, nil for none, and whether
// that was a cancel.
func (p *pending) outcome() (f *fault.Fault, isCancelled bool) {
	p.table.mu.Lock()
	defer p.table.mu.Unlock()
	return p.fault, p.isCancelled
}

// failLocked ends the call by the fault, and reports whether it still waited.
func (p *pending) failLocked(f *fault.Fault) bool {
	if p.isFinal || p.fault != nil {
		return false
	}
	p.fault = f
	p.dropLocked()
	p.wakeLocked()
	if p.interrupt != nil {
		p.interrupt(nil)
	}
	return true
}

// setInterrupt sets a function that is called when the call fails, at once if it has failed already; nil
// removes it. It runs under the table's lock and must not block.
func (p *pending) setInterrupt(interrupt context.CancelCauseFunc) {
	p.table.mu.Lock()
	defer p.table.mu.Unlock()
	p.interrupt = interrupt
	if p.fault != nil && interrupt != nil {
		interrupt(nil)
	}
}

func (p *pending) signalLocked(s signals) {
	p.signals.hasNoHost = p.signals.hasNoHost || s.hasNoHost
	p.signals.isReconnected = p.signals.isReconnected || s.isReconnected
	p.wakeLocked()
}

func (p *pending) wakeLocked() {
	select {
	case p.ready <- struct{}{}:
	default:
	}
}

// dropLocked drops all that is unread.
func (p *pending) dropLocked() {
	p.unread = nil
	p.releaseLocked(p.bytes)
}

// reserveLocked reserves the bytes of one more chunk, if there is space for it.
func (p *pending) reserveLocked(chunk int) bool {
	t, bytes := p.table, p.bytes+chunk
	if len(p.unread) > 0 && (len(p.unread) >= t.limits.replies || bytes > t.limits.bytes) {
		return false
	}
	more := max(0, max(0, bytes-freeUnreadBytes)-p.reserved)
	if more > 0 && t.shared+more > t.limits.shared {
		return false
	}
	t.shared += more
	p.reserved += more
	p.bytes = bytes
	return true
}

// releaseLocked releases the bytes of chunks that are no longer unread.
func (p *pending) releaseLocked(bytes int) {
	p.bytes -= bytes
	less := max(0, p.reserved-max(0, p.bytes-freeUnreadBytes))
	p.table.shared -= less
	p.reserved -= less
}
