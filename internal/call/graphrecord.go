package call

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// A durable request with blocks, and an attempt of a job, have a record on the broker until their
// result is stored. Every step's result is stored too, under an ID that follows from the request's and
// the step's path. So any gateway can run the request again from its beginning: what has a result is
// not run again. It does so for a request that no gateway says it runs: its gateway has died, its caller
// has left, or its result could not be stored.

const (
	// graphTick is how often a gateway looks for records. It takes over what nobody runs in two looks.
	graphTick = time.Second
	// graphsAsked is how many requests one question is about.
	graphsAsked = 4096
	// outagePause is the pause before a step is sent again after an outage of the broker.
	outagePause = 200 * time.Millisecond
	// graphLookUp is the pause between two looks for the result of a request that takes so long: another
	// gateway may have taken it over while this one was paused or disconnected.
	graphLookUp = 2 * time.Second
)

// graphs are the durable requests with blocks of a gateway.
type graphs struct {
	// resumed are those that it has taken over, ends remove what ended ones have on the broker.
	resumed, ends *tasks
	// resuming has the IDs of the resumed ones.
	resuming sync.Map
}

// isKept reports whether the graph of a call outlives its gateway.
func (x *call) isKept() bool { return x.env.Durability == pipeline.File || x.env.StoreResult }

// isKeptPiece reports whether the call is a step of such a graph.
func (x *call) isKeptPiece() bool { return x.env.Path != "" && x.env.StoresResult() }

// keepGraph writes the record of a new request.
func (x *call) keepGraph(ctx context.Context) error {
	g := x.graph
	if !x.isKept() {
		return nil
	}
	g.lookUp = time.After(graphLookUp)
	if g.seq != 0 {
		return nil
	}
	var err error
	g.seq, err = x.service.results.PutGraph(ctx, &store.Graph{Request: x.env, Pipeline: g.pipeline, Parameters: x.request.options().Parameters, IsComplete: x.request.IsComplete}, 0)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, bus.ErrTooLarge):
		return fault.Newf(fault.PayloadTooLarge, "%w", err)
	case errors.Is(err, bus.ErrQueueFull):
		return fault.Newf(fault.Overloaded, "the stream of results is full, see results.max_bytes: %w", err).WithRetryAfter(budget.RetryAfter)
	case errors.Is(err, bus.ErrNoResults):
		x.service.resultsStream.Reset(ctx)
	case errors.Is(err, store.ErrGraphTaken):
		return fault.Newf(fault.Internal, "another request has the ID: %w", err)
	}
	return store.Unavailable(err)
}

// leaveGraph is called when a run of the graph has ended: it removes what the request has on the
// broker, or has the request go on.
func (x *call) leaveGraph(ctx context.Context) {
	s, g := x.service, x.graph
	switch {
	case g.seq == 0:
	case x.progress.isFinal, x.isCancelled():
		g.end(s, func(ctx context.Context) { g.forget(ctx, s) })
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		reply := x.env.NewReply()
		reply.Timings, reply.Fault = x.steps, deadlineFault(fault.From(ctx.Err()), x.env)
		g.end(s, func(ctx context.Context) {
			if _, err := x.storeGraph(ctx, reply); err == nil {
				g.forget(ctx, s)
			}
		})
	case errors.Is(ctx.Err(), context.Canceled): // its caller has left
		s.resumeGraph(x.env.RequestID)
	}
}

// end runs the task in the background, or now if too many run. What it leaves is found by the next look
// for records.
func (g *graphRun) end(s *Service, task func(context.Context)) {
	bounded := func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, storeTimeout)
		defer cancel()
		task(ctx)
	}
	if s.graphs.ends.start(bounded) != nil {
		bounded(context.Background())
	}
}

// forget deletes the record and the results of the steps, unless another gateway runs the request,
// which may need them.
func (g *graphRun) forget(ctx context.Context, s *Service) {
	if isDeleted, err := s.results.DeleteGraph(ctx, g.seq); err != nil || !isDeleted {
		return
	}
	for _, id := range g.started {
		s.results.Delete(id)
	}
}

// runsGraph reports whether the gateway runs the request.
func (s *Service) runsGraph(id pipeline.RequestID) bool {
	_, isResuming := s.graphs.resuming.Load(id)
	return isResuming || s.table.find(id) != nil
}

// watchGraphs takes over the durable requests with blocks that no gateway runs.
func (s *Service) watchGraphs(ctx context.Context) {
	tick := time.NewTicker(graphTick)
	defer tick.Stop()
	var lost map[pipeline.RequestID]bool
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		before := lost
		lost = map[pipeline.RequestID]bool{}
		for _, id := range s.findLostGraphs(ctx) {
			lost[id] = true
			if before[id] {
				s.resumeGraph(id)
			}
		}
	}
}

