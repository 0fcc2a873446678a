package consul_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/consul"
)

// looker is what a watcher has been told.
type looker struct {
	mu   sync.Mutex
	now  discovery.Snapshot
	lost []error
}

func (l *looker) See(s discovery.Snapshot) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = s
}

func (l *looker) Lose(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost = append(l.lost, err)
}

func (l *looker) sees(instances int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.now.Instances) == instances
}

// Answers that an agent has streamed to it do not say that there is a leader, those
// with a change no more than those where the time is over.
func TestAChangeIsNoLoss(t *testing.T) {
	t.Parallel()
	a, err := shared.Agent()
	if err != nil {
		t.Fatal(err)
	}
	const service, instances = "changing", 5
	r := client(t, a.Addr(), func(s *consul.Settings) { s.WaitTime = 50 * time.Millisecond })
	ctx, cancel := context.WithCancel(context.Background())
	var working sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		working.Wait()
	})
	l := &looker{}
	working.Go(func() {
		if err := r.Watch(ctx, service, l); err != nil {
			t.Error(err)
		}
	})
	for i := range instances {
		working.Go(func() {
			if err := r.Announce(ctx, discovery.Instance{Service: service, ID: strconv.Itoa(i)}, func(error) {}); err != nil {
				t.Error(err)
			}
		})
		eventually(t, "it is seen", func() bool { return l.sees(i + 1) })
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := errors.Join(l.lost...); err != nil {
		t.Errorf("the registry was lost %d times: %v", len(l.lost), err)
	}
}
