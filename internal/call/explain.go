package call

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	// explainReads bounds what is read from the broker about a request.
	explainReads = 2 * time.Second
	// locateInterval is how often a gateway looks for requests whose time is soon over: it asks their
	// hosts locateLead before the deadline, or a quarter of the time, about maxLocating at a time.
	locateInterval = 25 * time.Millisecond
	locateLead     = 100 * time.Millisecond
	maxLocating    = 4
	// maxEndedHere bounds the requests that ended of this gateway.
	maxEndedHere = 1000

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
			return nil, store.Unavailable(err).WithMetadata(requestIDKey, string(id))
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
			return nil, store.Unavailable(err).WithMetadata(requestIDKey, string(id))
		}
		report = r.Report()
	case !isFinished(report) && len(report.GetBranches()) == 0:
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

// Requests returns the requests in flight of all gateways, and those that hosts hold, whose route
// passes the stage, empty for all: the oldest, up to the limit, and how many gateways have. Each has
// its holders. Without the broker only this gateway answers.
func (s *Service) Requests(ctx context.Context, stage pipeline.StageName, limit int) (oldest []*meshv1.RequestReport, total uint64) {
	byID := map[string]*meshv1.RequestReport{}
	add := func(a *meshv1.InFlightAnswer) {
		total += a.GetTotal()
		for _, r := range a.GetReports() {
			byID[r.GetRequestId()] = merge(byID[r.GetRequestId()], r)
		}
	}
	question := &meshv1.InFlightQuestion{Stage: string(stage), Limit: uint32(limit)}
	own := s.inFlight(question)
	add(own)
	_ = s.bus.ListRequests(ctx, question, func(a *meshv1.InFlightAnswer) {
		if a.GetGateway() != own.GetGateway() {
			add(a)
		}
	})
	all := slices.Collect(maps.Values(byID))
	oldest = bus.Oldest(all, limit, func(r *meshv1.RequestReport) time.Time { return r.GetAdmittedAt().AsTime() })
	return oldest, max(total, uint64(len(all)))
}

// Ended returns the requests of all gateways that ended last, the last one first, up to the limit and
// without their steps: of failed ones alone if failed is true, and if stage is not empty those that
// failed there. Without the broker only this gateway answers.
func (s *Service) Ended(ctx context.Context, failed bool, stage pipeline.StageName, limit int) []*meshv1.RequestReport {
	question := &meshv1.InFlightQuestion{Stage: string(stage), Limit: uint32(limit), Ended: true, Failed: failed}
	own := s.inFlight(question)
	latest := own.GetReports()
	endedAt := func(r *meshv1.RequestReport) time.Time {
		return r.GetAdmittedAt().AsTime().Add(r.GetTotal().AsDuration())
	}
	_ = s.bus.ListRequests(ctx, question, func(a *meshv1.InFlightAnswer) {
		if a.GetGateway() == own.GetGateway() {
			return
		}
		// Processes of an earlier release answer what is in flight.
		latest = append(latest, slices.DeleteFunc(a.GetReports(), func(r *meshv1.RequestReport) bool { return !isFinished(r) })...)
		slices.SortStableFunc(latest, func(a, b *meshv1.RequestReport) int { return endedAt(b).Compare(endedAt(a)) })
		latest = slices.Delete(latest, min(limit, len(latest)), len(latest))
	})
	return latest
}

// inFlight returns this gateway's requests that are queued or run, or its last ones that ended.
func (s *Service) inFlight(q *meshv1.InFlightQuestion) *meshv1.InFlightAnswer {
	if q.GetEnded() {
		// Any client may ask.
		return &meshv1.InFlightAnswer{Gateway: string(s.settings.Gateway), Reports: s.finished.Latest(q.GetFailed(), q.GetStage(), int(min(q.GetLimit(), maxEndedHere)))}
	}
	if asked := q.GetRequestIds(); len(asked) > 0 {
		return &meshv1.InFlightAnswer{Gateway: string(s.settings.Gateway), RequestIds: slices.DeleteFunc(slices.Clone(asked), func(id string) bool {
			return !s.runsGraph(pipeline.RequestID(id))
		})}
	}
	var found []*envelope.Envelope
	s.table.each(func(p *pending) {
		if p.env != nil && (q.GetStage() == "" || slices.ContainsFunc(p.env.Route, func(h pipeline.Hop) bool { return string(h.Stage) == q.GetStage() })) {
			found = append(found, p.env)
		}
	})
	out := &meshv1.InFlightAnswer{Gateway: string(s.settings.Gateway), Total: uint64(len(found))}
	for _, env := range bus.Oldest(found, int(q.GetLimit()), func(e *envelope.Envelope) time.Time { return e.AdmittedAt }) {
		out.Reports = append(out.Reports, env.Report(inFlight))
	}
	return out
}

