package call

import (
	"cmp"
	"context"
	"strings"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Resolve returns the pipeline of that name. If byModel is true, the name may also name
// an alias or, if there is no such alias, a model. Every name of work that a caller gives, on
// any protocol and in jobs, comes here, so that a gateway without implicit pipelines has none.
func (s *Service) Resolve(name string, byModel bool) (pipeline.Pipeline, *fault.Fault) {
	if !s.settings.Pipelines.HasImplicit() {
		return s.settings.Pipelines.Resolve(name)
	}
	ref, f := s.refOf(name, byModel)
	if f != nil {
		return pipeline.Pipeline{}, f
	}
	if ref == (payload.ModelRef{}) {
		return s.settings.Pipelines.Resolve(name)
	}
	m, _, _, f := s.findModel(ref, "")
	if f != nil {
		return pipeline.Pipeline{}, f
	}
	p := pipeline.OfStage(m.Stage)
	p.Name, p.Steps[0].Model = pipeline.Name(prefixOf(ref)+cmp.Or(ref.Alias, ref.Model)), ref
	return p, nil
}

// hasMoved reports whether the alias that a request names has moved to a model of another stage
// since the pipeline was resolved, which then is the new one.
func (s *Service) hasMoved(r incoming, p *pipeline.Pipeline) bool {
	if ref := p.Steps[0].Model; r.isShadow() || string(p.Name) != request.AliasPrefix+ref.Alias {
		return false
	}
	now, f := s.Resolve(r.Pipeline, r.ByModel)
	if f != nil || now.Steps[0].Stage == p.Steps[0].Stage {
		return false
	}
	*p = now
	return true
}

func prefixOf(ref payload.ModelRef) string {
	if ref.Alias != "" {
		return request.AliasPrefix
	}
	return request.ModelPrefix
}

// label returns the pipeline's label in metrics. It is only the prefix for all models and aliases:
// there are many.
func (s *Service) label(r *request.Request) string {
	if ref, _ := s.refOf(r.Pipeline, r.ByModel); ref != (payload.ModelRef{}) {
		return prefixOf(ref)
	}
	return s.settings.Pipelines.Label(r.Pipeline)
}

// refOf returns the model or alias of a name, none for the name of a pipeline and for unknown
// ones.
func (s *Service) refOf(name string, byModel bool) (ref payload.ModelRef, _ *fault.Fault) {
	if s.settings.Models == nil {
		return ref, nil
	}
	if id, ok := strings.CutPrefix(name, request.ModelPrefix); ok {
		return payload.ModelRef{Model: id}, nil
	}
	if alias, ok := strings.CutPrefix(name, request.AliasPrefix); ok {
		return payload.ModelRef{Alias: alias}, nil
	}
	if !byModel || s.settings.Pipelines.Has(name) {
		return ref, nil
	}
	if _, err := s.settings.Models.Alias(model.ID(name), ""); err == nil {
		return payload.ModelRef{Alias: name}, nil
	}
	if _, _, ok := s.settings.Models.Model(model.ID(name)); ok {
		return payload.ModelRef{Model: name}, nil
	}
	if err := s.settings.Models.Ready(); err != nil && fault.From(err).Retryable() {
		return ref, fault.From(err)
	}
	return ref, nil
}

// findModel returns a registered model, by an alias too, its replicas, and the shadow that also
// runs the request, if any. Without a request it is the first model of an alias.
func (s *Service) findModel(ref payload.ModelRef, request pipeline.RequestID) (m *models.Model, replicas *meshv1.ReplicasRecord, shadow model.ID, _ *fault.Fault) {
	id := model.ID(ref.Model)
	if ref.Alias != "" {
		alias, err := s.settings.Models.Alias(model.ID(ref.Alias), "")
		if err != nil {
			return nil, nil, "", fault.From(err)
		}
		if id = model.ID(alias.GetActive().GetModel()); request != "" {
			id, shadow = models.Choose(alias.GetActive(), request)
		}
	}
	m, replicas, err := s.settings.Models.Get(id)
	if err != nil {
		return nil, nil, "", fault.From(err)
	}
	return m, replicas, shadow, nil
}

// SpecOf returns a model's own inputs and outputs, by an alias too; nil where none are known.
func (s *Service) SpecOf(ref payload.ModelRef) *stagev1.Spec {
	if ref == (payload.ModelRef{}) {
		return nil
	}
	_, replicas, _, _ := s.findModel(ref, "")
	return replicas.GetSpec()
}

// modelID returns the model that a name means.
func (s *Service) modelID(name string) (model.ID, *fault.Fault) {
	ref, f := s.refOf(name, true)
	if f == nil && ref == (payload.ModelRef{}) {
		if _, f = s.settings.Pipelines.Resolve(name); f == nil {
			f = fault.Newf(fault.NotSupported, "%.*q is a pipeline or a stage, and only models are loaded", shown, name)
		}
	}
	if f != nil {
		return "", f
	}
	m, _, _, f := s.findModel(ref, "")
	if f != nil {
		return "", f
	}
	return m.ID, nil
}

// LoadModel has a host load a model or an alias's model, if none has it, and waits for that,
// MaxTimeout at most. It counts as a request in flight meanwhile, and as a use. A gateway that
// stops ends the wait; the load goes on.
func (s *Service) LoadModel(ctx context.Context, name string) error {
	id, f := s.modelID(name)
	if f == nil {
		f = s.limiter.Acquire(budget.TenantOf(ctx))
	}
	if f != nil {
		return f
	}
	defer s.limiter.Release(budget.TenantOf(ctx))
	ctx, stop, f := s.StartWait(ctx, s.settings.MaxTimeout)
	if f != nil {
		return f
	}
	defer stop()
	return s.settings.Placer.EnsureLoaded(ctx, id, models.Wanted{Replicas: 1, LastUse: time.Now()}, true)
}

// UnloadModel has all hosts unload a model or an alias's model.
func (s *Service) UnloadModel(ctx context.Context, name string) error {
	id, f := s.modelID(name)
	if f != nil {
		return f
	}
	return s.settings.Models.Evict(ctx, id)
}

// routeModels sends the steps that name a registered model of their stage to a host that has
// it, or else to the one that should load it. A host of the stage decides where the model or
// the hosts are not known here. It returns the first step that also runs on a shadow, if any.
func (s *Service) routeModels(env *envelope.Envelope) (again *shadow, _ *fault.Fault) {
	if s.settings.Models == nil {
		return nil, nil
	}
	// A host's own queue is in memory. Durable items are forwarded by the host that pulls them.
	ownQueues := env.Durability == pipeline.Memory
	for i := range env.Route {
		hop := &env.Route[i]
		if hop.Model == (payload.ModelRef{}) {
			continue
		}
		m, replicas, other, f := s.findModel(hop.Model, env.RequestID)
		if f == nil && m.Stage != hop.Stage {
			f = fault.InField(fault.InvalidRequest, "model", "model %s is one of stage %s", m.ID, m.Stage)
		}
		if f != nil && hop.Model.Alias != "" {
			return nil, f.At(string(hop.Stage), string(hop.Step), "")
		}
		if f != nil {
			continue // it may be a stage that has models of its own
		}
		if other != "" && again == nil {
			again = &shadow{hop.Step, hop.Stage, string(other)}
		}
		hop.Model = payload.ModelRef{Model: string(m.ID)}
		if !ownQueues {
			count(s.metrics.models, "to", "queue")
			continue
		}
		to := "holder"
		if hop.Host = s.settings.Placer.Holder(replicas); hop.Host == "" {
			to = "placed"
			if hop.Host, f = s.settings.Placer.Place(env.AdmittedAt, m, replicas, nil); f != nil {
				return nil, f.At(string(hop.Stage), string(hop.Step), "")
			}
		}
		count(s.metrics.models, "to", to)
	}
	return again, nil
}

// forAnyHost has the items of all steps wait in the queues of their stages.
func forAnyHost(route []pipeline.Hop) {
	for i := range route {
		route[i].Host = ""
	}
}
