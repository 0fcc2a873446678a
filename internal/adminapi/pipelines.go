package adminapi

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Pipelines reads and changes the pipelines of the mesh. Errors are *fault.Fault.
type Pipelines interface {
	// Ready returns nil when pipelines are served, and the cause otherwise.
	Ready() error
	List() []pipelines.Entry
	Get(name pipeline.Name) (pipelines.Entry, error)
	// Plan returns the served pipeline of the same name, nil if there is none, and the
	// effect of Apply.
	Plan(p pipeline.Pipeline) (*pipelines.Entry, adminv1.PipelineChange)
	Apply(ctx context.Context, p pipeline.Pipeline, expect *uint64) (pipelines.Entry, adminv1.PipelineChange, error)
	Delete(ctx context.Context, name pipeline.Name, expect *uint64) error
	// Stale returns since when the registry is unreachable, and the cause.
	Stale() (since time.Time, why error)
	// Changed returns a channel that is closed with the next change.
	Changed() <-chan struct{}
}

var _ Pipelines = (*pipelines.Store)(nil)

// maxQueries is how many queries to the broker one call has open at a time.
const maxQueries = 16

func (h *handler) listPipelines(ctx context.Context, _ *adminv1.ListPipelinesRequest) (*adminv1.ListPipelinesResponse, error) {
	statuses, err := h.statuses(ctx)
	if err != nil {
		return nil, err
	}
	since, cause := stale(h.Pipelines.Stale())
	return &adminv1.ListPipelinesResponse{Pipelines: statuses, StaleSince: since, StaleCause: cause}, nil
}

func (h *handler) currentPipelines(ctx context.Context, _ *adminv1.WatchPipelinesRequest) (*adminv1.WatchPipelinesResponse, error) {
	all, err := h.listPipelines(ctx, nil)
	if err != nil {
		return nil, err
	}
	return &adminv1.WatchPipelinesResponse{Pipelines: all.GetPipelines(), StaleSince: all.GetStaleSince(), StaleCause: all.GetStaleCause()}, nil
}

func (h *handler) statuses(ctx context.Context) ([]*adminv1.PipelineStatus, error) {
	if err := h.Pipelines.Ready(); err != nil {
		return nil, discovery.Unavailable(err)
	}
	entries := h.Pipelines.List()
	out := make([]*adminv1.PipelineStatus, len(entries))
	var work errgroup.Group
	work.SetLimit(maxQueries)
	for i, e := range entries {
		work.Go(func() error {
			out[i] = h.status(ctx, e)
			return nil
		})
	}
	return out, work.Wait()
}

// status returns a pipeline and its state.
func (h *handler) status(ctx context.Context, e pipelines.Entry) *adminv1.PipelineStatus {
	out := &adminv1.PipelineStatus{
		Pipeline: e.Pipeline.ToProto(), Revision: e.Revision, InFile: e.InFile, FromFile: e.FromFile,
	}
	if e.Revision != 0 {
		out.AppliedAt = timestamppb.New(e.AppliedAt)
	}
	factors := h.Traffic.FanFactors(e.Pipeline.Name)
	for _, path := range slices.Sorted(maps.Keys(factors)) {
		out.Maps = append(out.Maps, &adminv1.MapStatus{Path: path, Items: factors[path]})
	}
	err := h.Traffic.PipelineReady(ctx, string(e.Pipeline.Name), true)
	if out.Ready = err == nil; !out.GetReady() {
		out.Cause = fault.From(err).Message
	}
	return out
}

func (h *handler) getPipeline(ctx context.Context, in *adminv1.GetPipelineRequest) (*adminv1.GetPipelineResponse, error) {
	if err := pipeline.ValidPipelineName(in.GetName()); err != nil {
		return nil, transport.InvalidField("name", err)
	}
	e, err := h.Pipelines.Get(pipeline.Name(in.GetName()))
	if err != nil {
		return nil, err
	}
	return &adminv1.GetPipelineResponse{Pipeline: h.status(ctx, e)}, nil
}

// maxPlans is how many pipelines are planned at a time.
const maxPlans = 1000

