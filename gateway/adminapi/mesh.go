package adminapi

import (
	"context"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/gateway/pipelines"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
)

// Membership is the membership of the mesh.
type Membership interface {
	Hosts() []discovery.Host
	// Loaded waits until the registry has been read for the first time.
	Loaded(ctx context.Context) error
	// Stale returns since when the registry is unreachable, and the cause.
	Stale() (since time.Time, why error)
	// Changed returns a channel that is closed with the next change.
	Changed() <-chan struct{}
}

var _ Membership = (*discovery.Membership)(nil)

// hosts implements MeshService's methods about hosts.
type hosts struct{ membership Membership }

// loadTimeout is how long a call waits for the first read of the registry.
const loadTimeout = 2 * time.Second

func (h hosts) list(ctx context.Context, in *adminv1.ListHostsRequest) (*adminv1.ListHostsResponse, error) {
	if h.membership == nil {
		return nil, fault.New(fault.NotSupported, "the mesh has no registry; its file names one in the section registry")
	}
	if stage := in.GetStage(); stage != "" {
		if err := pipeline.ValidName("stage", stage); err != nil {
			return nil, transport.InvalidField("stage", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	if err := h.membership.Loaded(ctx); err != nil {
		return nil, fault.New(fault.RegistryUnavailable, "the gateway has not heard of the registry yet").Caused(err).WithRetryAfter(retryAfter)
	}
	out := &adminv1.ListHostsResponse{}
	for _, host := range h.membership.Hosts() {
		if in.GetStage() == "" || in.GetStage() == host.Record.GetStage() {
			out.Hosts = append(out.Hosts, &adminv1.HostStatus{Record: host.Record, Alive: host.Alive})
		}
	}
	out.StaleSince, out.StaleCause = stale(h.membership.Stale())
	return out, nil
}

func (h hosts) current(ctx context.Context, in *adminv1.WatchHostsRequest) (*adminv1.WatchHostsResponse, error) {
	all, err := h.list(ctx, &adminv1.ListHostsRequest{Stage: in.GetStage()})
	if err != nil {
		return nil, err
	}
	return &adminv1.WatchHostsResponse{Hosts: all.GetHosts(), StaleSince: all.GetStaleSince(), StaleCause: all.GetStaleCause()}, nil
}

// changed returns a channel that closes with the next change of the hosts; nil without
// a registry.
func (h hosts) changed() <-chan struct{} {
	if h.membership == nil {
		return nil
	}
	return h.membership.Changed()
}

// Traffic is the state of the mesh on its broker. Errors are *fault.Fault.
type Traffic interface {
	// PipelineReady returns nil when every stage of a pipeline has a host.
	PipelineReady(ctx context.Context, name string) error
	// Stage reports whether a stage has a host, and the state of its queues.
	Stage(ctx context.Context, name pipeline.StageName) (call.StageState, error)
}

var _ Traffic = (*call.Service)(nil)

// stages implements MeshService's methods about stages.
type stages struct {
	// membership is nil if the mesh has no registry.
	membership Membership
	pipelines  Pipelines
	traffic    Traffic
}

func (s *stages) list(ctx context.Context, _ *adminv1.ListStagesRequest) (*adminv1.ListStagesResponse, error) {
	all, err := s.all(ctx)
	if err != nil {
		return nil, err
	}
	since, cause := stale(s.stale())
	return &adminv1.ListStagesResponse{Stages: all, StaleSince: since, StaleCause: cause}, nil
}

func (s *stages) current(ctx context.Context, _ *adminv1.WatchStagesRequest) (*adminv1.WatchStagesResponse, error) {
	all, err := s.list(ctx, nil)
	if err != nil {
		return nil, err
	}
	return &adminv1.WatchStagesResponse{Stages: all.GetStages(), StaleSince: all.GetStaleSince(), StaleCause: all.GetStaleCause()}, nil
}

// all returns the stages that have hosts or are part of a pipeline, sorted.
func (s *stages) all(ctx context.Context) ([]*adminv1.StageStatus, error) {
	if err := s.pipelines.Ready(); err != nil {
		return nil, registryUnavailable(err)
	}
	byName := map[string]*adminv1.StageStatus{}
	for _, stage := range s.registered() {
		byName[stage.Name] = statusOf(stage)
	}
	for _, e := range s.pipelines.List() {
		for _, step := range e.Pipeline.Steps {
			stage := byName[string(step.Stage)]
			if stage == nil {
				stage = &adminv1.StageStatus{Stage: string(step.Stage)}
				byName[stage.GetStage()] = stage
			}
			if !slices.Contains(stage.GetPipelines(), string(e.Pipeline.Name)) {
				stage.Pipelines = append(stage.Pipelines, string(e.Pipeline.Name))
			}
		}
	}
	var out []*adminv1.StageStatus
	var work errgroup.Group
	work.SetLimit(maxQueries)
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		out = append(out, byName[name])
		work.Go(func() error {
			s.addTraffic(ctx, byName[name])
			return nil
		})
	}
	return out, work.Wait()
}

// stale returns since when the stages may be out of date, and the cause.
func (s *stages) stale() (time.Time, error) {
	if s.membership == nil {
		return s.pipelines.Stale()
	}
	return s.membership.Stale()
}

// registered returns the stages of the registered hosts.
func (s *stages) registered() []discovery.Stage {
	if s.membership == nil {
		return nil
	}
	return discovery.Stages(s.membership.Hosts())
}

func statusOf(s discovery.Stage) *adminv1.StageStatus {
	return &adminv1.StageStatus{
		Stage: s.Name, Hosts: uint32(s.Hosts), ReadyHosts: uint32(s.Ready),
		InFlight: uint32(s.InFlight), MaxInFlight: uint32(s.MaxInFlight), Running: uint32(s.Running), Slots: uint32(s.Slots),
		Spec: s.Spec, Limits: s.Limits,
	}
}

// addTraffic adds the state of a stage on the broker.
func (s *stages) addTraffic(ctx context.Context, into *adminv1.StageStatus) {
	state, err := s.traffic.Stage(ctx, pipeline.StageName(into.GetStage()))
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

// known returns the registered stages in the form that pipeline checks need.
func (s *stages) known() map[pipeline.StageName]pipelines.Stage {
	out := map[pipeline.StageName]pipelines.Stage{}
	for _, stage := range s.registered() {
		known := pipelines.Stage{Served: stage.Ready > 0, Spec: stage.Spec, Limits: stage.Limits}
		for _, d := range stage.Durabilities {
			known.Durabilities = append(known.Durabilities, pipeline.Durability(d))
		}
		out[pipeline.StageName(stage.Name)] = known
	}
	return out
}

// addServed adds the stages of a pipeline that are not known but served on the broker.
func (s *stages) addServed(ctx context.Context, known map[pipeline.StageName]pipelines.Stage, p pipeline.Pipeline) error {
	for _, step := range p.Steps {
		if _, ok := known[step.Stage]; ok {
			continue
		}
		state, err := s.traffic.Stage(ctx, step.Stage)
		if err != nil {
			return err
		}
		if state.Served {
			known[step.Stage] = pipelines.Stage{Served: true}
		}
	}
	return nil
}
