package stagemesh

import (
	"context"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/jobs/dispatch"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// meshTarget runs jobs through the pipelines of a mesh, by a gateway in this process. Each
// attempt is a request of its own whose result is stored, so that another dispatcher finds it.
type meshTarget struct{ gateway *gateway.Gateway }

var _ dispatch.Target = meshTarget{}

// Forget implements dispatch.Target.
func (t meshTarget) Forget(request pipeline.RequestID) { t.gateway.Service().DeleteStored(request) }

// Timeout implements dispatch.Target.
func (t meshTarget) Timeout(j store.StoredJob) time.Duration {
	r, err := request.FromProto(j.Job.GetInfer())
	if err != nil {
		return 0
	}
	return t.gateway.Service().TimeoutOf(r)
}

// Do implements dispatch.Target.
func (t meshTarget) Do(ctx context.Context, a dispatch.Attempt) dispatch.Answer {
	r, err := request.FromProto(a.Job.GetInfer())
	if err != nil {
		return dispatch.Answer{Fault: fault.From(err)}
	}
	r.ID, r.Priority = a.Request, a.Priority
	return answerOf(t.gateway.Jobs().RunJob(budget.WithTenant(ctx, a.Tenant), a.StoredJob, r))
}

// resumeSlack is how long after its deadline the result of a request may still be stored.
const resumeSlack = time.Second

// Resume implements dispatch.Target.
func (t meshTarget) Resume(ctx context.Context, a dispatch.Attempt) (dispatch.Answer, bool) {
	ctx, cancel := context.WithDeadline(budget.WithTenant(ctx, a.Tenant), a.Deadline.Add(resumeSlack))
	defer cancel()
	r, f, ok := t.gateway.Service().AwaitStored(ctx, a.Request)
	switch {
	case !ok:
		return dispatch.Answer{}, false
	case f != nil:
		return answerOf(r, f), true
	}
	return answerOf(r, nil), true
}

// readyHosts returns how many hosts of a stage take items.
func (t meshTarget) readyHosts(stage string) (int, error) {
	s, err := t.readyStage(stage)
	return s.Ready, err
}

func (t meshTarget) readyStage(name string) (discovery.Stage, error) {
	stages, err := t.gateway.ReadyStages()
	for _, s := range stages {
		if s.Name == name {
			return s, err
		}
	}
	return discovery.Stage{Name: name}, err
}

// stages returns what the stages of pipelines have to do.
func (t meshTarget) stages(ctx context.Context, pipelines []string) (out []dispatch.StageLoad, err error) {
	for _, name := range pipelines {
		p, f := t.gateway.Service().Resolve(name, true)
		if f != nil {
			return nil, f
		}
		for _, step := range p.StageSteps() {
			ready, err := t.readyStage(string(step.Stage))
			if err != nil {
				return nil, err
			}
			state, err := t.gateway.Service().Stage(ctx, step.Stage)
			if err != nil {
				return nil, err
			}
			queued := 0
			for _, q := range state.Queues {
				queued += int(q.Items)
			}
			// Hosts also hold items that come in no queue, and models have queues of their own.
			out = append(out, dispatch.StageLoad{Name: ready.Name, Items: max(queued, ready.InFlight), MaxInFlight: ready.MaxInFlight, Wait: state.Wait})
		}
	}
	return out, nil
}

// answerOf returns the answer of a response, which may be nil beside an error.
func answerOf(r *request.Response, err error) dispatch.Answer {
	var out dispatch.Answer
	if r != nil {
		out.Infer = r.ToProto()
		out.Steps, out.Chunks = out.Infer.GetTimeline().GetSteps(), r.Chunks
	}
	if err != nil {
		out.Infer, out.Fault = nil, fault.From(err)
	}
	return out
}
