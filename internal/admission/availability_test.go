package admission

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// distant is a broker whose hosts take a while to report.
type distant struct {
	takes time.Duration
	// backlog is the sum of all queues, or nil if it is not known.
	backlog *bus.Backlog

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

func (d *distant) Backlog(context.Context, pipeline.StageName, pipeline.Durability) (bus.Backlog, error) {
	if d.backlog == nil {
		return bus.Backlog{}, errors.New("no backlog")
	}
	return *d.backlog, nil
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
				a := NewAvailability(&distant{takes: 5 * time.Millisecond}, false, nil)
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
		a := NewAvailability(broker, false, nil)
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
		a := NewAvailability(broker, false, nil)
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

// A queue of 100, of which requests of normal priority may fill 80.
func TestTenantsShareAQueue(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		isShared bool
		waiting  uint64
		a, b     int
		toA, toB fault.Reason
	}{
		"alone, with room":           {true, 40, 40, 0, "", ""},
		"alone, at seven eighths":    {true, 69, 69, 0, "", ""},
		"alone, above seven eighths": {true, 70, 70, 0, fault.QueueFull, ""},
		"beside another":             {true, 70, 60, 10, "", ""},
		"with too much":              {true, 75, 65, 10, fault.QueueFull, ""},
		"of items that have left":    {true, 10, 500, 0, "", ""},
		"full":                       {true, 80, 40, 40, fault.QueueFull, fault.QueueFull},
		"one tenant":                 {false, 79, 79, 0, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := NewAvailability(&distant{backlog: &bus.Backlog{
				Items: row.waiting, Classes: map[pipeline.Class]uint64{pipeline.Normal: row.waiting}, MaxItems: 100,
			}}, row.isShared, nil)
			defer a.Stop()
			env := &envelope.Envelope{Durability: pipeline.Memory, Route: []pipeline.Hop{{Stage: "s", Step: "s"}}, Deadline: time.Now().Add(time.Minute)}
			var leave []func()
			for tenant, n := range map[string]int{"a": row.a, "b": row.b} {
				for range n {
					in := a.count(env, tenant, nil)
					in.Sent() // and the backlog has it
					leave = append(leave, in.Leave)
				}
			}
			for tenant, want := range map[string]fault.Reason{"a": row.toA, "b": row.toB} {
				if got := admit(t, a, env, tenant); got != want {
					t.Errorf("a request of %s: %q, want %q", tenant, got, want)
				}
			}
			for _, leave := range leave {
				leave()
			}
			if got := admit(t, a, env, "a"); row.waiting < 80 && got != "" {
				t.Errorf("without requests of its own a tenant gets %s", got)
			}
		})
	}
}

// Requests that come together are admitted before any of them is sent.
func TestAdmittedItemsCountBeforeTheyAreSent(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		isShared bool
		want     int
	}{"tenants": {true, 70}, "one tenant": {false, 80}} {
		a := NewAvailability(&distant{backlog: &bus.Backlog{MaxItems: 100}}, row.isShared, nil)
		defer a.Stop()
		env := &envelope.Envelope{Durability: pipeline.Memory, Route: []pipeline.Hop{{Stage: "s", Step: "s"}}, Deadline: time.Now().Add(time.Minute)}
		var admitted []*Admitted
		for range 90 {
			if in, f := a.Admit(t.Context(), env, "a", false); f == nil {
				admitted = append(admitted, in)
			}
		}
		if len(admitted) != row.want {
			t.Errorf("%s: %d of 90 are admitted, want %d", name, len(admitted), row.want)
		}
		for i, in := range admitted {
			if i%2 == 0 {
				in.Sent()
			}
			in.Leave()
		}
		if q := a.queueLocked(queueKey{"s", pipeline.Memory}); q.estimate.entering != 0 || len(q.tenants) != 0 {
			t.Errorf("%s: %d items count, and those of %v, after all have left", name, q.estimate.entering, q.tenants)
		}
	}
}

func admit(t *testing.T, a *Availability, env *envelope.Envelope, tenant string) fault.Reason {
	t.Helper()
	in, f := a.Admit(t.Context(), env, tenant, false)
	in.Leave()
	if f == nil {
		return ""
	}
	if f.RetryAfter <= 0 {
		t.Errorf("%v has no pause", f)
	}
	return f.Reason
}
