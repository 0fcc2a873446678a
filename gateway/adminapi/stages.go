package adminapi

import (
	"context"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/pipelines"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Traffic is how the mesh is by what its broker says. Errors are *fault.Fault.
type Traffic interface {
	// PipelineReady returns nil when every stage of a pipeline has a host.
	PipelineReady(ctx context.Context, name string) error
	// Stage says whether a stage has a host, and what is in its queues.
	Stage(ctx context.Context, name pipeline.StageName) (call.StageState, error)
}

var _ Traffic = (*call.Service)(nil)

// census is what is known of the stages.
type census struct {
	// roster is nil where the mesh has no registry.
	roster    Roster
	pipelines Pipelines
	traffic   Traffic
}

func (c *census) list(ctx context.Context, _ *adminv1.ListStagesRequest) (*adminv1.ListStagesResponse, error) {
	stages, err := c.all(ctx)
	if err != nil {
		return nil, err
	}
	since, cause := stale(c.stale())
	return &adminv1.ListStagesResponse{Stages: stages, StaleSince: since, StaleCause: cause}, nil
}

func (c *census) look(ctx context.Context, _ *adminv1.WatchStagesRequest) (*adminv1.WatchStagesResponse, error) {
	all, err := c.list(ctx, nil)
	if err != nil {
		return nil, err
	}
	return &adminv1.WatchStagesResponse{Stages: all.GetStages(), StaleSince: all.GetStaleSince(), StaleCause: all.GetStaleCause()}, nil
}

// all returns the stages that have hosts or are part of a pipeline, sorted.
func (c *census) all(ctx context.Context) ([]*adminv1.StageStatus, error) {
	if err := c.pipelines.Ready(); err != nil {
		return nil, notHeard(err)
	}
	stages := map[string]*adminv1.StageStatus{}
	for _, s := range c.counted() {
		stages[s.Name] = statusOf(s)
	}
	for _, e := range c.pipelines.List() {
		for _, step := range e.Pipeline.Steps {
			s := stages[string(step.Stage)]
			if s == nil {
				s = &adminv1.StageStatus{Stage: string(step.Stage)}
				stages[s.GetStage()] = s
			}
			if !slices.Contains(s.GetPipelines(), string(e.Pipeline.Name)) {
				s.Pipelines = append(s.Pipelines, string(e.Pipeline.Name))
			}
		}
	}
	var out []*adminv1.StageStatus
	var work errgroup.Group
	work.SetLimit(asking)
	for _, name := range slices.Sorted(maps.Keys(stages)) {
		out = append(out, stages[name])
		work.Go(func() error {
			c.ask(ctx, stages[name])
			return nil
		})
	}
	return out, work.Wait()
}

// stale returns since when what is said of stages may be out of date, and why.
func (c *census) stale() (time.Time, error) {
	if c.roster == nil {
		return c.pipelines.Stale()
	}
	return c.roster.Stale()
}

// counted are the stages of the hosts that are known.
func (c *census) counted() []discovery.Stage {
	if c.roster == nil {
		return nil
	}
	return discovery.Stages(c.roster.Hosts())
}

func statusOf(s discovery.Stage) *adminv1.StageStatus {
	return &adminv1.StageStatus{
		Stage: s.Name, Hosts: uint32(s.Hosts), ReadyHosts: uint32(s.Ready),
		InFlight: uint32(s.InFlight), MaxInFlight: uint32(s.MaxInFlight), Running: uint32(s.Running), Slots: uint32(s.Slots),
		Spec: s.Spec, Limits: s.Limits,
	}
}

// ask fills in what the broker says of a stage.
func (c *census) ask(ctx context.Context, into *adminv1.StageStatus) {
	state, err := c.traffic.Stage(ctx, pipeline.StageName(into.GetStage()))
	if err != nil {
		into.QueuesCause = fault.From(err).Message
		return
	}
	into.Served = state.Served
	for _, q := range state.Queues {
		into.Queues = append(into.Queues, &adminv1.QueueStatus{
			Durability: q.Durability.ToProto(), Items: q.Items, Bytes: q.Bytes,
			High: q.Classes[pipeline.High], Normal: q.Classes[pipeline.Normal], Low: q.Classes[pipeline.Low],
			MaxItems: uint64(max(0, q.MaxItems)), MaxBytes: uint64(max(0, q.MaxBytes)),
		})
	}
}

// registered is what is known of the stages whose hosts the registry has heard of.
func (c *census) registered() map[pipeline.StageName]pipelines.Stage {
	out := map[pipeline.StageName]pipelines.Stage{}
	for _, s := range c.counted() {
		known := pipelines.Stage{Served: s.Ready > 0, Spec: s.Spec, Limits: s.Limits}
		for _, d := range s.Durabilities {
			known.Durabilities = append(known.Durabilities, pipeline.Durability(d))
		}
		out[pipeline.StageName(s.Name)] = known
	}
	return out
}

// answering adds those stages of a pipeline that are not known and answer at the
// broker.
func (c *census) answering(ctx context.Context, known map[pipeline.StageName]pipelines.Stage, p pipeline.Pipeline) error {
	for _, step := range p.Steps {
		if _, ok := known[step.Stage]; ok {
			continue
		}
		state, err := c.traffic.Stage(ctx, step.Stage)
		if err != nil {
			return err
		}
		if state.Served {
			known[step.Stage] = pipelines.Stage{Served: true}
		}
	}
	return nil
}
