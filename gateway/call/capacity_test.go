package call

import (
	"context"
	"errors"
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
	err   error
}

func (*distant) Connected() bool { return true }

func (d *distant) Alive(ctx context.Context, _ pipeline.StageName) (bus.Presence, error) {
	select {
	case <-time.After(d.takes):
		return bus.Presence{Heard: true}, d.err
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

func TestWithoutHostsCallsAreRefusedSoon(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broker := &distant{takes: 5 * time.Millisecond}
		c := newCapacity(broker)
		defer c.stop()
		const every = 10 * time.Millisecond
		if _, refused := asks(t, c, every); refused > 0 {
			t.Fatalf("%d were refused while there was a host", refused)
		}
		broker.err = bus.ErrNoHost
		_, refused := asks(t, c, every)
		if late := 50 - refused; late > int(2*capacityAge/every) {
			t.Errorf("%d calls were let in after the last host had left", late)
		}
		broker.err = nil
		_, refused = asks(t, c, every)
		if refused > int(capacityAge/every) {
			t.Errorf("%d calls were refused after a host had come", refused)
		}
	})
}
