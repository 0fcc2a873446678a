// Package correlate is a gateway's correlation table: it pairs replies with the
// pending calls that wait for them.
//
// A call registers before it publishes, so no reply comes too early, and is
// forgotten when it is over. Deliver finds it by its execution ID, Cancel by its
// request ID. Deliver is what the shared reply subscription calls, and never
// blocks. It tells apart, and drops, replies that no call waits for, second final
// replies, and replies to a call that reads too slowly. A call that leaves more
// unread than its Buffer fails, and no other call is affected.
//
// All methods are safe for concurrent use, but a call has one reader. The table is
// bounded in calls. Each call is bounded in the chunks that it has not read, and all
// calls together in those beyond a small allowance of each. A final reply, of which
// each call gets one, does not count.
package correlate

import (
	"errors"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Errors of Register.
var (
	// ErrFull means that the table has as many pending calls as it may.
	ErrFull = errors.New("the table of pending calls is full")
	// ErrDuplicate means that a call of that execution ID is pending.
	ErrDuplicate = errors.New("a call of that execution ID is pending")
)

// Disposition is what became of a reply.
type Disposition uint8

// The dispositions.
const (
	Delivered Disposition = iota
	// Unknown means that no call waits for the reply, or none does any more.
	Unknown
	// Duplicate means that the call has its final reply already.
	Duplicate
	// Overflow means that the call has failed, mostly because it reads too slowly.
	Overflow
)

// Buffer bounds the chunks that a call may have unread. The zero Buffer takes no
// chunk: its call wants the final reply only.
type Buffer struct {
	// Replies and Bytes bound the unread chunks together. One chunk alone may be of
	// any size.
	Replies, Bytes int
}

// Allowance is how many bytes of chunks every call may have unread, whatever others
// have.
const Allowance = 64 << 10

// Call is a call as it registers.
type Call struct {
	// Execution finds the call for replies, Request for Cancel. A call without a
	// Request waits for no reply and cannot be cancelled: it only fails.
	Execution pipeline.ExecutionID
	Request   pipeline.RequestID
	// Stages are those in whose memory queues the request may wait, in the order of
	// its route: none for a durable one. Since is when it began to; zero means now.
	Stages []pipeline.StageName
	Since  time.Time
	Buffer Buffer
}

// Pending is a call that is registered.
type Pending struct {
	Call
	table *Table
	// ready holds a value while there is something unread.
	ready    chan struct{}
	failed   chan *fault.Fault
	hostless chan struct{}

	mu sync.Mutex
	// unread are replies, bytes those of the chunks among them. shared is the part
	// of these bytes that is booked as more than the call's allowance.
	unread [][]byte
	bytes  int
	shared int64
	// isFinal is true once the final reply was delivered.
	isFinal, hasFailed, isCancelled, isForgotten bool
}

const shardCount = 64

// Table holds the pending calls.
type Table struct {
	limit int64
	count atomic.Int64
	// maxShared bounds shared, the bytes that calls have unread beyond their
	// allowances.
	maxShared  int64
	shared     atomic.Int64
	seed       maphash.Seed
	executions [shardCount]shard[pipeline.ExecutionID]
	requests   [shardCount]shard[pipeline.RequestID]
}

// shard is a part of the table. Its lock is taken before a call's, never after.
type shard[ID ~string] struct {
	mu    sync.Mutex
	calls map[ID]*Pending
}

// New returns a table of at most so many calls, which together have at most
// maxShared bytes of chunks unread beyond their allowances.
func New(limit int, maxShared int64) *Table {
	t := &Table{limit: int64(limit), maxShared: maxShared, seed: maphash.MakeSeed()}
	for i := range shardCount {
		t.executions[i].calls = map[pipeline.ExecutionID]*Pending{}
		t.requests[i].calls = map[pipeline.RequestID]*Pending{}
	}
	return t
}

// Register adds a call. Its errors are ErrFull and ErrDuplicate.
func (t *Table) Register(c Call) (*Pending, error) {
	if t.count.Add(1) > t.limit {
		t.count.Add(-1)
		return nil, ErrFull
	}
	if c.Since.IsZero() {
		c.Since = time.Now()
	}
	p := &Pending{Call: c, table: t, ready: make(chan struct{}, 1), failed: make(chan *fault.Fault, 1), hostless: make(chan struct{}, 1)}
	if !t.execution(c.Execution).add(c.Execution, p) {
		t.count.Add(-1)
		return nil, ErrDuplicate
	}
	if c.Request != "" {
		t.request(c.Request).add(c.Request, p)
	}
	return p, nil
}

// Rename gives the call another execution ID, under which nothing is registered.
func (p *Pending) Rename(id pipeline.ExecutionID) {
	p.table.execution(p.Execution).remove(p.Execution, p)
	p.Execution = id
	p.table.execution(id).add(id, p)
}

// Forget ends the wait. Further calls do nothing.
func (p *Pending) Forget() {
	if !p.close() {
		return
	}
	p.table.execution(p.Execution).remove(p.Execution, p)
	if p.Request != "" {
		p.table.request(p.Request).remove(p.Request, p)
	}
	p.table.count.Add(-1)
}

// close drops what is unread, and reports whether it was the first to.
func (p *Pending) close() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.isForgotten {
		return false
	}
	p.isForgotten = true
	p.unread = nil
	p.give(p.bytes)
	return true
}

