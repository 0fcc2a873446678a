package load_test

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/gateway/load"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	step  = 10 * time.Millisecond
	every = 100 * time.Millisecond
)

// stage is a simulated stage with one queue, whose gateway asks about it ten
// times a second.
type stage struct {
	load.Queue
	now time.Time
	// rate is what its hosts take off the queue, in items a second; here and
	// other are what this gateway and others send.
	rate, here, other float64
	// atOnce is how many items the hosts run at once, without any waiting.
	atOnce float64
	bounds int64

	items, came    float64
	unsent         float64
	next           time.Time
	epoch          string
	askedOtherwise func(*load.Sample)
}

func newStage(rate float64) *stage {
	return &stage{now: time.Unix(1000, 0), rate: rate, epoch: "first"}
}

// pass lets time pass.
func (s *stage) pass(d time.Duration) {
	for end := s.now.Add(d); s.now.Before(end); s.now = s.now.Add(step) {
		if !s.now.Before(s.next) {
			s.ask()
			s.next = s.now.Add(every)
		}
		s.unsent += s.here * step.Seconds()
		for ; s.unsent >= 1; s.unsent-- {
			s.Sent(pipeline.Normal)
		}
		came := (s.here + s.other) * step.Seconds()
		s.came += came
		s.items = max(0, s.items+came-s.rate*step.Seconds())
	}
}

func (s *stage) ask() {
	sample := load.Sample{
		At: s.now, Taken: s.now, Own: s.Own(), After: s.Own(), Epoch: s.epoch, Items: load.PerClass{0, uint64(s.items), 0}, Total: uint64(s.items),
		Bytes: uint64(s.items) * 100, Last: uint64(s.came), MaxItems: s.bounds, Busy: s.items > s.atOnce,
	}
	if s.askedOtherwise != nil {
		s.askedOtherwise(&sample)
	}
	s.Observe(sample)
}

// burst puts items into the queue at once.
func (s *stage) burst(items int) {
	for range items {
		s.Sent(pipeline.Normal)
	}
	s.items += float64(items)
	s.came += float64(items)
}

func (s *stage) wait() (time.Duration, bool) { return s.Queue.Wait(pipeline.Normal, s.now) }

func (s *stage) wantWait(t *testing.T, want time.Duration, within float64) {
	t.Helper()
	got, known := s.wait()
	if !known || got.Seconds() < want.Seconds()*(1-within) || got.Seconds() > want.Seconds()*(1+within) {
		t.Errorf("the wait is %s (known: %t), want %s", got, known, want)
	}
}
