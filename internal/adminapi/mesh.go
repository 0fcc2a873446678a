package adminapi

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
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

// loadTimeout is how long a call waits for the first read of the registry.
const loadTimeout = 2 * time.Second

// trafficTimeout is how long the broker may take to tell of one stage; it is below figuresTimeout.
const trafficTimeout = 2 * time.Second

func (h *handler) listHosts(ctx context.Context, in *adminv1.ListHostsRequest) (*adminv1.ListHostsResponse, error) {
	if h.Membership == nil {
		return nil, fault.New(fault.NotSupported, "the mesh has no registry; its file names one in the section registry")
	}
	if stage := in.GetStage(); stage != "" {
		if err := pipeline.ValidName("stage", stage); err != nil {
			return nil, transport.InvalidField("stage", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	if err := h.Membership.Loaded(ctx); err != nil {
		return nil, discovery.NotLoaded("hosts", err)
	}
	out := &adminv1.ListHostsResponse{}
	for _, host := range h.Membership.Hosts() {
		if in.GetStage() == "" || in.GetStage() == host.Record.GetStage() {
			out.Hosts = append(out.Hosts, &adminv1.HostStatus{Record: host.Record, Alive: host.Alive})
		}
	}
	out.StaleSince, out.StaleCause = stale(h.Membership.Stale())
	return out, nil
}

func (h *handler) currentHosts(ctx context.Context, in *adminv1.WatchHostsRequest) (*adminv1.WatchHostsResponse, error) {
	all, err := h.listHosts(ctx, &adminv1.ListHostsRequest{Stage: in.GetStage()})
	if err != nil {
		return nil, err
	}
	return &adminv1.WatchHostsResponse{Hosts: all.GetHosts(), StaleSince: all.GetStaleSince(), StaleCause: all.GetStaleCause()}, nil
}

// membershipChanged returns a channel that closes with the next change of the hosts; nil
// without a registry.
func (h *handler) membershipChanged() <-chan struct{} {
	if h.Membership == nil {
		return nil
	}
	return h.Membership.Changed()
}

// Traffic is the state of the mesh on its broker. Errors are *fault.Fault.
type Traffic interface {
	// PipelineReady returns nil when every stage of a pipeline has a host, for durable requests too if
	// alsoFile is true.
	PipelineReady(ctx context.Context, name string, alsoFile bool) error
	// FanFactors returns how many items the maps of a pipeline have for a request, by their paths.
	FanFactors(name pipeline.Name) map[string]float64
	// MaxPayload bounds the inputs of a request to the gateway, in bytes.
	MaxPayload() int
	// Stage reports whether a stage has a host, and the state of its queues.
	Stage(ctx context.Context, name pipeline.StageName) (call.StageState, error)
	// Requests returns the oldest requests in flight of the mesh that pass a stage, empty for all,
	// and how many there are.
	Requests(ctx context.Context, stage pipeline.StageName, limit int) (oldest []*meshv1.RequestReport, total uint64)
	// Ended returns the requests that ended last, the last one first, without their steps: of failed
	// ones alone if failed is true, and if stage is not empty those that failed there.
	Ended(ctx context.Context, failed bool, stage pipeline.StageName, limit int) []*meshv1.RequestReport
	// Explain returns what gateways, hosts and stored results say of a request, NOT_FOUND
	// where that is nothing.
	Explain(ctx context.Context, requestID string) (*meshv1.RequestReport, error)
	// Tap hands requests of a model or an alias to emit, as they end.
	Tap(ctx context.Context, of payload.ModelRef, percent int, emit func(call.Tapped) error) error
}

var _ Traffic = (*call.Service)(nil)

// The number of requests in a list: the default and the most.
const (
	defaultRequests = 100
	maxRequests     = 1000
)

func (h *handler) listRequests(ctx context.Context, in *adminv1.ListRequestsRequest) (*adminv1.ListRequestsResponse, error) {
	if stage := in.GetStage(); stage != "" {
		if err := pipeline.ValidName("stage", stage); err != nil {
			return nil, transport.InvalidField("stage", err)
		}
	}
	oldest, total := h.Traffic.Requests(ctx, pipeline.StageName(in.GetStage()), min(cmp.Or(int(in.GetLimit()), defaultRequests), maxRequests))
	out := &adminv1.ListRequestsResponse{Total: total}
	for _, r := range oldest {
		status := &adminv1.RequestStatus{
			RequestId: r.GetRequestId(), Pipeline: r.GetPipeline(), Tenant: r.GetTenant(), IdempotencyKey: r.GetIdempotencyKey(), Stages: r.GetStages(),
			Durability: r.GetDurability(), AdmittedAt: r.GetAdmittedAt(), Deadline: r.GetDeadline(), Gateway: r.GetGateway(), State: "in a queue",
		}
		if holders, steps := r.GetHolders(), r.GetSteps(); len(holders) > 0 && len(steps) > 0 {
			at := steps[len(steps)-1].GetTiming()
			status.Step, status.Stage, status.Host, status.Since = at.GetStep(), holders[0].GetStage(), holders[0].GetHost(), holders[0].GetSince()
			status.State = envelope.StateText(holders[0].GetState(), false)
		}
		out.Requests = append(out.Requests, status)
	}
	return out, nil
}

func (h *handler) listEndedRequests(ctx context.Context, in *adminv1.ListEndedRequestsRequest) (*adminv1.ListEndedRequestsResponse, error) {
	if stage := in.GetStage(); stage != "" {
		if err := pipeline.ValidName("stage", stage); err != nil {
			return nil, transport.InvalidField("stage", err)
		}
	}
	limit := min(cmp.Or(int(in.GetLimit()), defaultRequests), maxRequests)
	return &adminv1.ListEndedRequestsResponse{Requests: h.Traffic.Ended(ctx, in.GetFailed(), pipeline.StageName(in.GetStage()), limit)}, nil
}

func (h *handler) listMetrics(ctx context.Context, _ *adminv1.ListMetricsRequest) (*adminv1.ListMetricsResponse, error) {
	processes, err := h.Metrics(ctx)
	if err != nil {
		return nil, fault.New(fault.BrokerUnavailable, "the broker cannot be reached, so the processes of the mesh are not asked").Caused(err)
	}
	return &adminv1.ListMetricsResponse{Processes: processes}, nil
}

func (h *handler) listStages(ctx context.Context, _ *adminv1.ListStagesRequest) (*adminv1.ListStagesResponse, error) {
	all, err := h.stages(ctx)
	if err != nil {
		return nil, err
	}
	since, cause := stale(h.stagesStale())
	out := &adminv1.ListStagesResponse{Stages: all, StaleSince: since, StaleCause: cause}
	if h.Store != nil {
		if f := h.Store(); f != nil {
			out.StoreCause = f.Message
		}
	}
	return out, nil
}

func (h *handler) currentStages(ctx context.Context, _ *adminv1.WatchStagesRequest) (*adminv1.WatchStagesResponse, error) {
	all, err := h.listStages(ctx, nil)
	if err != nil {
		return nil, err
	}
	return &adminv1.WatchStagesResponse{Stages: all.GetStages(), StaleSince: all.GetStaleSince(), StaleCause: all.GetStaleCause(), StoreCause: all.GetStoreCause()}, nil
}

// stages returns the stages that have hosts or are part of a pipeline, sorted.
func (h *handler) stages(ctx context.Context) ([]*adminv1.StageStatus, error) {
	if err := h.Pipelines.Ready(); err != nil {
		return nil, discovery.Unavailable(err)
	}
	byName := map[string]*adminv1.StageStatus{}
	for _, stage := range h.registered() {
		byName[stage.Name] = statusOf(stage)
	}
	for _, e := range h.Pipelines.List() {
		for _, step := range e.Pipeline.StageSteps() {
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
			h.addTraffic(ctx, byName[name])
			if h.HostsWanted != nil {
				byName[name].HostsWanted = h.HostsWanted(pipeline.StageName(name))
			}
			return nil
		})
	}
	return out, work.Wait()
}

// stagesStale returns since when the stages may be out of date, and the cause.
func (h *handler) stagesStale() (time.Time, error) {
	if h.Membership == nil {
		return h.Pipelines.Stale()
	}
	return h.Membership.Stale()
}

// registered returns the stages of the registered hosts.
func (h *handler) registered() []discovery.Stage {
	if h.Membership == nil {
		return nil
	}
	return discovery.Stages(h.Membership.Hosts())
}

func statusOf(s discovery.Stage) *adminv1.StageStatus {
	return &adminv1.StageStatus{
		Stage: s.Name, Hosts: uint32(s.Hosts), ReadyHosts: uint32(s.Ready),
		InFlight: uint32(s.InFlight), MaxInFlight: uint32(s.MaxInFlight), Running: uint32(s.Running), Slots: uint32(s.Slots),
		Spec: s.Spec, Limits: s.Limits, UnhealthyCause: s.Unhealthy,
	}
}

// addTraffic adds the state of a stage on the broker.
func (h *handler) addTraffic(ctx context.Context, into *adminv1.StageStatus) {
	ctx, cancel := context.WithTimeout(ctx, trafficTimeout)
	defer cancel()
	state, err := h.Traffic.Stage(ctx, pipeline.StageName(into.GetStage()))
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

// knownStages returns the registered stages in the form that pipeline checks need.
func (h *handler) knownStages() map[pipeline.StageName]pipelines.Stage {
	out := map[pipeline.StageName]pipelines.Stage{}
	for _, stage := range h.registered() {
		known := pipelines.Stage{Served: stage.Ready > 0, Spec: stage.Spec, Limits: stage.Limits}
		for _, d := range stage.Durabilities {
			known.Durabilities = append(known.Durabilities, pipeline.Durability(d))
		}
		out[pipeline.StageName(stage.Name)] = known
	}
	return out
}

// addServed adds the stages of a pipeline that are not known but served on the broker.
func (h *handler) addServed(ctx context.Context, known map[pipeline.StageName]pipelines.Stage, p pipeline.Pipeline) error {
	for _, step := range p.StageSteps() {
		if _, ok := known[step.Stage]; ok {
			continue
		}
		state, err := h.Traffic.Stage(ctx, step.Stage)
		if err != nil {
			return err
		}
		if state.Served {
			known[step.Stage] = pipelines.Stage{Served: true}
		}
	}
	return nil
}