func (h *handler) planPipelines(ctx context.Context, in *adminv1.PlanPipelinesRequest) (*adminv1.PlanPipelinesResponse, error) {
	if n := len(in.GetPipelines()); n > maxPlans {
		return nil, transport.InvalidField("pipelines", fmt.Errorf("%d, at most %d are allowed", n, maxPlans))
	}
	if err := h.Pipelines.Ready(); err != nil {
		return nil, discovery.Unavailable(err)
	}
	out, known := &adminv1.PlanPipelinesResponse{}, h.knownStages()
	for _, wanted := range in.GetPipelines() {
		plan, err := h.planOf(ctx, wanted, known)
		if err != nil {
			return nil, err
		}
		out.Plans = append(out.Plans, plan)
	}
	return out, nil
}

func (h *handler) planOf(ctx context.Context, in *meshv1.Pipeline, known map[pipeline.StageName]pipelines.Stage) (*adminv1.PipelinePlan, error) {
	out := &adminv1.PipelinePlan{Name: in.GetName()}
	route, err := pipeline.FromProto(in)
	if err == nil {
		err = pipelines.Validate(route)
	}
	if err != nil {
		out.Problems = []*adminv1.PipelineProblem{{Severity: adminv1.PipelineSeverity_PIPELINE_SEVERITY_INVALID, Message: err.Error()}}
		return out, nil //nolint:nilerr // the plan reports it
	}
	current, change := h.Pipelines.Plan(route)
	if out.Change = change; current != nil {
		out.Current = h.status(ctx, *current)
	}
	out.Problems, err = h.check(ctx, route, known)
	return out, err
}

// check checks a pipeline against the stages.
func (h *handler) check(ctx context.Context, route pipeline.Pipeline, known map[pipeline.StageName]pipelines.Stage) ([]*adminv1.PipelineProblem, error) {
	if err := h.addServed(ctx, known, route); err != nil {
		return nil, err
	}
	return pipelines.Check(route, known, h.Traffic.MaxPayload()), nil
}

func (h *handler) applyPipeline(ctx context.Context, in *adminv1.ApplyPipelineRequest) (*adminv1.ApplyPipelineResponse, error) {
	route, err := pipeline.FromProto(in.GetPipeline())
	if err != nil {
		return nil, fault.Newf(fault.InvalidRequest, "%w", err).WithViolation("pipeline", "%s", err)
	}
	problems, err := h.check(ctx, route, h.knownStages())
	if err == nil {
		err = fitError(route.Name, problems)
	}
	if err != nil && !in.GetForce() {
		return nil, err
	}
	applied, change, err := h.Pipelines.Apply(ctx, route, in.ExpectRevision)
	if err != nil {
		return nil, err
	}
	h.Logger.Info("pipeline applied", "pipeline", route.Name, "revision", applied.Revision, "changed", change != adminv1.PipelineChange_PIPELINE_CHANGE_NONE)
	return &adminv1.ApplyPipelineResponse{Pipeline: h.status(ctx, applied), Change: change, Problems: problems}, nil
}

// fitError returns the fault of a pipeline that does not fit its stages.
func fitError(name pipeline.Name, problems []*adminv1.PipelineProblem) error {
	var messages []string
	out := fault.New(fault.PipelineDoesNotFit, "")
	for _, problem := range problems {
		if problem.GetSeverity() == adminv1.PipelineSeverity_PIPELINE_SEVERITY_ERROR {
			messages = append(messages, problem.GetField()+": "+problem.GetMessage())
			out = out.WithViolation(problem.GetField(), "%s", problem.GetMessage())
		}
	}
	if len(messages) == 0 {
		return nil
	}
	out.Message = fmt.Sprintf("pipeline %s: %s", name, strings.Join(messages, "; "))
	return out
}

func (h *handler) deletePipeline(ctx context.Context, in *adminv1.DeletePipelineRequest) (*adminv1.DeletePipelineResponse, error) {
	if err := pipeline.ValidPipelineName(in.GetName()); err != nil {
		return nil, transport.InvalidField("name", err)
	}
	if err := h.Pipelines.Delete(ctx, pipeline.Name(in.GetName()), in.ExpectRevision); err != nil {
		return nil, err
	}
	h.Logger.Info("pipeline deleted", "pipeline", in.GetName())
	return &adminv1.DeletePipelineResponse{}, nil
}

// stale returns since when a response may be out of date, and the cause.
func stale(since time.Time, why error) (*timestamppb.Timestamp, string) {
	if since.IsZero() {
		return nil, ""
	}
	if why == nil {
		return timestamppb.New(since), "it cannot be reached"
	}
	return timestamppb.New(since), why.Error()
}