// Deliver hands a reply to the call that waits for it. A chunk for a call that
// takes none is Delivered too, and dropped.
func (t *Table) Deliver(id pipeline.ExecutionID, isFinal bool, data []byte) Disposition {
	p := t.execution(id).get(id)
	if p == nil {
		return Unknown
	}
	return p.deliver(isFinal, data)
}

func (p *Pending) deliver(isFinal bool, data []byte) Disposition {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.isForgotten:
		return Unknown
	case p.isFinal:
		return Duplicate
	case p.hasFailed:
		return Overflow
	case !isFinal && p.Buffer == Buffer{}:
		return Delivered
	case !isFinal && !p.take(len(data)):
		p.fail(fault.New(fault.SlowReader, "the answer is read too slowly"))
		return Overflow
	}
	p.isFinal = isFinal
	p.unread = append(p.unread, data)
	p.signal()
	return Delivered
}

// Cancel fails the request's call by the fault, and reports whether one is pending.
func (t *Table) Cancel(id pipeline.RequestID, f *fault.Fault) bool {
	p := t.request(id).get(id)
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.waits() {
		p.isCancelled = true
		p.fail(f)
	}
	return true
}

// Each calls visit with every pending call. Visit may call its Fail and
// SignalHostless, and nothing else of the table.
func (t *Table) Each(visit func(*Pending)) {
	for i := range t.executions {
		t.executions[i].each(visit)
	}
}

// Unread returns the bytes that calls have unread beyond their allowances.
func (t *Table) Unread() int64 { return t.shared.Load() }

// Len returns the number of pending calls.
func (t *Table) Len() int { return int(t.count.Load()) }

// Fail ends the call by the fault, and reports whether it still waited.
func (p *Pending) Fail(f *fault.Fault) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.waits() {
		return false
	}
	p.fail(f)
	return true
}

// SignalHostless makes Hostless hold a value.
func (p *Pending) SignalHostless() {
	select {
	case p.hostless <- struct{}{}:
	default:
	}
}

// Hostless returns a channel that gets a value when the stage of the call's first
// step has no host.
func (p *Pending) Hostless() <-chan struct{} { return p.hostless }

// Ready returns a channel that holds a value while Next has a reply.
func (p *Pending) Ready() <-chan struct{} { return p.ready }

// Failed returns a channel that gets the fault which ends the call from outside,
// if any does.
func (p *Pending) Failed() <-chan *fault.Fault { return p.failed }

// IsCancelled reports whether the fault was Cancel's.
func (p *Pending) IsCancelled() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.isCancelled
}

// Next returns the next reply, in the order they came; ok is false while there is
// none.
func (p *Pending) Next() (data []byte, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.unread) == 0 {
		return nil, false
	}
	data, p.unread[0] = p.unread[0], nil
	p.unread = p.unread[1:]
	if len(p.unread) > 0 || !p.isFinal {
		p.give(len(data)) // else it is the final reply
	}
	if len(p.unread) > 0 {
		p.signal()
	}
	return data, true
}

// waits reports whether the call can still fail; the lock is held, as for all
// below.
func (p *Pending) waits() bool { return !p.isFinal && !p.hasFailed && !p.isForgotten }

// fail ends the call, which reads nothing more.
func (p *Pending) fail(f *fault.Fault) {
	p.hasFailed = true
	p.unread = nil
	p.give(p.bytes)
	p.failed <- f
}

func (p *Pending) signal() {
	select {
	case p.ready <- struct{}{}:
	default:
	}
}

// take books one more chunk, where there is space for it. A single chunk may be of
// any size, as far as the bytes that all calls share allow it.
func (p *Pending) take(chunk int) bool {
	bytes := p.bytes + chunk
	if len(p.unread) > 0 && (len(p.unread) >= p.Buffer.Replies || bytes > p.Buffer.Bytes) {
		return false
	}
	more := int64(max(0, bytes-Allowance)) - p.shared
	if more > 0 && p.table.shared.Add(more) > p.table.maxShared {
		p.table.shared.Add(-more)
		return false
	}
	p.shared += max(0, more)
	p.bytes = bytes
	return true
}

// give books that so many bytes of chunks are unread no more.
func (p *Pending) give(bytes int) {
	p.bytes -= bytes
	if less := p.shared - int64(max(0, p.bytes-Allowance)); less > 0 {
		p.table.shared.Add(-less)
		p.shared -= less
	}
}

func (t *Table) execution(id pipeline.ExecutionID) *shard[pipeline.ExecutionID] {
	return &t.executions[maphash.String(t.seed, string(id))%shardCount]
}

func (t *Table) request(id pipeline.RequestID) *shard[pipeline.RequestID] {
	return &t.requests[maphash.String(t.seed, string(id))%shardCount]
}

// add reports whether the ID was free.
func (s *shard[ID]) add(id ID, p *Pending) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, taken := s.calls[id]; taken {
		return false
	}
	s.calls[id] = p
	return true
}

func (s *shard[ID]) get(id ID) *Pending {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[id]
}

func (s *shard[ID]) remove(id ID, p *Pending) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calls[id] == p {
		delete(s.calls, id)
	}
}

func (s *shard[ID]) each(visit func(*Pending)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.calls {
		visit(p)
	}
}