// findLostGraphs returns the requests with a record that no gateway says it runs.
func (s *Service) findLostGraphs(ctx context.Context) (lost []pipeline.RequestID) {
	if !s.bus.Connected() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, watchTimeout)
	defer cancel()
	all, err := s.results.Graphs(ctx)
	if err != nil {
		return nil
	}
	all = slices.DeleteFunc(all, s.runsGraph)
	for some := range slices.Chunk(all, graphsAsked) {
		running, err := s.bus.FindRunning(ctx, some)
		if err != nil {
			break
		}
		lost = append(lost, slices.DeleteFunc(some, func(id pipeline.RequestID) bool { return running[id] })...)
	}
	return lost
}

// resumeGraph runs a request in the background, whose record has to be there. If too many run already,
// a later look finds it.
func (s *Service) resumeGraph(id pipeline.RequestID) {
	if _, isResuming := s.graphs.resuming.LoadOrStore(id, nil); isResuming {
		return
	}
	if s.graphs.resumed.start(func(ctx context.Context) {
		defer s.graphs.resuming.Delete(id)
		if err := s.resume(ctx, id); err != nil && ctx.Err() == nil {
			s.settings.Logger.Debug("a durable request with blocks is not resumed", "request_id", id, "error", err)
		}
	}) != nil {
		s.graphs.resuming.Delete(id)
	}
}

// resume takes a request over and runs it. Nobody waits for the response.
func (s *Service) resume(ctx context.Context, id pipeline.RequestID) error {
	record, seq, err := s.results.Graph(ctx, id)
	if err != nil {
		return err
	}
	env, began := record.Request, time.Now()
	ctx = budget.WithTenant(ctx, env.Tenant)
	env.Gateway = s.settings.Gateway
	account := budget.NewAccount(s.settings.Budget, env.Tenant)
	defer account.Close()
	if err := account.Reserve(int64(payload.Size(env.Parts))); err != nil {
		return err
	}
	x := &call{
		service: s, env: env, tenant: env.Tenant, span: untraced, published: untraced, graph: newGraphRun(record.Pipeline, account),
		waitForCapacity: true, // a first step may have been sent
		request: incoming{
			Request: &request.Request{Pipeline: string(env.Pipeline), Parameters: record.Parameters, IsComplete: record.IsComplete, Metadata: env.Metadata, Trace: env.Trace},
			label:   s.settings.Router.Label(string(env.Pipeline), false),
		},
	}
	x.mintExecution() // by which the record is known
	x.graph.resumedAt = began
	if x.graph.seq, err = s.results.PutGraph(ctx, record, seq); err != nil {
		return err
	}
	switch _, err = s.results.Get(ctx, id); {
	case err == nil:
		x.graph.forget(ctx, s)
		return nil
	case !errors.Is(err, store.ErrNoResult):
		return err
	}
	count(s.metrics.resumed, 1, "pipeline", x.request.label)
	ctx, cancel := context.WithDeadline(ctx, env.Deadline)
	defer cancel()
	if _, err = x.run(ctx); err != nil {
		err = deadlineFault(fault.From(err), env)
		x.remember(id, time.Since(began), fault.From(err), untraced)
		return err
	}
	x.remember(id, time.Since(began), nil, untraced)
	return nil
}

// errBranchEnded is why a step is cancelled whose branch has ended, or whose request is cancelled.
var errBranchEnded = fmt.Errorf("the branch has ended: %w", context.Canceled)

// storedPiece returns the stored result of a step that another run of the request has started; false
// means that there is none.
func (x *call) storedPiece(ctx context.Context, piece *call) (*request.Response, error, bool) {
	if x.graph.resumedAt.IsZero() {
		return nil, nil, false
	}
	var found *envelope.Result
	err := untilAnswered(ctx, func() (err error) {
		if found, err = x.service.results.Get(ctx, piece.env.RequestID); errors.Is(err, store.ErrNoResult) {
			return nil
		}
		return err
	})
	switch {
	case errors.Is(err, envelope.ErrMalformed):
		return nil, unreadable(err), true
	case err != nil:
		return nil, err, true
	case found == nil:
		return nil, nil, false
	case found.Reply.Fault != nil && found.Reply.Fault.Reason == fault.Cancelled:
		// Its branch had ended without it, and will again.
		<-ctx.Done()
		return nil, ctx.Err(), true
	}
	response, err := piece.responseOf(found)
	return response, err, true
}

// retriesPiece reports whether a step of a kept graph that has failed is sent again: nothing is known of
// it that would be the caller's.
func (x *call) retriesPiece(err error) bool {
	if err == nil || !x.isKept() {
		return false
	}
	switch fault.From(err).Reason {
	case fault.BrokerUnavailable, fault.StoreFull, fault.QueueLost, fault.ShuttingDown:
		return true
	case fault.NoCapacity: // hosts may start later than gateways
		return !x.graph.resumedAt.IsZero() && time.Since(x.graph.resumedAt) < x.service.settings.HostGrace
	}
	return false
}
