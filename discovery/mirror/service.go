package mirror

import (
	"context"

	"github.com/stagemesh/stagemesh/discovery"
)

// Service mirrors the healthy instances of one service.
type Service struct {
	state
	watcher   discovery.Watcher
	name      string
	instances []discovery.Instance
}

var _ discovery.Observer[discovery.Snapshot] = (*Service)(nil)

// NewService returns a mirror of a service.
func NewService(w discovery.Watcher, name string) *Service {
	return &Service{state: newState(), watcher: w, name: name}
}

// Run watches the service until the context ends.
func (s *Service) Run(ctx context.Context) error {
	return s.persist(ctx, func(ctx context.Context) error { return s.watcher.Watch(ctx, s.name, s) })
}

// See implements discovery.Observer.
func (s *Service) See(now discovery.Snapshot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instances = now.Instances
	s.heard()
}

// Instances returns who was healthy last, sorted by ID. The slice is not to be
// changed.
func (s *Service) Instances() []discovery.Instance {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.instances
}
