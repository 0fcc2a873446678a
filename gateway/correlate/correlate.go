// Package correlate pairs replies with the calls that wait for them, by
// execution id.
//
// A call registers before it publishes, so no reply can come too early, and
// forgets when it is over. Deliver is what the shared reply subscription calls:
// it never blocks. A reply that nobody waits for, a second answer and a reply
// for a call that reads too slowly are told apart and dropped. A call whose
// buffer overflows has failed, and no other call notices.
//
// All methods are safe for concurrent use. The table is bounded.
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

const shardCount = 64

// Table holds the calls that wait.
type Table struct {
	bound  int64
	count  atomic.Int64
	seed   maphash.Seed
	shards [shardCount]shard
}

type shard struct {
	mu      sync.Mutex
	waiters map[pipeline.ExecutionID]*Waiter
}

// Waiter is one call that waits.
type Waiter struct {
	// Stages are on the call's route; Since is when it was registered.
	Stages []pipeline.StageName
	Since  time.Time

	id       pipeline.ExecutionID
	table    *Table
	replies  chan []byte
	failed   chan *fault.Fault
	terminal bool
	over     bool
}

// New returns a table of at most bound calls.
func New(bound int) *Table {
	t := &Table{bound: int64(bound), seed: maphash.MakeSeed()}
	for i := range t.shards {
		t.shards[i].waiters = map[pipeline.ExecutionID]*Waiter{}
	}
	return t
}

// Register adds a call that may have at most buffer replies unread.
func (t *Table) Register(id pipeline.ExecutionID, stages []pipeline.StageName, buffer int) (*Waiter, error) {
	if t.count.Add(1) > t.bound {
		t.count.Add(-1)
		return nil, ErrFull
	}
	w := &Waiter{
		Stages:  stages,
		Since:   time.Now(),
		id:      id,
		table:   t,
		replies: make(chan []byte, max(1, buffer)),
		failed:  make(chan *fault.Fault, 1),
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

// Deliver hands a reply to the call that waits for it.
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
	}
	select {
	case w.replies <- data:
		w.terminal = terminal
		return Delivered
	default:
		w.fail(fault.New(fault.SlowReader, "the answer is read too slowly"))
		return Overflow
	}
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

// Stages returns the stages on the routes of the calls that wait.
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

// Len returns the number of calls that wait.
func (t *Table) Len() int { return int(t.count.Load()) }

func (t *Table) shard(id pipeline.ExecutionID) *shard {
	return &t.shards[maphash.String(t.seed, string(id))%shardCount]
}

// fail ends the call; the shard's lock is held.
func (w *Waiter) fail(f *fault.Fault) {
	w.over = true
	w.failed <- f
}

// Replies returns the replies in the order they came.
func (w *Waiter) Replies() <-chan []byte { return w.replies }

// Failed returns the fault that ended the call from outside, if any does.
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
	w.table.count.Add(-1)
}
