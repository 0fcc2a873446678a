// Package correlate pairs replies with the calls that wait for them, by
// execution id.
//
// A call registers before it publishes, so no reply can come too early, and
// forgets when it is over. Deliver is what the shared reply subscription calls:
// it never blocks. A reply that nobody waits for, a second answer and a reply
// for a call that reads too slowly are told apart and dropped. A call that
// leaves more unread than its Room has failed, and no other call notices.
//
// All methods are safe for concurrent use, but a call has one reader. The table
// is bounded in calls, each call in the chunks that it has not read, and all calls
// together in those beyond a little that each may always have. A terminal reply, of
// which each call gets one, has room beside them.
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
	// ErrFull says that as many calls wait as may.
	ErrFull = errors.New("as many calls wait as may")
	// ErrTwice says that a call of that id waits already.
	ErrTwice = errors.New("a call of that execution id waits already")
)

// Disposition is what became of a reply.
type Disposition uint8

// The dispositions.
const (
	Delivered Disposition = iota
	// Unknown says that nobody waits (any more).
	Unknown
	// Duplicate says that the call has its terminal answer already.
	Duplicate
	// Overflow says that the call reads too slowly and has failed.
	Overflow
)

// Room bounds the chunks that a call may have unread; its terminal reply has
// room beside them, for it is the last. The zero Room takes no chunk at all:
// its call wants the terminal reply only.
type Room struct {
	// Replies and Bytes bound the unread chunks together. One chunk alone may
	// be of any size.
	Replies, Bytes int
}

const shardCount = 64

// Own is how many bytes of chunks every call may have unread, whatever others have.
const Own = 64 << 10

// Table holds the calls that wait.
type Table struct {
	bound int64
	count atomic.Int64
	// shared bounds beyond, the bytes that calls have unread beyond their Own.
	shared int64
	beyond atomic.Int64
	seed   maphash.Seed
	shards [shardCount]shard
}

type shard struct {
	mu      sync.Mutex
	waiters map[pipeline.ExecutionID]*Waiter
}

// Waiter is one call that waits.
type Waiter struct {
	// Stages are those in whose memory queues the call may wait: all of its
	// route, or none of a durable call. Since is when it began to.
	Stages []pipeline.StageName
	Since  time.Time

	id    pipeline.ExecutionID
	table *Table
	room  Room
	// ready holds a value while there is something unread.
	ready  chan struct{}
	failed chan *fault.Fault

	// Guarded by the shard's lock. bytes are those of the chunks that are unread, beyond
	// how many of them are booked as more than the call's own.
	unread   [][]byte
	bytes    int
	beyond   int64
	terminal bool
	over     bool
}

// New returns a table of at most bound calls, which together have at most so many
// bytes of chunks unread beyond their Own.
func New(bound int, shared int64) *Table {
	t := &Table{bound: int64(bound), shared: shared, seed: maphash.MakeSeed()}
	for i := range t.shards {
		t.shards[i].waiters = map[pipeline.ExecutionID]*Waiter{}
	}
	return t
}

// Register adds a call that waits in the memory queues of the stages, if any,
// and has room for so much unread. Its errors are ErrFull and ErrTwice.
func (t *Table) Register(id pipeline.ExecutionID, stages []pipeline.StageName, room Room) (*Waiter, error) {
	return t.RegisterSince(time.Now(), id, stages, room)
}

