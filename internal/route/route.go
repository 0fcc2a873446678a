// Package route decides where requests go: which pipeline, model or alias a name means, and which
// hosts get the steps that run models.
//
//	router := route.New(pipelines, models, placer)
//	p, f := router.Resolve("alias:digits", false) // the pipeline of one step
//	decision, f := router.Place(env)              // sets the models and hosts of the envelope's steps
//
// It reads what the registries have here, and sends nothing. A Router is safe for concurrent use.
package route

import (
	"cmp"
	"context"
	"strings"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Router knows what callers may name.
type Router struct {
	pipelines *pipelines.Store
	// models are those that stages load on demand, and placer chooses their hosts; nil where there
	// are none.
	models *models.Registry
	placer *models.Placer
}

// New returns a router. Without models and their placer it knows only pipelines.
func New(p *pipelines.Store, m *models.Registry, placer *models.Placer) *Router {
	return &Router{p, m, placer}
}

// Resolve returns the pipeline of that name. If byModel is true, the name may also name
// an alias or, if there is no such alias, a model. Every name of work that a caller gives, on
// any protocol and in jobs, comes here, so that a gateway without implicit pipelines has none.
func (r *Router) Resolve(name string, byModel bool) (pipeline.Pipeline, *fault.Fault) {
	if !r.pipelines.HasImplicit() {
		return r.pipelines.Resolve(name)
	}
	ref, f := r.refOf(name, byModel)
	if f != nil {
		return pipeline.Pipeline{}, f
	}
	if ref == (payload.ModelRef{}) {
		return r.pipelines.Resolve(name)
	}
	m, _, _, f := r.findModel(ref, "")
	if f != nil {
		return pipeline.Pipeline{}, f
	}
	p := pipeline.OfStage(m.Stage)
	p.Name, p.Steps[0].Model = pipeline.Name(prefixOf(ref)+cmp.Or(ref.Alias, ref.Model)), ref
	return p, nil
}

// Moved reports whether the alias that a name means has moved to a model of another stage since
// it was resolved as the pipeline, which then is the new one.
func (r *Router) Moved(name string, byModel bool, p *pipeline.Pipeline) bool {
	if string(p.Name) != request.AliasPrefix+p.Steps[0].Model.Alias {
		return false
	}
	now, f := r.Resolve(name, byModel)
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

// Label returns a name's label in metrics. It is only the prefix for all models and aliases: there
// are many.
func (r *Router) Label(name string, byModel bool) string {
	if ref, _ := r.refOf(name, byModel); ref != (payload.ModelRef{}) {
		return prefixOf(ref)
	}
	return r.pipelines.Label(name)
}

// refOf returns the model or alias of a name, none for the name of a pipeline and for unknown
// ones.
func (r *Router) refOf(name string, byModel bool) (ref payload.ModelRef, _ *fault.Fault) {
	if r.models == nil {
		return ref, nil
	}
	if id, ok := strings.CutPrefix(name, request.ModelPrefix); ok {
		return payload.ModelRef{Model: id}, nil
	}
	if alias, ok := strings.CutPrefix(name, request.AliasPrefix); ok {
		return payload.ModelRef{Alias: alias}, nil
	}
	if !byModel || r.pipelines.Has(name) {
		return ref, nil
	}
	if _, err := r.models.Alias(model.ID(name), ""); err == nil {
		return payload.ModelRef{Alias: name}, nil
	}
	if _, _, ok := r.models.Model(model.ID(name)); ok {
		return payload.ModelRef{Model: name}, nil
	}
	if err := r.models.Ready(); err != nil && fault.From(err).Retryable() {
		return ref, fault.From(err)
	}
	return ref, nil
}

// findModel returns a registered model, by an alias too, its replicas, and the shadow that also
// runs the request, if any. Without a request it is the first model of an alias.
func (r *Router) findModel(ref payload.ModelRef, request pipeline.RequestID) (m *models.Model, replicas *meshv1.ReplicasRecord, shadow model.ID, _ *fault.Fault) {
	id := model.ID(ref.Model)
	if ref.Alias != "" {
		alias, err := r.models.Alias(model.ID(ref.Alias), "")
		if err != nil {
			return nil, nil, "", fault.From(err)
		}
		if id = model.ID(alias.GetActive().GetModel()); request != "" {
			id, shadow = models.Choose(alias.GetActive(), request)
		}
	}
	m, replicas, err := r.models.Get(id)
	if err != nil {
		return nil, nil, "", fault.From(err)
	}
	return m, replicas, shadow, nil
}

// SpecOf returns a model's own inputs and outputs, by an alias too; nil where none are known.
func (r *Router) SpecOf(ref payload.ModelRef) *stagev1.Spec {
	if ref == (payload.ModelRef{}) {
		return nil
	}
	_, replicas, _, _ := r.findModel(ref, "")
	return replicas.GetSpec()
}

// ModelOf returns the model that a name means.
func (r *Router) ModelOf(name string) (model.ID, *fault.Fault) {
	ref, f := r.refOf(name, true)
	if f == nil && ref == (payload.ModelRef{}) {
		if _, f = r.pipelines.Resolve(name); f == nil {
			f = fault.Newf(fault.NotSupported, "%.*q is a pipeline or a stage, and only models are loaded", fault.MaxQuoted, name)
		}
	}
	if f != nil {
		return "", f
	}
	m, _, _, f := r.findModel(ref, "")
	if f != nil {
		return "", f
	}
	return m.ID, nil
}

// Load has a host load the model, if none has it, and waits for that.
func (r *Router) Load(ctx context.Context, id model.ID) error {
	return r.placer.EnsureLoaded(ctx, id, models.Wanted{Replicas: 1, LastUse: time.Now()}, true)
}

// Unload has all hosts unload the model, or an alias's model.
func (r *Router) Unload(ctx context.Context, name string) error {
	id, f := r.ModelOf(name)
	if f != nil {
		return f
	}
	return r.models.Evict(ctx, id)
}

// Pin makes the aliases of all steps models, so that each step of the request that runs several times
// runs on the same.
func (r *Router) Pin(env *envelope.Envelope) *fault.Fault {
	for i := range env.Route {
		hop := &env.Route[i]
		if r.models == nil || hop.Model.Alias == "" {
			continue
		}
		m, _, _, f := r.findModel(hop.Model, env.RequestID)
		if f != nil {
			return f.At(string(hop.Stage), string(hop.Step), "")
		}
		hop.Model = payload.ModelRef{Model: string(m.ID)}
	}
	return nil
}

// Decision is what Place has decided beside the steps' models and hosts.
type Decision struct {
	// Shadow is the first step that also runs on another model; nil for none.
	Shadow *Shadow
	// Held, Placed and Queued count the steps with a registered model: those that go to a host that
	// has it, to the host where it was placed, and to their stage's queue.
	Held, Placed, Queued int64
}

// Shadow is a step that also runs on another model, for comparison.
type Shadow struct {
	Step  pipeline.StepName
	Stage pipeline.StageName
	Model model.ID
}

// Place sends the steps that name a registered model of their stage to a host that has
// it, or else to the one that should load it. A host of the stage decides where the model or
// the hosts are not known here.
func (r *Router) Place(env *envelope.Envelope) (out Decision, _ *fault.Fault) {
	if r.models == nil {
		return out, nil
	}
	for i := range env.Route {
		hop := &env.Route[i]
		if hop.Model == (payload.ModelRef{}) {
			continue
		}
		m, replicas, other, f := r.findModel(hop.Model, env.RequestID)
		if f == nil && m.Stage != hop.Stage {
			f = fault.InField(fault.InvalidRequest, "model", "model %s is one of stage %s", m.ID, m.Stage)
		}
		if f != nil && hop.Model.Alias != "" {
			return out, f.At(string(hop.Stage), string(hop.Step), "")
		}
		if f != nil {
			continue // it may be a stage that has models of its own
		}
		if other != "" && out.Shadow == nil {
			out.Shadow = &Shadow{hop.Step, hop.Stage, other}
		}
		hop.Model = payload.ModelRef{Model: string(m.ID)}
		if env.Durability != pipeline.Memory {
			// A host's own queue is in memory. The host that pulls a durable item forwards it.
			out.Queued++
			continue
		}
		if hop.Host = r.placer.Holder(replicas); hop.Host != "" {
			out.Held++
			continue
		}
		if hop.Host, f = r.placer.Place(env.AdmittedAt, m, replicas, nil); f != nil {
			return out, f.At(string(hop.Stage), string(hop.Step), "")
		}
		out.Placed++
	}
	return out, nil
}
