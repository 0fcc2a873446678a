package call

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// abandonedAt is an call that is over, and whose item has that number in its queue.
func abandonedAt(i int) *call {
	return &call{
		env:     &envelope.Envelope{Mesh: "test", RequestID: "0199aaaa-bbbb-7ccc-8ddd-eeeeffff0000", Deadline: time.Now().Add(time.Hour)},
		sending: sending{latest: published(publishedAt(uint64(i))), tries: 1},
	}
}

// published is a publish that has that outcome.
func published(o publishOutcome) *publication {
	p := &publication{done: make(chan struct{}), outcome: o}
	close(p.done)
	return p
}

func publishedAt(seq uint64) publishOutcome { return publishOutcome{receipt: bus.Receipt{Seq: seq}} }

// tally counts cancellations by how they were done.
type tally struct {
	mu  sync.Mutex
	sum map[string]int
}

func (t *tally) count(how string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sum[how]++
}

func (t *tally) of(how string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.sum[how]
}

func TestConcurrentDeletesAreBounded(t *testing.T) {
	t.Parallel()
	const running, calls = 2 * maxDeletes, 3 * maxDeletes
	sums := &tally{sum: map[string]int{}}
	c := newCancels(testbed.StartBroker(t).Connect("test"), nil, running, sums.count)
	goOn := make(chan struct{})
	var now atomic.Int64
	c.deleteQueued = func(context.Context, bus.Message, uint64) (bool, error) {
		if n := now.Add(1); n > maxDeletes {
			t.Errorf("%d at a time", n)
		}
		defer now.Add(-1)
		<-goOn
		return true, nil
	}
	testbed.Returns(t, "all callers", func() {
		for i := range calls {
			c.start(abandonedAt(i + 1))
		}
	})
	testbed.Eventually(t, "as many deletes run as may", func() bool { return now.Load() == maxDeletes })
	if got := sums.of(notified); got != calls-running {
		t.Errorf("%d were only notified at once, want %d", got, calls-running)
	}
	close(goOn)
	c.running.stop(cancelTimeout)
	if deleted, notified := sums.of(deleted), sums.of(notified); deleted != running || notified != calls-running {
		t.Errorf("%d deleted, %d notified", deleted, notified)
	}
}

func TestStopWaitsForDeletesWithinTheirTimeout(t *testing.T) {
	t.Parallel()
	sums := &tally{sum: map[string]int{}}
	c := newCancels(testbed.StartBroker(t).Connect("test"), nil, 100, sums.count)
	c.deleteQueued = func(ctx context.Context, _ bus.Message, _ uint64) (bool, error) {
		<-ctx.Done()
		return false, ctx.Err()
	}
	begin := time.Now()
	for i := range 100 {
		c.start(abandonedAt(i + 1))
	}
	c.running.stop(cancelTimeout)
	if took := time.Since(begin); took > 3*cancelTimeout {
		t.Errorf("it took %s", took)
	}
	c.start(abandonedAt(0))
	if got := sums.of(notified); got != 101 {
		t.Errorf("%d were notified, of 100 before and one after", got)
	}
}

// A cancellation in the background waits for it, and so may the call.
func TestAllWhoAwaitAPublishLearnItsOutcome(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := &publication{done: make(chan struct{})}
		one, other := sending{latest: p}, sending{latest: p}
		outcomes := make(chan publishOutcome, 2)
		for _, s := range []*sending{&one, &other} {
			go func() { outcomes <- s.awaitOutcome() }()
		}
		synctest.Wait()
		p.outcome = publishedAt(7)
		close(p.done)
		for range 2 {
			if o := <-outcomes; o.err != nil || o.receipt.Seq != 7 {
				t.Errorf("got %+v", o)
			}
		}
	})
}

func TestOnlyPossiblyQueuedItemsAreCancelled(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		published publishOutcome
		tries     int
		how       string
	}{
		"queued":                          {publishedAt(7), 1, deleted},
		"queued at the second try":        {publishedAt(7), 2, deleted},
		"found queued at the second try":  {publishOutcome{receipt: bus.Receipt{Seq: 7, Duplicate: true}}, 2, deleted},
		"forwarded":                       {publishedAt(8), 1, notified},
		"never confirmed":                 {publishOutcome{err: bus.ErrUnknown}, 1, notified},
		"never confirmed, then rejected":  {publishOutcome{err: bus.ErrQueueFull}, 2, notified},
		"never confirmed, then not sent":  {publishOutcome{err: bus.ErrDisconnected}, 2, notified},
		"rejected":                        {publishOutcome{err: bus.ErrQueueFull}, 1, ""},
		"not sent":                        {publishOutcome{err: bus.ErrDisconnected}, 1, ""},
		"duplicate: the ID was another's": {publishOutcome{receipt: bus.Receipt{Seq: 7, Duplicate: true}}, 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sums := &tally{sum: map[string]int{}}
			c := newCancels(testbed.StartBroker(t).Connect("test"), nil, 1, sums.count)
			c.deleteQueued = func(_ context.Context, _ bus.Message, seq uint64) (bool, error) { return seq == 7, nil }
			a := abandonedAt(0)
			late := &publication{done: make(chan struct{})}
			a.sending = sending{latest: late, tries: test.tries}
			c.start(a)
			late.outcome = test.published
			close(late.done)
			c.running.stop(cancelTimeout)
			for _, how := range []string{deleted, notified, failed} {
				if want := map[bool]int{true: 1}[how == test.how]; sums.of(how) != want {
					t.Errorf("%s %d times, want %d", how, sums.of(how), want)
				}
			}
		})
	}
}

