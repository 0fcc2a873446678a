package admission

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

// distant is a broker whose hosts take a while to report.
type distant struct {
	takes time.Duration

	mu     sync.Mutex
	queues []pipeline.Durability
	err    error
}

// set changes the hosts' report.
func (d *distant) set(err error, queues ...pipeline.Durability) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.queues, d.err = queues, err
}

func (*distant) Connected() bool { return true }

func (d *distant) Alive(ctx context.Context, _ pipeline.StageName) (bus.Availability, error) {
	select {
	case <-time.After(d.takes):
		d.mu.Lock()
		defer d.mu.Unlock()
		return bus.Availability{Answered: true, Durabilities: d.queues}, d.err
	case <-ctx.Done():
		return bus.Availability{}, ctx.Err()
	}
}

func (*distant) Backlog(context.Context, pipeline.StageName, pipeline.Durability) (bus.Backlog, error) {
	return bus.Backlog{}, errors.New("no backlog")
}

// check checks for hosts 50 times, one after the other, and returns how many checks
// waited, and how many rejected.
func check(t *testing.T, a *Availability, every time.Duration) (waited, rejected int) {
	t.Helper()
	for range 50 {
		begun := time.Now()
		f := a.CheckHosts(t.Context(), []pipeline.Hop{{Stage: "a", Step: "a"}}, pipeline.Memory)
		if time.Since(begun) > 0 {
			waited++
		}
		switch {
		case f == nil:
		case f.Reason == fault.NoCapacity:
			rejected++
		default:
			t.Fatal(f)
		}
		<-time.After(every)
	}
	return waited, rejected
}

func TestSteadyLoadDoesNotWaitForHosts(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		every  time.Duration
		waited int
	}{
		"steady":                           {20 * time.Millisecond, 1},
		"while the last report is current": {150 * time.Millisecond, 1},
		"seldom":                           {250 * time.Millisecond, 50},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				a := NewAvailability(&distant{takes: 5 * time.Millisecond}, nil)
				defer a.Stop()
				if waited, rejected := check(t, a, test.every); waited != test.waited || rejected > 0 {
					t.Errorf("%d of 50 waited, %d were rejected; want %d and none", waited, rejected, test.waited)
				}
			})
		})
	}
}

// A host leaves, and comes back, at each moment between two questions in turn.
func TestLostHostsRejectSoon(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broker := &distant{takes: 5 * time.Millisecond}
		a := NewAvailability(broker, nil)
		defer a.Stop()
		const every = 10 * time.Millisecond
		const soon = int(reportAge/every) + 1
		for range 10 {
			if _, rejected := check(t, a, every); rejected > soon {
				t.Errorf("%d calls were rejected after a host had come", rejected)
			}
			broker.set(bus.ErrNoHost)
			if _, rejected := check(t, a, every); 50-rejected > soon {
				t.Errorf("%d calls were admitted after the last host had left", 50-rejected)
			}
			broker.set(nil)
			<-time.After(13 * time.Millisecond)
		}
	})
}

func TestMissingQueueIsAskedForAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broker := &distant{takes: 5 * time.Millisecond}
		broker.set(nil, pipeline.File)
		a := NewAvailability(broker, nil)
		defer a.Stop()
		route := []pipeline.Hop{{Stage: "a", Step: "a"}}
		if f := a.CheckHosts(t.Context(), route, pipeline.Memory); f == nil || f.Reason != fault.NotSupported {
			t.Fatalf("got %v", f)
		}
		broker.set(nil, pipeline.File, pipeline.Memory)
		<-time.After(reportAge + time.Millisecond)
		if f := a.CheckHosts(t.Context(), route, pipeline.Memory); f != nil {
			t.Errorf("the old report is used: %v", f)
		}
	})
}
