package call

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
)

const (
	// explainReads bounds what is read from the broker about a request.
	explainReads = 2 * time.Second
	// deadlineWait is how long hosts may take to say where a request is whose time is over, and
	// maxLocating how many such questions there may be at a time.
	deadlineWait = 25 * time.Millisecond
	maxLocating  = 16

	inFlight = meshv1.RequestSource_REQUEST_SOURCE_IN_FLIGHT
)

// Explain returns what the mesh knows of any tenant's request: this gateway, the others and
// the hosts, then the stored results. NOT_FOUND says how long gateways remember requests.
func (s *Service) Explain(ctx context.Context, requestID string) (*meshv1.RequestReport, error) {
	id, f := parseID(requestID)
	if f != nil {
		return nil, f
	}
	answer := s.answerOf(id)
	if !isFinished(answer.GetReport()) {
		if err := s.askOthers(ctx, id, answer); err != nil && answer.GetReport() == nil {
			return nil, Unavailable(err).WithMetadata(requestIDKey, string(id))
		}
	}
	ctx, cancel := context.WithTimeout(ctx, explainReads)
	defer cancel()
	report := answer.GetReport()
	switch {
	case report == nil:
		r, err := s.results.Get(ctx, id)
		switch {
		case errors.Is(err, store.ErrNoResult):
			return nil, fault.Newf(fault.NotFound, "request %s is unknown: no gateway that answered remembers it, no host has it, and no result of it is stored; "+
				"gateways remember all requests of the last %s, and failed and slow ones longer, until they stop", id, time.Since(answer.GetRemembersSince().AsTime()).Round(time.Second)).
				WithMetadata(requestIDKey, string(id))
		case err != nil:
			return nil, Unavailable(err).WithMetadata(requestIDKey, string(id))
		}
		report = r.Report()
	case !isFinished(report):
		s.addQueues(ctx, report)
	case report.GetFault() != nil && len(report.GetSteps()) == 0:
		// A durable request outlives its caller, and its gateway.
		if r, err := s.results.Get(ctx, id); err == nil {
			report.Stored, report.Steps = true, r.Report().GetSteps()
		}
	}
	if report.GetCompared() == 0 {
		s.finished.Compare(report)
	}
	return report, nil
}

// explainDeadline returns the error of a call whose time is over: at which step it is, and
// whether a worker has it or it waits. It asks the hosts, for a few calls at a time.
func (x *call) explainDeadline(ctx context.Context) error {
	wait := min(deadlineWait, x.env.Deadline.Sub(x.env.AdmittedAt)/4)
	select {
	case x.service.locating <- struct{}{}:
		defer func() { <-x.service.locating }()
	default:
		wait = 0
	}
	if wait < time.Millisecond {
		return ctx.Err()
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), wait)
	defer cancel()
	var report *meshv1.RequestReport
	err := x.service.bus.Explain(ctx, x.env.RequestID, func(a *meshv1.ExplainAnswer) bool {
		report = a.GetReport()
		return len(report.GetHolders()) > 0
	})
	step, stage, state := string(x.env.Route[0].Step), string(x.env.Route[0].Stage), "it waits in the queue of the stage"
	switch holders, steps := report.GetHolders(), report.GetSteps(); {
	case len(holders) > 0 && len(steps) > 0:
		at := steps[len(steps)-1].GetTiming()
		step, stage = at.GetStep(), at.GetStage()
		switch holders[0].GetState() {
		case "running":
			state = fmt.Sprintf("a worker has run it for %s, and hangs or is slow", time.Since(holders[0].GetSince().AsTime()).Round(time.Millisecond))
		case "queued", "sending":
			if at.GetRun().AsDuration() > 0 {
				state = "its output waits for the queue of the next stage"
			}
		default:
			state = "it " + holders[0].GetState()
		}
	case len(x.env.Route) > 1 || err != nil && !errors.Is(err, context.DeadlineExceeded):
		return context.DeadlineExceeded // nobody knows at which step
	}
	return fault.Newf(fault.DeadlineExceeded, "no answer within %s: at step %s, stage %s, %s", x.env.TimeoutText(), step, stage, state).
		Caused(context.DeadlineExceeded).At(stage, step, "")
}

func isFinished(r *meshv1.RequestReport) bool { return r != nil && r.GetSource() != inFlight }

// answerOf returns what this gateway knows of a request.
func (s *Service) answerOf(id pipeline.RequestID) *meshv1.ExplainAnswer {
	out := &meshv1.ExplainAnswer{Report: s.finished.Find(id), RemembersSince: timestamppb.New(s.finished.RemembersSince())}
	if out.GetReport() == nil {
		if env := s.table.find(id); env != nil {
			out.Report = env.Report(inFlight)
		}
	}
	if out.GetReport() != nil {
		s.finished.Compare(out.GetReport())
	}
	return out
}

// askOthers adds to the answer what the other gateways and the hosts know. It returns as soon
// as one knows how the request ended.
func (s *Service) askOthers(ctx context.Context, id pipeline.RequestID, into *meshv1.ExplainAnswer) error {
	return s.bus.Explain(ctx, id, func(other *meshv1.ExplainAnswer) bool {
		// What all gateways remember begins with the one that remembers least.
		if since := other.GetRemembersSince(); since != nil && since.AsTime().After(into.GetRemembersSince().AsTime()) {
			into.RemembersSince = since
		}
		into.Report = merge(into.GetReport(), other.GetReport())
		return isFinished(into.GetReport())
	})
}

// merge returns what two reports say of a request, of which either may be nil: how it ended,
// or who has it. Hosts know its steps so far.
func merge(a, b *meshv1.RequestReport) *meshv1.RequestReport {
	switch {
	case a == nil || isFinished(b):
		return b
	case b == nil || isFinished(a):
		return a
	}
	if len(b.GetSteps()) > len(a.GetSteps()) {
		a, b = b, a
	}
	a.Holders = append(a.GetHolders(), b.GetHolders()...)
	return a
}

// addQueues adds the queues in which a request may wait that no host has.
func (s *Service) addQueues(ctx context.Context, to *meshv1.RequestReport) {
	if len(to.GetHolders()) > 0 {
		return
	}
	stages := to.GetStages()
	for i, stage := range stages {
		if slices.Contains(stages[:i], stage) {
			continue
		}
		state, err := s.Stage(ctx, pipeline.StageName(stage))
		if err != nil {
			return // without the broker nobody knows
		}
		for _, q := range state.Queues {
			if q.Durability.ToProto() == to.GetDurability() && q.Items > 0 {
				to.Holders = append(to.Holders, &meshv1.RequestHolder{Stage: stage, Items: q.Items})
			}
		}
	}
}