// RegisterSince is Register of a call that waits since then.
func (t *Table) RegisterSince(since time.Time, id pipeline.ExecutionID, stages []pipeline.StageName, room Room) (*Waiter, error) {
	if t.count.Add(1) > t.bound {
		t.count.Add(-1)
		return nil, ErrFull
	}
	w := &Waiter{
		Stages: stages,
		Since:  since,
		id:     id,
		table:  t,
		room:   room,
		ready:  make(chan struct{}, 1),
		failed: make(chan *fault.Fault, 1),
	}
	s := t.shard(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, twice := s.waiters[id]; twice {
		t.count.Add(-1)
		return nil, ErrTwice
	}
	s.waiters[id] = w
	return w, nil
}

// Deliver hands a reply to the call that waits for it. A chunk for a call that
// takes none is Delivered too, and dropped.
func (t *Table) Deliver(id pipeline.ExecutionID, terminal bool, data []byte) Disposition {
	s := t.shard(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	w, ok := s.waiters[id]
	switch {
	case !ok:
		return Unknown
	case w.terminal:
		return Duplicate
	case w.over:
		return Overflow
	case !terminal && w.room == Room{}:
		return Delivered
	case !terminal && !w.take(len(data)):
		w.fail(fault.New(fault.SlowReader, "the answer is read too slowly"))
		return Overflow
	}
	w.terminal = terminal
	w.unread = append(w.unread, data)
	w.signal()
	return Delivered
}

// FailIf fails every call that matches by the fault, and returns how many.
func (t *Table) FailIf(match func(*Waiter) bool, f *fault.Fault) int {
	n := 0
	for i := range t.shards {
		n += t.shards[i].failIf(match, f)
	}
	return n
}

func (s *shard) failIf(match func(*Waiter) bool, f *fault.Fault) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, w := range s.waiters {
		if !w.terminal && !w.over && match(w) {
			w.fail(f)
			n++
		}
	}
	return n
}

// Stages returns the stages in whose memory queues calls may wait.
func (t *Table) Stages() []pipeline.StageName {
	seen := map[pipeline.StageName]bool{}
	for i := range t.shards {
		t.shards[i].stages(seen)
	}
	out := make([]pipeline.StageName, 0, len(seen))
	for stage := range seen {
		out = append(out, stage)
	}
	return out
}

func (s *shard) stages(seen map[pipeline.StageName]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.waiters {
		for _, stage := range w.Stages {
			seen[stage] = true
		}
	}
}

// Unread returns the bytes that calls have unread beyond their Own.
func (t *Table) Unread() int64 { return t.beyond.Load() }

// Len returns the number of calls that wait.
func (t *Table) Len() int { return int(t.count.Load()) }

func (t *Table) shard(id pipeline.ExecutionID) *shard {
	return &t.shards[maphash.String(t.seed, string(id))%shardCount]
}

// take books one more chunk, where there is room for it; the shard's lock is held.
// One that is alone may be of any size, as far as what all calls have allows.
func (w *Waiter) take(chunk int) bool {
	bytes := w.bytes + chunk
	if len(w.unread) > 0 && (len(w.unread) >= w.room.Replies || bytes > w.room.Bytes) {
		return false
	}
	more := int64(max(0, bytes-Own)) - w.beyond
	if more > 0 && w.table.beyond.Add(more) > w.table.shared {
		w.table.beyond.Add(-more)
		return false
	}
	w.beyond += max(0, more)
	w.bytes = bytes
	return true
}

// give books that so many bytes of chunks are unread no more; the shard's lock is
// held.
func (w *Waiter) give(bytes int) {
	w.bytes -= bytes
	if less := w.beyond - int64(max(0, w.bytes-Own)); less > 0 {
		w.table.beyond.Add(-less)
		w.beyond -= less
	}
}

// signal makes Ready hold a value.
func (w *Waiter) signal() {
	select {
	case w.ready <- struct{}{}:
	default:
	}
}

// fail ends the call, which reads nothing more; the shard's lock is held.
func (w *Waiter) fail(f *fault.Fault) {
	w.over = true
	w.unread = nil
	w.give(w.bytes)
	w.failed <- f
}

// Ready returns a channel that holds a value while Next has a reply.
func (w *Waiter) Ready() <-chan struct{} { return w.ready }

// Next returns the next reply, in the order they came; false says that there is
// none yet.
func (w *Waiter) Next() (data []byte, ok bool) {
	s := w.table.shard(w.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(w.unread) == 0 {
		return nil, false
	}
	data, w.unread[0] = w.unread[0], nil
	w.unread = w.unread[1:]
	if len(w.unread) > 0 || !w.terminal {
		w.give(len(data)) // else it is the terminal reply
	}
	if len(w.unread) > 0 {
		w.signal()
	}
	return data, true
}

// Failed returns a channel that gets the fault which ends the call from
// outside, if any does.
func (w *Waiter) Failed() <-chan *fault.Fault { return w.failed }

// Forget ends the wait. Further calls do nothing.
func (w *Waiter) Forget() {
	s := w.table.shard(w.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiters[w.id] != w {
		return
	}
	delete(s.waiters, w.id)
	w.unread = nil
	w.give(w.bytes)
	w.table.count.Add(-1)
}
