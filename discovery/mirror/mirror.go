package mirror

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
)

// state is what both mirrors have in common.
type state struct {
	mu      sync.RWMutex
	changed chan struct{}
	loaded  chan struct{}
	// since is when the registry was lost, zero where it was not, and why.
	since time.Time
	why   error
}

func newState() state {
	return state{changed: make(chan struct{}), loaded: make(chan struct{})}
}

// ErrNotLoaded says that the registry has not been heard of yet.
var ErrNotLoaded = errors.New("the registry has not been heard of yet")

// heard books what was seen; the caller has the lock.
func (s *state) heard() {
	select {
	case <-s.loaded:
	default:
		close(s.loaded)
	}
	s.since, s.why = time.Time{}, nil
	s.turn()
}

// turn wakes those who wait for a change; the caller has the lock.
func (s *state) turn() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Lose implements discovery.Observer.
func (s *state) Lose(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.since.IsZero() {
		s.since = time.Now()
	}
	s.why = err
	s.turn()
}

// Changed returns a channel that is closed with the next change, of what there is or
// of whether it is stale. It is to be had before what there is.
func (s *state) Changed() <-chan struct{} {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.changed
}

// Loaded waits until the registry was heard of for the first time.
func (s *state) Loaded(ctx context.Context) error {
	select {
	case <-s.loaded:
		return nil
	case <-ctx.Done():
		return errors.Join(s.Missing(), ctx.Err())
	}
}

// askAgain is how long it takes until a registry is asked again that has refused the
// credentials.
const askAgain = 2 * time.Second

// persist watches until the context ends. A registry that refuses the credentials is
// lost like one that is away: they may be mended, and what is mirrored is good meanwhile.
func (s *state) persist(ctx context.Context, watch func(context.Context) error) error {
	again := time.NewTimer(askAgain)
	defer again.Stop()
	for {
		err := watch(ctx)
		if !errors.Is(err, discovery.ErrDenied) {
			return err
		}
		s.Lose(err)
		again.Reset(askAgain)
		select {
		case <-again.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// Missing returns nil once the registry was heard of for the first time, before that
// ErrNotLoaded and why.
func (s *state) Missing() error {
	select {
	case <-s.loaded:
		return nil
	default:
		s.mu.RLock()
		defer s.mu.RUnlock()
		return errors.Join(ErrNotLoaded, s.why)
	}
}

// Stale returns since when the registry cannot be reached, and why; the zero time
// where it can.
func (s *state) Stale() (since time.Time, why error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.since, s.why
}
