package adminapi

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/gateway/front/procedure"
	"github.com/stagemesh/stagemesh/gateway/pipelines"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Pipelines are those of the mesh. Errors are *fault.Fault.
type Pipelines interface {
	// Ready returns nil when pipelines are served, else why not.
	Ready() error
	List() []pipelines.Entry
	Get(name pipeline.Name) (pipelines.Entry, error)
	Apply(ctx context.Context, p pipeline.Pipeline, expect *uint64) (pipelines.Entry, pipelines.Change, error)
	Delete(ctx context.Context, name pipeline.Name, expect *uint64) error
	// Stale returns since when the registry cannot be reached, and why.
	Stale() (since time.Time, why error)
	// Changed returns a channel that is closed with the next change.
	Changed() <-chan struct{}
}

var _ Pipelines = (*pipelines.Store)(nil)

// planner answers the procedures of PipelineService.
type planner struct {
	pipelines Pipelines
	traffic   Traffic
	stages    *census
	// maxPayload bounds the inputs of a request, in bytes.
	maxPayload int
	log        *slog.Logger
}

// asking is how many questions to the broker one call has open at a time.
const asking = 16

func (p *planner) list(ctx context.Context, _ *adminv1.ListPipelinesRequest) (*adminv1.ListPipelinesResponse, error) {
	statuses, err := p.statuses(ctx)
	if err != nil {
		return nil, err
	}
	since, cause := stale(p.pipelines.Stale())
	return &adminv1.ListPipelinesResponse{Pipelines: statuses, StaleSince: since, StaleCause: cause}, nil
}

func (p *planner) look(ctx context.Context, _ *adminv1.WatchPipelinesRequest) (*adminv1.WatchPipelinesResponse, error) {
	all, err := p.list(ctx, nil)
	if err != nil {
		return nil, err
	}
	return &adminv1.WatchPipelinesResponse{Pipelines: all.GetPipelines(), StaleSince: all.GetStaleSince(), StaleCause: all.GetStaleCause()}, nil
}

func (p *planner) statuses(ctx context.Context) ([]*adminv1.PipelineStatus, error) {
	if err := p.pipelines.Ready(); err != nil {
		return nil, notHeard(err)
	}
	entries := p.pipelines.List()
	out := make([]*adminv1.PipelineStatus, len(entries))
	var work errgroup.Group
	work.SetLimit(asking)
	for i, e := range entries {
		work.Go(func() error {
			out[i] = p.status(ctx, e)
			return nil
		})
	}
	return out, work.Wait()
}

// status is a pipeline, and how it is.
func (p *planner) status(ctx context.Context, e pipelines.Entry) *adminv1.PipelineStatus {
	out := &adminv1.PipelineStatus{
		Pipeline: e.Pipeline.ToProto(), Revision: e.Revision, InFile: e.InFile, FromFile: e.FromFile,
	}
	if e.Revision != 0 {
		out.AppliedAt = timestamppb.New(e.AppliedAt)
	}
	err := p.traffic.PipelineReady(ctx, string(e.Pipeline.Name))
	if out.Ready = err == nil; !out.GetReady() {
		out.Cause = fault.From(err).Message
	}
	return out
}

func (p *planner) get(ctx context.Context, in *adminv1.GetPipelineRequest) (*adminv1.GetPipelineResponse, error) {
	if err := pipeline.ValidName("pipeline", in.GetName()); err != nil {
		return nil, procedure.Invalid("name", err)
	}
	e, err := p.pipelines.Get(pipeline.Name(in.GetName()))
	if err != nil {
		return nil, err
	}
	return &adminv1.GetPipelineResponse{Pipeline: p.status(ctx, e)}, nil
}

// maxPlans is how many pipelines are planned at a time.
const maxPlans = 1000

func (p *planner) plan(ctx context.Context, in *adminv1.PlanPipelinesRequest) (*adminv1.PlanPipelinesResponse, error) {
	if n := len(in.GetPipelines()); n > maxPlans {
		return nil, procedure.Invalid("pipelines", fmt.Errorf("%d, at most %d are taken", n, maxPlans))
	}
	if err := p.pipelines.Ready(); err != nil {
		return nil, notHeard(err)
	}
	out, known := &adminv1.PlanPipelinesResponse{}, p.stages.registered()
	for _, wanted := range in.GetPipelines() {
		plan, err := p.planOf(ctx, wanted, known)
		if err != nil {
			return nil, err
		}
		out.Plans = append(out.Plans, plan)
	}
	return out, nil
}

