package call

import (
	"context"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/route"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Resolve is the router's, for callers that have no router.
func (s *Service) Resolve(name string, byModel bool) (pipeline.Pipeline, *fault.Fault) {
	return s.settings.Router.Resolve(name, byModel)
}

// LoadModel loads a model, or an alias's model, and waits for that, MaxTimeout at most. It counts as a request in
// flight meanwhile, and as a use. A gateway that stops ends the wait; the load goes on.
func (s *Service) LoadModel(ctx context.Context, name string) error {
	tenant := budget.TenantOf(ctx)
	id, f := s.settings.Router.ModelOf(name)
	if f == nil {
		f = s.limiter.Acquire(tenant)
	}
	if f != nil {
		return f
	}
	defer s.limiter.Release(tenant)
	ctx, stop, f := s.StartWait(ctx, s.settings.MaxTimeout)
	if f != nil {
		return f
	}
	defer stop()
	return s.settings.Router.Load(ctx, id)
}

// placeModels is the router's Place. It returns the first step that also runs on a shadow, if any.
func (s *Service) placeModels(env *envelope.Envelope) (*route.Shadow, *fault.Fault) {
	d, f := s.settings.Router.Place(env)
	count(s.metrics.models, d.Held, "to", "holder")
	count(s.metrics.models, d.Placed, "to", "placed")
	count(s.metrics.models, d.Queued, "to", "queue")
	return d.Shadow, f
}

// forAnyHost has the items of all steps wait in the queues of their stages.
func forAnyHost(route []pipeline.Hop) {
	for i := range route {
		route[i].Host = ""
	}
}
