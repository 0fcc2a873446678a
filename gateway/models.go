package gateway

import (
	"context"
	"iter"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/oip"
	registry "github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// specsAge is how long the specs that hosts report are used.
const specsAge = time.Second

// models are the gateway's pipelines, stages, aliases and registered models as models of the Open
// Inference Protocol.
type models struct {
	gateway *Gateway

	mu sync.Mutex
	// specs are the stages' inputs and outputs, and limits bound their batches, as their hosts
	// reported them by readAt.
	specs  map[string]*stagev1.Spec
	limits map[string]*stagev1.Limits
	readAt time.Time
	// graphs caches pipelines by their first steps, until the specs are read again.
	graphs map[*pipeline.Step]graph
}

var _ oip.Models = (*models)(nil)

// Version implements oip.Models.
func (m *models) Version() string { return process.Version() }

// Ready implements oip.Models.
func (m *models) Ready(ctx context.Context, name string) error { return m.gateway.health(ctx, name) }

// Model implements oip.Models.
func (m *models) Model(name string) (oip.Model, error) {
	p, f := m.gateway.router.Resolve(name, true)
	if f != nil {
		return oip.Model{}, f
	}
	if p.HasBlocks() {
		return m.graph(p).model, nil
	}
	out, last := m.inputs(p), m.specOf(p.Steps[len(p.Steps)-1])
	out.Outputs, out.Streams, out.MaxRows = last.GetOutputs(), last.GetStream(), m.maxRows(p)
	return out, nil
}

// graph is a pipeline with blocks or keep, as a model.
type graph struct {
	model oip.Model
	// inputs are the model's inputs, and those that only conditions read, which have no type.
	inputs []*stagev1.PartSpec
}

// graph returns a pipeline as a model. Callers share the result and must not change it.
func (m *models) graph(p pipeline.Pipeline) graph {
	specs := m.stageSpecs()
	m.mu.Lock()
	out, is := m.graphs[&p.Steps[0]]
	m.mu.Unlock()
	if is {
		return out
	}
	stages := stagesOf(specs)
	out = graph{model: oip.Model{
		Outputs: pipelines.Outputs(p, stages), Keep: pipelines.Reads(p, stages), MaxRows: m.maxRows(p), IsOpen: p.Steps[0].IsBlock(),
	}}
	if !out.model.IsOpen {
		out.model.Inputs = m.inputsOf(p.Steps[0])
		out.inputs = slices.Clone(out.model.Inputs)
	}
	var asked []pipelines.Input
	hasOwnSpec := func(s pipeline.Step) bool { return m.gateway.router.SpecOf(s.Model) != nil }
	if !slices.ContainsFunc(p.StageSteps(), hasOwnSpec) {
		asked = pipelines.Inputs(p, stages)
	}
	for _, in := range asked {
		if slices.ContainsFunc(out.inputs, func(other *stagev1.PartSpec) bool { return other.GetName() == in.GetName() }) {
			continue
		}
		out.inputs = append(out.inputs, in.PartSpec)
		if out.model.IsOpen && in.GetBody() != nil {
			out.model.Inputs = append(out.model.Inputs, in.PartSpec)
			if !in.Rows {
				out.model.MaxRows = 0
			}
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.graphs != nil {
		m.graphs[&p.Steps[0]] = out
	}
	return out
}

// inputs returns what a model has of the parts that callers of a pipeline send, also of those that only
// conditions read.
func (m *models) inputs(p pipeline.Pipeline) oip.Model {
	switch {
	case p.HasBlocks():
		g := m.graph(p)
		return oip.Model{Inputs: g.inputs, IsOpen: g.model.IsOpen}
	case len(p.Keep) > 0:
		g := m.graph(p)
		return oip.Model{Inputs: g.model.Inputs, Kept: g.inputs[len(g.model.Inputs):], Keep: p.Keep}
	}
	return oip.Model{Inputs: m.inputsOf(p.Steps[0])}
}

// inputsOf returns the inputs of a first step, by the names that callers use.
func (m *models) inputsOf(first pipeline.Step) []*stagev1.PartSpec {
	out := slices.Clone(m.specOf(first).GetInputs())
	for i, spec := range out {
		if name := first.Inputs[spec.GetName()]; name != "" {
			out[i] = proto.CloneOf(spec)
			out[i].Name = name
		}
	}
	return out
}

// maxRows returns how many rows all steps of a pipeline take in a batch; 0 where one has none.
func (m *models) maxRows(p pipeline.Pipeline) (out uint32) {
	for i, step := range p.StageSteps() {
		if m.specOf(step).GetBatchAxis() != stagev1.BatchAxis_BATCH_AXIS_ROWS {
			return 0
		}
		m.mu.Lock()
		if most := m.limits[string(step.Stage)].GetMaxSize(); i == 0 || most < out {
			out = most
		}
		m.mu.Unlock()
	}
	return out
}

// stagesOf returns the stages of known specs in the form that checks of pipelines need.
func stagesOf(specs map[string]*stagev1.Spec) map[pipeline.StageName]pipelines.Stage {
	out := map[pipeline.StageName]pipelines.Stage{}
	for name, spec := range specs {
		out[pipeline.StageName(name)] = pipelines.Stage{Served: true, Spec: spec}
	}
	return out
}

// Statistics implements oip.Models.
func (m *models) Statistics(ctx context.Context, name string) ([]call.Statistics, error) {
	if name == "" {
		return m.gateway.service.Statistics(ctx, ""), nil
	}
	p, f := m.gateway.router.Resolve(name, true)
	if f != nil {
		return nil, f
	}
	out := m.gateway.service.Statistics(ctx, string(p.Name))
	out[0].Name = name
	return out, nil
}

// specOf returns the inputs and outputs of a step: its model's own, as far as they are known, or
// its stage's.
func (m *models) specOf(step pipeline.Step) *stagev1.Spec {
	if spec := m.gateway.router.SpecOf(step.Model); spec != nil {
		return spec
	}
	return m.stageSpecs()[string(step.Stage)]
}

// indexPage is how many models are read from the registry at a time.
const indexPage = 1000

// Index implements oip.Models.
func (m *models) Index(onlyReady bool) (iter.Seq[oip.Indexed], error) {
	known := m.gateway.registry
	if err := known.Ready(); err != nil {
		return nil, err
	}
	return func(yield func(oip.Indexed) bool) {
		for next := model.ID(""); ; {
			var page []*registry.Model
			var replicas []*meshv1.ReplicasRecord
			page, replicas, next = known.List("", next, indexPage)
			for i, now := 0, time.Now(); i < len(page); i++ {
				one := oip.Indexed{Name: string(page[i].ID), State: oip.Unavailable, Reason: "unloaded"}
				switch state, failure := registry.BestState(registry.LiveReplicas(replicas[i], now)); state {
				case meshv1.ReplicaState_REPLICA_STATE_LOADED:
					one.State, one.Reason = oip.Ready, ""
				case meshv1.ReplicaState_REPLICA_STATE_LOADING:
					one.State, one.Reason = oip.Loading, ""
				case meshv1.ReplicaState_REPLICA_STATE_FAILED:
					one.Reason = failure.GetHost() + ": " + failure.GetMessage()
				}
				if (!onlyReady || one.State == oip.Ready) && !yield(one) {
					return
				}
			}
			if next == "" {
				return
			}
		}
	}, nil
}

// Load implements oip.Models.
func (m *models) Load(ctx context.Context, name string) error {
	return m.control(ctx, "loaded", name, m.gateway.service.LoadModel)
}

// Unload implements oip.Models.
func (m *models) Unload(ctx context.Context, name string) error {
	return m.control(ctx, "unloaded", name, m.gateway.router.Unload)
}

// control changes a model, if callers may do that.
func (m *models) control(ctx context.Context, how, name string, change func(context.Context, string) error) error {
	if !m.gateway.settings.ModelControl {
		return fault.New(fault.PermissionDenied, "callers of this port may not load or unload models; gateway.model_control allows it")
	}
	err := change(ctx, name)
	if err == nil {
		m.gateway.log.Info("model "+how, "name", name)
	}
	return err
}

// stageSpecs returns the inputs and outputs of stages, by stage name.
func (m *models) stageSpecs() map[string]*stagev1.Spec {
	if m.gateway.members == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if now := time.Now(); now.Sub(m.readAt) >= specsAge {
		m.specs, m.limits, m.readAt = map[string]*stagev1.Spec{}, map[string]*stagev1.Limits{}, now
		m.graphs = map[*pipeline.Step]graph{}
		for _, s := range discovery.Stages(m.gateway.members.Hosts()) {
			m.specs[s.Name], m.limits[s.Name] = s.Spec, s.Limits
		}
	}
	return m.specs
}
