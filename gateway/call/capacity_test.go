package call

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// distant is a broker whose word about hosts takes a while.
type distant struct {
	takes time.Duration

	mu     sync.Mutex
	queues []pipeline.Durability
	err    error
}

// says changes what it says of hosts.
func (d *distant) says(err error, queues ...pipeline.Durability) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.queues, d.err = queues, err
}

func (*distant) Connected() bool { return true }

func (d *distant) Alive(ctx context.Context, _ pipeline.StageName) (bus.Presence, error) {
	select {
	case <-time.After(d.takes):
		d.mu.Lock()
		defer d.mu.Unlock()
		return bus.Presence{Heard: true, Durabilities: d.queues}, d.err
	case <-ctx.Done():
		return bus.Presence{}, ctx.Err()
	}
}

func (*distant) Backlog(context.Context, pipeline.StageName, pipeline.Durability) (bus.Backlog, error) {
	return bus.Backlog{}, errors.New("nothing is known")
}

// asks has 50 calls check for hosts, one after the other, and returns how many of them
// waited, and were refused.
func asks(t *testing.T, c *capacity, every time.Duration) (waited, refused int) {
	t.Helper()
	for range 50 {
		begun := time.Now()
		f := c.check(t.Context(), []pipeline.Hop{{Stage: "a", Step: "a"}}, pipeline.Memory)
		if time.Since(begun) > 0 {
			waited++
		}
		switch {
		case f == nil:
		case f.Reason == fault.NoCapacity:
			refused++
		default:
			t.Fatal(f)
		}
		<-time.After(every)
	}
	return waited, refused
}

func TestASteadyLoadWaitsForNoWordAboutHosts(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		every  time.Duration
		waited int
	}{
		"steady":                    {20 * time.Millisecond, 1},
		"while the last word holds": {150 * time.Millisecond, 1},
		"seldom":                    {250 * time.Millisecond, 50},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := newCapacity(&distant{takes: 5 * time.Millisecond})
				defer c.stop()
				if waited, refused := asks(t, c, test.every); waited != test.waited || refused > 0 {
					t.Errorf("%d of 50 waited, %d were refused; want %d and none", waited, refused, test.waited)
				}
			})
		})
	}
}

// A host leaves, and comes back, at one moment after the other between two questions.
func TestWithoutHostsCallsAreRefusedSoon(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broker := &distant{takes: 5 * time.Millisecond}
		c := newCapacity(broker)
		defer c.stop()
		const every = 10 * time.Millisecond
		const soon = int(capacityAge/every) + 1
		for range 10 {
			if _, refused := asks(t, c, every); refused > soon {
				t.Errorf("%d calls were refused after a host had come", refused)
			}
			broker.says(bus.ErrNoHost)
			if _, refused := asks(t, c, every); 50-refused > soon {
				t.Errorf("%d calls were let in after the last host had left", 50-refused)
			}
			broker.says(nil)
			<-time.After(13 * time.Millisecond)
		}
	})
}

func TestAQueueThatIsNotThereIsAskedForAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broker := &distant{takes: 5 * time.Millisecond}
		broker.says(nil, pipeline.File)
		c := newCapacity(broker)
		defer c.stop()
		route := []pipeline.Hop{{Stage: "a", Step: "a"}}
		if f := c.check(t.Context(), route, pipeline.Memory); f == nil || f.Reason != fault.NotSupported {
			t.Fatalf("got %v", f)
		}
		broker.says(nil, pipeline.File, pipeline.Memory)
		<-time.After(capacityAge + time.Millisecond)
		if f := c.check(t.Context(), route, pipeline.Memory); f != nil {
			t.Errorf("the refusal is told again: %v", f)
		}
	})
}
