package call

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// left is what a call left that has been published.
func left(i int) leftover {
	published := make(chan published, 1)
	published <- publishedAt(uint64(i))
	return leftover{
		env:       &envelope.Envelope{Mesh: "test", RequestID: "0199aaaa-bbbb-7ccc-8ddd-eeeeffff0000", Deadline: time.Now().Add(time.Hour)},
		published: published, tries: 1,
	}
}

func publishedAt(seq uint64) published { return published{receipt: bus.Receipt{Seq: seq}} }

// tally counts by what is said.
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

func TestNoMoreAreWithdrawnAtATimeThanMay(t *testing.T) {
	t.Parallel()
	const inside, calls = 2 * withdrawalsAtOnce, 3 * withdrawalsAtOnce
	sums := &tally{sum: map[string]int{}}
	o := newCallOffs(bustest.Start(t).Connect("test"), inside, sums.count)
	goOn := make(chan struct{})
	var now atomic.Int64
	o.takeBack = func(ctx context.Context, _ bus.Message, seq uint64) (bool, error) {
		if n := now.Add(1); n > withdrawalsAtOnce {
			t.Errorf("%d at a time", n)
		}
		defer now.Add(-1)
		select {
		case <-goOn:
			return true, nil
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
	begin := time.Now()
	for i := range calls {
		o.start(left(i + 1))
	}
	if took := time.Since(begin); took > callOffBudget/2 {
		t.Errorf("callers were held up for %s", took)
	}
	bustest.Eventually(t, "as many withdraw as may", func() bool { return now.Load() == withdrawalsAtOnce })
	if got := sums.of(notified); got != calls-inside {
		t.Errorf("%d were only notified at once, want %d", got, calls-inside)
	}
	close(goOn)
	o.stop()
	if deleted, notified := sums.of(deleted), sums.of(notified); deleted != inside || notified != calls-inside {
		t.Errorf("%d deleted, %d notified", deleted, notified)
	}
}

func TestStopWaitsForWithdrawalsAndNoLongerThanTheyMayTake(t *testing.T) {
	t.Parallel()
	sums := &tally{sum: map[string]int{}}
	o := newCallOffs(bustest.Start(t).Connect("test"), 100, sums.count)
	o.takeBack = func(ctx context.Context, _ bus.Message, _ uint64) (bool, error) {
		<-ctx.Done()
		return false, ctx.Err()
	}
	begin := time.Now()
	for i := range 100 {
		o.start(left(i + 1))
	}
	o.stop()
	if took := time.Since(begin); took > 3*callOffBudget {
		t.Errorf("it took %s", took)
	}
	o.start(left(0))
	if got := sums.of(notified); got != 101 {
		t.Errorf("%d were notified, of 100 before and one after", got)
	}
}

func TestOnlyWhatMayHaveBeenQueuedIsCalledOff(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		published published
		tries     int
		how       string
	}{
		"queued":                          {publishedAt(7), 1, deleted},
		"queued at the second try":        {publishedAt(7), 2, deleted},
		"found queued at the second try":  {published{receipt: bus.Receipt{Seq: 7, Duplicate: true}}, 2, deleted},
		"gone on":                         {publishedAt(8), 1, notified},
		"never confirmed":                 {published{err: bus.ErrUnknown}, 1, notified},
		"never confirmed, then refused":   {published{err: bus.ErrQueueFull}, 2, notified},
		"never confirmed, then not sent":  {published{err: bus.ErrDisconnected}, 2, notified},
		"refused":                         {published{err: bus.ErrQueueFull}, 1, ""},
		"not sent":                        {published{err: bus.ErrDisconnected}, 1, ""},
		"swallowed: the id was another's": {published{receipt: bus.Receipt{Seq: 7, Duplicate: true}}, 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sums := &tally{sum: map[string]int{}}
			o := newCallOffs(bustest.Start(t).Connect("test"), 1, sums.count)
			o.takeBack = func(_ context.Context, _ bus.Message, seq uint64) (bool, error) { return seq == 7, nil }
			l := left(0)
			outcome := make(chan published, 1)
			l.published, l.tries = outcome, test.tries
			o.start(l)
			outcome <- test.published // the queue's word comes late
			o.stop()
			for _, how := range []string{deleted, notified, failed} {
				if want := map[bool]int{true: 1}[how == test.how]; sums.of(how) != want {
					t.Errorf("%s %d times, want %d", how, sums.of(how), want)
				}
			}
		})
	}
}

// A call that was sent again may wait in the queue that replaced the lost one:
// its caller has been told to ask anew, so it must not run.
func TestOnlyWhatMayBeInTheNewQueueIsCalledOffWithTheLostOne(t *testing.T) {
	t.Parallel()
	lost := fault.New(fault.QueueLost, "the queue was lost")
	for tries, want := range map[int]bool{1: false, 2: true, 3: true} {
		c := &exchange{env: &envelope.Envelope{Durability: pipeline.Memory, Deadline: time.Now().Add(time.Hour)}, tries: tries}
		if got := c.unwanted(lost); got != want {
			t.Errorf("sent %d times: called off %v, want %v", tries, got, want)
		}
	}
}