// An item that was sent again may wait in the queue that replaced the lost one. Its
// caller is told to send the request again, so the item must not run.
func TestItemSentAgainIsCancelledWithItsLostQueue(t *testing.T) {
	t.Parallel()
	lost := fault.New(fault.QueueLost, "the queue was lost")
	for tries, want := range map[int]bool{1: false, 2: true, 3: true} {
		x := &call{env: &envelope.Envelope{Durability: pipeline.Memory, Deadline: time.Now().Add(time.Hour)}, sending: sending{tries: tries}}
		if got := x.leavesWork(lost); got != want {
			t.Errorf("sent %d times: cancelled %v, want %v", tries, got, want)
		}
	}
}

func TestUnservedCallDeletesOnlyItsOwnItem(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		// published is nil where the outcome is not known yet.
		published *publishOutcome
		tries     int
		seq       uint64
		want      uint64
	}{
		"queued":                          {&publishOutcome{receipt: bus.Receipt{Seq: 7}}, 1, 0, 7},
		"found queued at the second try":  {&publishOutcome{receipt: bus.Receipt{Seq: 7, Duplicate: true}}, 2, 0, 7},
		"duplicate: the ID was another's": {&publishOutcome{receipt: bus.Receipt{Seq: 7, Duplicate: true}}, 1, 0, 0},
		"rejected":                        {&publishOutcome{err: bus.ErrQueueFull}, 1, 0, 0},
		"not confirmed yet":               {nil, 1, 0, 0},
		"its answer has begun":            {&publishOutcome{receipt: bus.Receipt{Seq: 7}}, 1, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var took uint64
			cs := &cancels{deletes: make(chan struct{}, 1), deleteQueued: func(_ context.Context, _ bus.Message, seq uint64) (bool, error) {
				took = seq
				return false, nil // it was forwarded meanwhile
			}}
			x := &call{
				service: &Service{cancels: cs}, pending: &pending{table: newTable(tableLimits{})}, env: &envelope.Envelope{Deadline: time.Now().Add(time.Hour)},
				sending: sending{latest: &publication{done: make(chan struct{})}, tries: test.tries}, progress: progress{seq: test.seq},
			}
			if test.published != nil {
				x.sending.latest = published(*test.published)
			}
			if err := x.failUnserved(t.Context()); err != nil {
				t.Error(err)
			}
			if took != test.want {
				t.Errorf("deleted item %d, want %d", took, test.want)
			}
		})
	}
}

func TestTasksAreBoundedAndEndWithTheirOwner(t *testing.T) {
	t.Parallel()
	running := newTasks(2)
	ended := make(chan struct{}, 2)
	for range 2 {
		if f := running.start(func(ctx context.Context) {
			<-ctx.Done()
			ended <- struct{}{}
		}); f != nil {
			t.Fatal(f)
		}
	}
	if f := running.start(func(context.Context) { t.Error("it runs") }); f == nil || f.Reason != fault.Overloaded || f.RetryAfter <= 0 {
		t.Errorf("one more: %v", f)
	}
	running.stop(time.Millisecond)
	if len(ended) != 2 {
		t.Errorf("%d have ended", len(ended))
	}
	if f := running.start(func(context.Context) { t.Error("it runs") }); f == nil || f.Reason != fault.ShuttingDown {
		t.Errorf("after the stop: %v", f)
	}
}

func TestStopWaitsForTasksThatEndInTime(t *testing.T) {
	t.Parallel()
	running := newTasks(1)
	goOn, done := make(chan struct{}), make(chan error, 1)
	if f := running.start(func(ctx context.Context) {
		<-goOn
		done <- ctx.Err()
	}); f != nil {
		t.Fatal(f)
	}
	stopped := make(chan struct{})
	go func() {
		running.stop(testbed.Patience)
		close(stopped)
	}()
	close(goOn)
	testbed.Receive(t, "end of the tasks", stopped)
	if err := <-done; err != nil {
		t.Errorf("its context ended: %v", err)
	}
}