// location is at which step a request is, and whether a worker has it or it waits.
type location struct {
	step, stage, state string
	// runs is since when a worker has it; zero if none has.
	runs time.Time
}

// watchDeadlines locates requests shortly before their deadlines, so that a caller need not wait
// for that.
func (s *Service) watchDeadlines(ctx context.Context) {
	tick := time.NewTicker(locateInterval)
	defer tick.Stop()
	places := semaphore.NewWeighted(maxLocating)
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		now := time.Now()
		s.table.each(func(p *pending) {
			if p.env == nil || p.isLocated || p.graph != nil { // hosts have the steps of a graph
				return
			}
			left := p.env.Deadline.Sub(now)
			if left <= 0 || left > min(locateLead, p.env.Deadline.Sub(p.env.AdmittedAt)/4) || !places.TryAcquire(1) {
				return
			}
			p.isLocated = true
			s.watches.Go(func() {
				defer places.Release(1)
				p.location.Store(s.locate(ctx, p.env, left*3/4))
			})
		})
	}
}

// locate asks the hosts for a while where a request is; nil where that is not known.
func (s *Service) locate(ctx context.Context, env *envelope.Envelope, wait time.Duration) *location {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	var report *meshv1.RequestReport
	err := s.bus.Explain(ctx, env.RequestID, func(a *meshv1.ExplainAnswer) bool {
		report = a.GetReport()
		return len(report.GetHolders()) > 0
	})
	out := &location{step: string(env.Route[0].Step), stage: string(env.Route[0].Stage), state: envelope.StateText("queued", false)}
	switch holders, steps := report.GetHolders(), report.GetSteps(); {
	case len(holders) > 0 && len(steps) > 0:
		at := steps[len(steps)-1].GetTiming()
		out.step, out.stage = at.GetStep(), at.GetStage()
		out.state = envelope.StateText(holders[0].GetState(), at.GetRun().AsDuration() > 0)
		if holders[0].GetState() == "running" {
			out.runs = holders[0].GetSince().AsTime()
		}
	case len(env.Route) > 1 || err != nil && !errors.Is(err, context.DeadlineExceeded):
		return nil // nobody knows at which step
	}
	return out
}

// deadlineError returns the error of a call whose time is over, with its location where that is known.
func (x *call) deadlineError() error {
	var at *location
	if x.pending != nil { // it was sent
		at = x.pending.location.Load()
	}
	if at == nil {
		return context.DeadlineExceeded
	}
	state := at.state
	if !at.runs.IsZero() {
		state = fmt.Sprintf("a worker has run it for %s, and hangs or is slow", time.Since(at.runs).Round(time.Millisecond))
	}
	return x.env.DeadlineFault(at.step, at.stage, state).Caused(context.DeadlineExceeded).At(at.stage, at.step, "")
}

func isFinished(r *meshv1.RequestReport) bool { return r != nil && r.GetSource() != inFlight }

// answerOf returns what this gateway knows of a request.
func (s *Service) answerOf(id pipeline.RequestID) *meshv1.ExplainAnswer {
	out := &meshv1.ExplainAnswer{Report: s.finished.Find(id), RemembersSince: timestamppb.New(s.finished.RemembersSince())}
	if out.GetReport() == nil {
		if p := s.table.find(id); p != nil {
			out.Report = p.env.Report(inFlight)
			if p.graph != nil {
				for _, b := range p.graph.view(p.env) {
					out.Report.Branches = append(out.Report.Branches, b.ToProto())
				}
			}
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
	if len(a.GetBranches()) == 0 {
		a.Branches = b.GetBranches()
	}
	a.IdempotencyKey = cmp.Or(a.GetIdempotencyKey(), b.GetIdempotencyKey())
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
