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
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// serviceRecorder is an observer that keeps what it receives.
type serviceRecorder struct {
	mu   sync.Mutex
	now  discovery.Snapshot
	lost []error
}

func (l *serviceRecorder) OnUpdate(s discovery.Snapshot) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = s
}

func (l *serviceRecorder) OnDisconnect(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost = append(l.lost, err)
}

func (l *serviceRecorder) has(instances int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.now.Instances) == instances
}

// An agent with streaming never reports a leader, neither with a change nor at the end of
// the wait.
func TestStreamedChangeIsNoDisconnect(t *testing.T) {
	t.Parallel()
	a, err := shared.Agent()
	if err != nil {
		t.Fatal(err)
	}
	const service, instances = "changing", 5
	r := client(t, a.Addr(), func(s *consul.Settings) { s.WaitTime = 50 * time.Millisecond })
	l := &serviceRecorder{}
	testbed.Background(t, func(ctx context.Context) error { return r.Watch(ctx, service, l) })
	for i := range instances {
		testbed.Background(t, func(ctx context.Context) error {
			return r.Announce(ctx, discovery.Instance{Service: service, ID: strconv.Itoa(i)}, func(error) {})
		})
		eventually(t, "the instance is healthy", func() bool { return l.has(i + 1) })
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := errors.Join(l.lost...); err != nil {
		t.Errorf("the watcher was disconnected %d times: %v", len(l.lost), err)
	}
}
