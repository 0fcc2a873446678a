package worker

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"

	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker/supervise"
)

// life is one incarnation of a worker: its processes, the connections to them,
// and the batches that it has.
type life struct {
	worker *worker
	of     supervise.Incarnation
	ranks  []*rank

	// order is held while a batch is written, so that all ranks get them in one.
	order sync.Mutex

	mu sync.Mutex
	// gone says why nothing more is handed over.
	gone    error
	flights map[uint64]*flight
	batches uint64
	// ended is when it finished a batch last that somebody waited for; warm says
	// that there may be such.
	ended time.Time
	warm  bool
	// draining says that it gets no more batches.
	draining bool
	// next is what soon returns, nil where nobody waits for it.
	next chan struct{}
}

// watchAfter is how long a batch runs, at most, before anybody looks at which of its
// items are still wanted.
const watchAfter = 2 * time.Millisecond

// flight is a batch that the worker has.
type flight struct {
	id    uint64
	items int
	// soon is closed a little after began, or before.
	soon <-chan struct{}
	// done is closed when every rank has ended the batch, or err is why none will.
	// The life's lock guards what is below until then.
	done chan struct{}
	// heard is when it began, or when the last chunk of it came that somebody waited for.
	heard time.Time
	ends  []end
	left  int
	err   error

	mu sync.Mutex
	// sink takes chunks; nil where nobody wants any more.
	sink runner.Sink
	// calledOff are the items that nobody waits for any more; nil is none.
	calledOff []bool
}

// callOff books that nobody waits for these items any more: for none, where there
// are no indices. It reports whether that is news of any of them.
func (f *flight) callOff(items []int) (news bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(items) == 0 {
		for i := range f.items {
			news = f.callOffOne(i) || news
		}
	}
	for _, i := range items {
		news = f.callOffOne(i) || news
	}
	return news
}

func (f *flight) callOffOne(item int) (news bool) {
	if f.calledOff == nil {
		f.calledOff = make([]bool, f.items)
	}
	news = !f.calledOff[item]
	f.calledOff[item] = true
	return news
}

// wants reports whether somebody takes chunks of the item.
func (f *flight) wants(item int) bool {
	return f.sink != nil && (f.calledOff == nil || !f.calledOff[item])
}

// end is what a rank says at the end of a batch: one of the two.
type end struct {
	result *frame.Result
	body   []byte
	failed *frame.Error
}

func (e end) over() bool { return e.result != nil || e.failed != nil }

// newID returns the name of a batch.
func (l *life) newID() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.batches++
	return l.batches
}

// begin books that the worker gets a batch.
func (l *life) begin(id uint64, items int, sink runner.Sink) (*flight, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone != nil {
		return nil, l.gone
	}
	f := &flight{
		id: id, items: items, sink: sink, soon: l.soon(),
		done: make(chan struct{}), heard: time.Now(), ends: make([]end, len(l.ranks)), left: len(l.ranks),
	}
	l.flights[id] = f
	return f, nil
}

// soon returns a channel that is closed after watchAfter or less. All batches that
// begin meanwhile share it: a timer for each would cost more than a short batch.
func (l *life) soon() <-chan struct{} {
	if l.next == nil {
		next := make(chan struct{})
		l.next = next
		time.AfterFunc(watchAfter, func() {
			l.mu.Lock()
			l.next = nil
			l.mu.Unlock()
			close(next)
		})
	}
	return l.next
}

// take books how a rank ended a batch.
func (l *life) take(r *rank, batch uint64, e end) error {
	l.mu.Lock()
	f := l.flights[batch]
	if f == nil || f.ends[r.index].over() {
		err := l.astray(r, batch)
		l.mu.Unlock()
		return err
	}
	f.ends[r.index] = e
	if f.left--; f.left > 0 {
		l.mu.Unlock()
		return nil
	}
	idle := l.remove(f)
	l.mu.Unlock()
	close(f.done)
	if idle {
		l.worker.look()
	}
	return nil
}