func (p *planner) planOf(ctx context.Context, wanted *meshv1.Pipeline, known map[pipeline.StageName]pipelines.Stage) (*adminv1.PipelinePlan, error) {
	out := &adminv1.PipelinePlan{Name: wanted.GetName()}
	route, err := pipeline.FromProto(wanted)
	if err == nil {
		err = pipelines.Validate(route)
	}
	if err != nil {
		out.Problems = []*adminv1.PipelineProblem{{Severity: adminv1.PipelineSeverity_PIPELINE_SEVERITY_INVALID, Message: err.Error()}}
		return out, nil //nolint:nilerr // the plan says it
	}
	out.Change = adminv1.PipelineChange_PIPELINE_CHANGE_CREATE
	if current, err := p.pipelines.Get(route.Name); err == nil {
		out.Current = p.status(ctx, current)
		out.Change = changeOf(current.Would(route))
	}
	problems, err := p.check(ctx, route, known)
	out.Problems = problemsOf(problems)
	return out, err
}

// check holds a pipeline against the stages.
func (p *planner) check(ctx context.Context, route pipeline.Pipeline, known map[pipeline.StageName]pipelines.Stage) ([]pipelines.Problem, error) {
	if err := p.stages.answering(ctx, known, route); err != nil {
		return nil, err
	}
	return pipelines.Check(route, pipelines.Mesh{Stages: known, MaxPayload: p.maxPayload}), nil
}

func (p *planner) apply(ctx context.Context, in *adminv1.ApplyPipelineRequest) (*adminv1.ApplyPipelineResponse, error) {
	route, err := pipeline.FromProto(in.GetPipeline())
	if err != nil {
		return nil, fault.Newf(fault.InvalidRequest, "%w", err).WithViolation("pipeline", "%s", err)
	}
	problems, err := p.check(ctx, route, p.stages.registered())
	if err == nil {
		err = refusalOf(route.Name, problems)
	}
	if err != nil && !in.GetForce() {
		return nil, err
	}
	applied, change, err := p.pipelines.Apply(ctx, route, in.ExpectRevision)
	if err != nil {
		return nil, err
	}
	p.log.Info("pipeline applied", "pipeline", route.Name, "revision", applied.Revision, "changed", change != pipelines.None)
	return &adminv1.ApplyPipelineResponse{Pipeline: p.status(ctx, applied), Change: changeOf(change), Problems: problemsOf(problems)}, nil
}

// refusalOf is the fault of a pipeline that does not fit, nil of one that does.
func refusalOf(name pipeline.Name, problems []pipelines.Problem) error {
	var said []string
	out := fault.New(fault.PipelineDoesNotFit, "")
	for _, problem := range problems {
		if problem.Severity == pipelines.Error {
			said = append(said, problem.Field+": "+problem.Message)
			out = out.WithViolation(problem.Field, "%s", problem.Message)
		}
	}
	if len(said) == 0 {
		return nil
	}
	out.Message = fmt.Sprintf("pipeline %s: %s", name, strings.Join(said, "; "))
	return out
}

func (p *planner) remove(ctx context.Context, in *adminv1.DeletePipelineRequest) (*adminv1.DeletePipelineResponse, error) {
	if err := pipeline.ValidName("pipeline", in.GetName()); err != nil {
		return nil, procedure.Invalid("name", err)
	}
	if err := p.pipelines.Delete(ctx, pipeline.Name(in.GetName()), in.ExpectRevision); err != nil {
		return nil, err
	}
	p.log.Info("pipeline deleted", "pipeline", in.GetName())
	return &adminv1.DeletePipelineResponse{}, nil
}

func changeOf(c pipelines.Change) adminv1.PipelineChange {
	switch c {
	case pipelines.Create:
		return adminv1.PipelineChange_PIPELINE_CHANGE_CREATE
	case pipelines.Update:
		return adminv1.PipelineChange_PIPELINE_CHANGE_UPDATE
	default:
		return adminv1.PipelineChange_PIPELINE_CHANGE_NONE
	}
}

func problemsOf(in []pipelines.Problem) []*adminv1.PipelineProblem {
	out := make([]*adminv1.PipelineProblem, len(in))
	for i, problem := range in {
		severity := adminv1.PipelineSeverity_PIPELINE_SEVERITY_WARNING
		if problem.Severity == pipelines.Error {
			severity = adminv1.PipelineSeverity_PIPELINE_SEVERITY_ERROR
		}
		out[i] = &adminv1.PipelineProblem{Severity: severity, Field: problem.Field, Message: problem.Message}
	}
	return out
}

// notHeard is the fault of a gateway that has not heard of the registry yet.
func notHeard(err error) error {
	return fault.Newf(fault.RegistryUnavailable, "%w", err).WithRetryAfter(retryAfter)
}

// stale is since when what is said may be out of date, and why.
func stale(since time.Time, why error) (*timestamppb.Timestamp, string) {
	if since.IsZero() {
		return nil, ""
	}
	if why == nil {
		return timestamppb.New(since), "it cannot be reached"
	}
	return timestamppb.New(since), why.Error()
}
