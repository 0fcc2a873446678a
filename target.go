package stagemesh

import (
	"context"
	"time"

	"github.com/stagemesh/stagemesh/dispatch"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// meshTarget runs jobs through the pipelines of a mesh, by a gateway in this process. Each
// attempt is a request of its own whose result is stored, so that another dispatcher finds it.
type meshTarget struct{ gateway *gateway.Gateway }

var _ dispatch.Target = meshTarget{}

// Do implements dispatch.Target.
func (t meshTarget) Do(ctx context.Context, a dispatch.Attempt) dispatch.Answer {
	r, err := call.RequestFromProto(a.Job.GetInfer())
	if err != nil {
		return dispatch.Answer{Fault: fault.From(err)}
	}
	r.ID, r.StoreResult, r.Priority = a.Request, true, a.Priority
	return answerOf(t.gateway.Service().Infer(call.WithTenant(ctx, a.Tenant), r))
}

// resumeSlack is how long after its deadline the result of a request may still be stored.
const resumeSlack = time.Second

// Resume implements dispatch.Target.
func (t meshTarget) Resume(ctx context.Context, a dispatch.Attempt) (dispatch.Answer, bool) {
	ctx, cancel := context.WithDeadline(call.WithTenant(ctx, a.Tenant), a.Deadline.Add(resumeSlack))
	defer cancel()
	r, f, ok := t.gateway.Service().AwaitStored(ctx, a.Request)
	switch {
	case !ok:
		return dispatch.Answer{}, false
	case f != nil:
		return dispatch.Answer{Fault: f}, true
	}
	return answerOf(r, nil), true
}

func answerOf(r *call.Response, err error) dispatch.Answer {
	if err != nil {
		return dispatch.Answer{Fault: fault.From(err)}
	}
	return dispatch.Answer{Infer: r.ToProto()}
}