// astray is a result for a batch that the rank does not have. Where there is just
// one, that one is spoilt; of several nobody knows.
func (l *life) astray(r *rank, batch uint64) error {
	err := violation("rank %d ends batch %d, which it does not have", r.index, batch)
	if len(l.flights) == 1 {
		for _, f := range l.flights {
			l.remove(f)
			f.err = fmt.Errorf("%w: worker %d: %w", runner.ErrBadOutput, l.worker.index, err)
			close(f.done)
		}
	}
	return err
}

// remove forgets a batch, and reports whether it was the last of a worker that is
// to be replaced.
func (l *life) remove(f *flight) (idle bool) {
	delete(l.flights, f.id)
	return l.draining && len(l.flights) == 0
}

// discard forgets a batch that was not sent.
func (l *life) discard(f *flight) {
	l.mu.Lock()
	idle := l.remove(f)
	l.mu.Unlock()
	if idle {
		l.worker.look()
	}
}

// flight returns a batch that the rank has not ended.
func (l *life) flight(r *rank, batch uint64) (*flight, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.flights[batch]
	if f == nil || f.ends[r.index].over() {
		return nil, violation("rank %d answers for batch %d, which it does not have", r.index, batch)
	}
	return f, nil
}

// goesOn books that a batch shows progress.
func (l *life) goesOn(f *flight) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f.heard = time.Now()
}

// finished books that a batch ended as it should. Those of warm-ups show nothing:
// a worker that dies on its first batch may warm up well.
func (l *life) finished() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.warm {
		l.ended = time.Now()
	}
}

// warmedUp says that batches are somebody's from now on.
func (l *life) warmedUp() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.warm = true
}

// work is what the worker has to do.
func (l *life) work() supervise.Work {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := supervise.Work{Ended: l.ended}
	for _, f := range l.flights {
		if w.Oldest.IsZero() || f.heard.Before(w.Oldest) {
			w.Oldest = f.heard
		}
	}
	return w
}

// offer gives the worker's slots to whoever wants one, unless its connection ended
// meanwhile.
func (l *life) offer() {
	l.worker.pool().offer(l.worker.index, l, l.slots())
	l.mu.Lock()
	gone := l.gone != nil
	l.mu.Unlock()
	if gone {
		l.worker.pool().withdraw(l.worker.index, l)
	}
}

// withdraw takes the worker's slots back.
func (l *life) withdraw() {
	l.worker.pool().withdraw(l.worker.index, l)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.draining = true
}

// lost says that the connection to a rank is over, and why. What the worker has it
// keeps until it is known what became of its process.
func (l *life) lost(r *rank, err error) {
	l.mu.Lock()
	known := l.gone != nil
	if !known {
		l.gone = err
	}
	l.mu.Unlock()
	l.worker.pool().withdraw(l.worker.index, l)
	switch {
	case known:
	case errors.Is(err, frame.ErrViolation):
		l.fail(fmt.Errorf("rank %d: %w", r.index, err))
	default:
		l.worker.disconnected(l)
	}
}

// fail says that the worker cannot go on.
func (l *life) fail(cause error) {
	l.worker.post(func(now time.Time) []supervise.Action { return l.worker.machine.Fail(l.of, cause, now) })
}

// end says that the worker is no more, or is to be no more: its batches have
// failed and its connections close. The first cause counts.
func (l *life) end(cause error) {
	l.worker.pool().withdraw(l.worker.index, l)
	l.mu.Lock()
	if l.gone == nil {
		l.gone = cause
	}
	for _, f := range l.flights {
		l.remove(f)
		f.err = fmt.Errorf("%w: worker %d: %w", runner.ErrCrashed, l.worker.index, cause)
		close(f.done)
	}
	l.mu.Unlock()
	for _, r := range l.ranks {
		r.hangUp()
	}
}

// slots returns how many batches the worker takes at a time: as many as the rank
// that takes fewest.
func (l *life) slots() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	least := l.ranks[0].slots
	for _, r := range l.ranks[1:] {
		least = min(least, r.slots)
	}
	return least
}

func violation(format string, args ...any) error {
	return fmt.Errorf("%w: %w", frame.ErrViolation, fmt.Errorf(format, args...))
}
