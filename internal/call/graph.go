package call

import (
	"cmp"
	"context"
	"crypto/sha1" //nolint:gosec // UUIDs of version 5 are SHA-1
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/trace"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/graph"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// piecesPerCall is how many steps of pipelines with blocks run at a time for each request that a
// gateway may have in flight; others wait for them.
const piecesPerCall = 4

// graphRun is what a call has of a pipeline with blocks. Each of its steps is a piece: a call of its
// own, under an ID that follows from the request's and the step's path. Pieces share the request's
// admission, trace and deadline. Only the call's goroutine uses it, except that view
// reads machine and running from others; changes to these two hold mu.
type graphRun struct {
	mu       sync.Mutex
	machine  *graph.Machine
	pipeline *pipeline.Pipeline
	memory   *budget.Account
	// request is each piece's, and never changes: inputs are in envelopes.
	request *request.Request
	// waiting are pieces that have no place yet, running those that have, with what cancels them.
	waiting []graph.Start
	running map[int]context.CancelFunc
	// alone is a piece to run on the call's own goroutine, because nothing else runs; nil for none. It has
	// no context of its own: cancel ends it with the whole run.
	alone  *graph.Start
	cancel context.CancelCauseFunc
	// ended receives each piece that ran on its own goroutine, places a free place while isWaiting is true.
	// Both channels are made when first needed.
	ended     chan endedPiece
	places    chan struct{}
	isWaiting bool
	pieces    sync.WaitGroup
	// metadata is nil until a piece has returned some.
	metadata map[string]string
	chunks   uint64

	// seq is the number of the record, 0 for a request that ends with its gateway; started are the steps
	// whose results it may have. resumedAt is when this gateway took the request over, zero for one of its
	// own.
	seq       uint64
	started   []pipeline.RequestID
	resumedAt time.Time
	// lookUp ticks when the request's result is looked up, which another gateway may have stored; found
	// is the response then.
	lookUp <-chan time.Time
	found  *request.Response
	// branches are the timeline's. spans are of the blocks and branches that run, traced is how many have ended.
	branches []envelope.Branch
	spans    map[string]trace.Span
	traced   int
}

func newGraphRun(p *pipeline.Pipeline, memory *budget.Account) *graphRun {
	return &graphRun{pipeline: p, memory: memory.Part(), running: map[int]context.CancelFunc{}}
}

// endedPiece is how a piece has ended.
type endedPiece struct {
	id       int
	response *request.Response
	steps    []request.StepTiming
	// activated are the stages for whose first host it has waited.
	activated []string
	err       error
}

// admitGraph checks that the stages that every request needs have hosts. Each step is admitted when
// it runs.
func (s *Service) admitGraph(ctx context.Context, x *call) *fault.Fault {
	var f *fault.Fault
	if route := x.appendHops(nil, x.graph.pipeline.Steps); len(route) > 0 {
		f = s.availability.CheckHosts(ctx, route, x.env.Durability)
	}
	if f == nil && !x.waitForCapacity {
		f = s.checkWork(x)
	}
	if f == nil {
		f = s.checkClock()
	}
	if f == nil && x.env.StoresResult() {
		f = s.readyStore(ctx, x)
	}
	return f
}

// appendHops appends the hops of the steps that run for every request: stages, and those in the branches
// of a parallel block whose fault is the request's.
func (x *call) appendHops(route []pipeline.Hop, steps []pipeline.Step) []pipeline.Hop {
	for i := range steps {
		switch p := steps[i].Parallel; {
		case !steps[i].IsBlock():
			if hop := x.hopOf(steps[i].Name); hop != nil {
				route = append(route, *hop)
			}
		case p != nil && p.Quorum == 0:
			for _, list := range steps[i].Lists() {
				if b := p.Branches[list.Name]; !b.Optional && b.Missing == nil {
					route = x.appendHops(route, list.Steps)
				}
			}
		}
	}
	return route
}

// hopOf returns the hop of a step, or nil if the route of a damaged record lacks it.
func (x *call) hopOf(step pipeline.StepName) *pipeline.Hop {
	for i := range x.env.Route {
		if x.env.Route[i].Step == step {
			return &x.env.Route[i]
		}
	}
	return nil
}

// runGraph runs the blocks, and returns when no piece is left.
func (x *call) runGraph(ctx context.Context) (*request.Response, error) {
	g, r := x.graph, x.request
	g.request = &request.Request{Pipeline: r.Pipeline, ByModel: r.ByModel, LossyChunks: r.LossyChunks, Trace: r.Trace, Origin: r.Origin}
	ctx, g.cancel = context.WithCancelCause(ctx)
	defer g.memory.Close()
	defer g.pieces.Wait()
	defer g.cancel(nil)
	if err := x.keepGraph(ctx); err != nil {
		return nil, err
	}
	specs := map[string]*stagev1.Spec{}
	if x.service.settings.Specs != nil {
		specs = x.service.settings.Specs()
	}
	x.advance(ctx, func(now time.Time) graph.Actions {
		g.machine = graph.New(g.pipeline, graph.Request{
			ID: x.env.RequestID, Tenant: x.env.Tenant, Inputs: x.env.Parts, Parameters: x.request.options().Parameters, Metadata: x.request.Metadata, Deadline: x.env.Deadline, IsComplete: x.request.IsComplete,
			StepDuration: func(step pipeline.StepName) time.Duration {
				return x.service.averages.stepDuration(x.env.Pipeline, step)
			},
			Spec: func(stage pipeline.StageName) *stagev1.Spec { return specs[string(stage)] },
		})
		return g.machine.Start(now)
	})
	for g.machine.Outcome() == nil {
		x.traceBranches()
		err := x.awaitGraph(ctx)
		if err != nil || g.found != nil {
			x.summarise()
			if x.isCancelled() && x.env.StoresResult() {
				x.service.cancels.store(ctx, x.env)
				g.cancel(errBranchEnded)
			}
			return g.found, err
		}
	}
	x.summarise()
	return x.endGraph(ctx, g.machine.Outcome())
}

// summarise adds the branches to the timeline and the metrics, and ends their spans.
func (x *call) summarise() {
	m := x.graph.machine
	x.steps, x.graph.branches = shorten(x.steps), branchesOf(m, x.env)
	x.traceBranches()
	x.endSpans("", time.Now())
	if m.Outcome() == nil {
		return
	}
	durations := m.StepDurations()
	if !x.graph.resumedAt.IsZero() {
		durations = nil // stored results come at once
	}
	x.service.averages.observe(x.env.Pipeline, m.Branches(), durations)
	x.service.metrics.countBranches(x.env.Pipeline, m.Branches())
}

// awaitGraph waits for what happens next, and does what follows from it.
func (x *call) awaitGraph(ctx context.Context) error {
	g := x.graph
	if g.alone != nil {
		return x.runAlone(ctx)
	}
	var due <-chan time.Time
	if at := g.machine.Due(); !at.IsZero() {
		timer := time.NewTimer(time.Until(at))
		defer timer.Stop()
		due = timer.C
	}
	select {
	case e := <-g.ended:
		x.handlePiece(ctx, e)
	case <-g.places:
		x.takePlace(ctx)
	case <-due:
		x.advance(ctx, g.machine.Tick)
	case <-x.pending.ready:
		e := x.pending.next()
		if e.fault != nil {
			return e.fault
		}
		if e.isReconnected && g.lookUp != nil {
			g.lookUp = time.After(firstPause)
		}
	case <-g.lookUp:
		g.lookUp = time.After(graphLookUp)
		var err error
		g.found, err = x.lookUpResult(ctx)
		return err
	case <-ctx.Done():
		if g.lookUp == nil {
			return ctx.Err()
		}
		var err error
		g.found, err = x.end(ctx)
		return err
	}
	return nil
}

// runAlone runs the piece that runs alone.
func (x *call) runAlone(ctx context.Context) error {
	g := x.graph
	start := g.alone
	g.alone = nil
	x.pending.setInterrupt(g.cancel)
	e := x.runPiece(ctx, start, x.spanOf(parentPath(start.Path), time.Now()))
	x.pending.setInterrupt(nil)
	if f, _ := x.pending.outcome(); f != nil {
		return f
	}
	if e.err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	x.handlePiece(ctx, e)
	return nil
}

func (x *call) handlePiece(ctx context.Context, e endedPiece) {
	g := x.graph
	x.steps = append(x.steps, e.steps...)
	for _, stage := range e.activated {
		x.noteActivating(stage)
	}
	x.advance(ctx, func(now time.Time) graph.Actions {
		cancel := g.running[e.id]
		if cancel == nil { // it was cancelled
			return graph.Actions{}
		}
		cancel()
		delete(g.running, e.id)
		err := e.err
		if err == nil {
			err = g.memory.Reserve(int64(payload.Size(e.response.Outputs)))
		}
		if err != nil {
			return g.machine.Failed(e.id, fault.From(err), now)
		}
		if g.metadata == nil {
			g.metadata = maps.Clone(e.response.Metadata)
		} else {
			maps.Copy(g.metadata, e.response.Metadata)
		}
		g.chunks = max(g.chunks, e.response.Chunks)
		return g.machine.Answered(e.id, e.response.Outputs, now)
	})
}

// advance applies an event to the machine, carries out its actions, and starts pieces while there are places.
func (x *call) advance(ctx context.Context, happened func(now time.Time) graph.Actions) {
	g := x.graph
	g.mu.Lock()
	defer g.mu.Unlock()
	do := happened(time.Now())
	for _, id := range do.Cancel {
		if cancel := g.running[id]; cancel != nil {
			cancel()
			delete(g.running, id)
		}
		g.waiting = slices.DeleteFunc(g.waiting, func(s graph.Start) bool { return s.ID == id })
	}
	if len(g.waiting) == 0 {
		g.waiting = do.Start
	} else {
		g.waiting = append(g.waiting, do.Start...)
	}
	x.fillPlaces(ctx)
}

// fillPlaces starts pieces while there are places, and waits for one for the rest.
func (x *call) fillPlaces(ctx context.Context) {
	g := x.graph
	for len(g.waiting) > 0 && x.service.pieces.TryAcquire(1) {
		x.startNext(ctx)
	}
	if len(g.waiting) == 0 || g.isWaiting {
		return
	}
	g.isWaiting = true
	if g.places == nil {
		g.places = make(chan struct{})
	}
	g.pieces.Go(func() {
		if x.service.pieces.Acquire(ctx, 1) != nil {
			return
		}
		select {
		case g.places <- struct{}{}:
		case <-ctx.Done():
			x.service.pieces.Release(1)
		}
	})
}

// takePlace runs the next piece that waits in a place that has become free.
func (x *call) takePlace(ctx context.Context) {
	g := x.graph
	g.mu.Lock()
	defer g.mu.Unlock()
	g.isWaiting = false
	if len(g.waiting) == 0 {
		x.service.pieces.Release(1)
		return
	}
	x.startNext(ctx)
	x.fillPlaces(ctx)
}

// startNext starts the first of the pieces that wait; it has a place.
func (x *call) startNext(ctx context.Context) {
	g, start := x.graph, &x.graph.waiting[0]
	isAlone := len(g.running) == 0 && len(g.waiting) == 1 && g.machine.Due().IsZero() && !g.isWaiting && !x.env.StoresResult() && start.Deadline.Equal(x.env.Deadline)
	g.waiting = g.waiting[1:]
	if g.seq != 0 {
		g.started = append(g.started, pieceID(x.env.RequestID, start.Path))
	}
	if isAlone {
		g.running[start.ID] = func() {} // nothing else runs that could cancel it
		g.alone = start
		return
	}
	if g.ended == nil {
		g.ended = make(chan endedPiece)
	}
	span, piece := x.spanOf(parentPath(start.Path), time.Now()), *start // a copy: the slice has the parts of all pieces
	own, leave := context.WithCancelCause(ctx)
	g.running[start.ID] = func() { leave(errBranchEnded) }
	g.pieces.Go(func() {
		defer leave(nil)
		own, cancel := context.WithDeadline(own, piece.Deadline)
		defer cancel()
		g.sendEnded(ctx, x.runPiece(own, &piece, span))
	})
}

// pieceID returns the ID of a piece: the same for the same step of the same request, as a UUID of
// version 5. uuid.NewSHA1 makes it with five allocations.
func pieceID(request pipeline.RequestID, path string) pipeline.RequestID {
	var buffer [256]byte
	space := uuid.MustParse(string(request))
	hash := sha1.Sum(append(append(buffer[:0], space[:]...), path...)) //nolint:gosec // UUIDs of version 5 are SHA-1
	id := uuid.UUID(hash[:16])
	id[6], id[8] = id[6]&0x0f|0x50, id[8]&0x3f|0x80
	return pipeline.RequestID(id.String())
}

// runPiece runs one step, and frees its place. In a kept graph it goes on until the step has a result, or
// the context ends.
func (x *call) runPiece(ctx context.Context, start *graph.Start, span trace.Span) endedPiece {
	defer x.service.pieces.Release(1)
	for {
		out, hasResult := x.tryPiece(ctx, start, span)
		if hasResult || !x.retriesPiece(out.err) || process.Sleep(ctx, outagePause) != nil {
			return out
		}
	}
}

// tryPiece runs one step once, and reports whether the step has a result then. After the first steps it
// waits for a place in a full queue, until the deadline, so that work that was done is not lost.
func (x *call) tryPiece(ctx context.Context, start *graph.Start, span trace.Span) (out endedPiece, hasResult bool) {
	out.id = start.ID
	hop := x.hopOf(start.Step.Name)
	if hop == nil {
		out.err = fault.Newf(fault.Internal, "step %s is not in the request's route", start.Step.Name)
		return out, true
	}
	made := &struct { // one allocation
		call  call
		env   envelope.Envelope
		route [1]pipeline.Hop
	}{}
	piece, env := &made.call, &made.env
	*env, made.route[0] = *x.env, *hop
	env.RequestID, env.Path, env.Route = pieceID(x.env.RequestID, start.Path), start.Path, made.route[:]
	env.Parts, env.Kept, env.Deadline, env.Timings = start.Parts, start.Kept, start.Deadline, nil
	env.IdempotencyKey, env.StoreResult = "", x.isKept() && x.env.StoreResult
	env.ExecutionID = pipeline.ExecutionID(env.RequestID) // of a kept graph; others have new ones
	var emit func(request.Chunk) error
	if x.emit != nil && start.IsLast {
		emit = func(c request.Chunk) error {
			c.RequestID = string(x.env.RequestID)
			return x.emit(c)
		}
	}
	env.TakesChunks = emit != nil
	copies := x.graph.memory.Part()
	defer copies.Close()
	// No literal, which would be on the stack first.
	piece.service, piece.tenant, piece.env = x.service, x.tenant, env
	piece.request = incoming{Request: x.graph.request, label: x.request.label}
	piece.emit, piece.waitForCapacity = emit, x.waitForCapacity || !start.IsFirst
	piece.span, piece.published, piece.copies = span, untraced, copies
	response, err, isStored := x.storedPiece(ctx, piece)
	if !isStored {
		if _, f := x.service.placeModels(env); f != nil {
			out.err = f
			return out, false
		}
		response, _, err = x.service.respond(ctx, piece)
		piece.published.End()
	}
	for i := range piece.steps {
		piece.steps[i].Path = start.Path
	}
	out.response, out.steps, out.activated = response, piece.steps, piece.activation.stages
	if err != nil {
		out.err = deadlineFault(fault.From(err), env).At(string(start.Step.Stage), string(start.Step.Name), "")
	}
	return out, isStored || piece.progress.isFinal
}

// endGraph makes the response, and stores it where that is asked for.
func (x *call) endGraph(ctx context.Context, o *graph.Outcome) (*request.Response, error) {
	g := x.graph
	delete(g.metadata, request.Partial) // of a runner
	for i, path := range o.Partial {    // there may be thousands of items
		o.Partial[i] = envelope.WithoutIndices(path)
	}
	if len(o.Partial) > 0 {
		if g.metadata == nil {
			g.metadata = map[string]string{}
		}
		slices.Sort(o.Partial)
		g.metadata[request.Partial] = strings.Join(slices.Compact(o.Partial), ",")
	}
	if x.env.StoresResult() {
		reply := x.env.NewReply()
		reply.Timings, reply.Parts, reply.Fault, reply.Metadata, reply.Seq = x.steps, o.Outputs, o.Fault, g.metadata, g.chunks+1
		if o.Fault != nil {
			reply.Parts, reply.Metadata = nil, nil
		}
		isFirst, err := x.storeGraph(ctx, reply)
		if errors.Is(err, bus.ErrTooLarge) {
			o.Fault = fault.Newf(fault.OutputTooLarge, "the outputs are too large to store: %w", err)
			reply.Parts, reply.Fault, reply.Metadata = nil, o.Fault, nil
			isFirst, err = x.storeGraph(ctx, reply)
		}
		switch {
		case err != nil && ctx.Err() != nil:
			return nil, ctx.Err()
		case err != nil:
			return nil, fault.Newf(fault.Internal, "the result cannot be stored: %w", err)
		case !isFirst: // another gateway's is the answer for everybody
			if stored, err := x.service.results.Get(ctx, x.env.RequestID); err == nil {
				return x.responseOf(stored)
			}
		}
	}
	x.progress.isFinal = true
	if o.Fault != nil {
		return nil, o.Fault
	}
	names := x.request.options().Outputs
	if g.chunks > 0 && len(o.Outputs) == 0 {
		names = nil
	}
	outputs, err := selectOutputs(o.Outputs, names)
	if err != nil {
		return nil, err
	}
	return &request.Response{
		RequestID: string(x.env.RequestID), Pipeline: string(x.env.Pipeline), Outputs: outputs, Metadata: g.metadata,
		Timeline: request.Timeline{Steps: x.steps, Branches: g.branches}, Chunks: g.chunks,
	}, nil
}

// storeTimeout bounds the time in which the result of a request with blocks is stored.
const storeTimeout = 5 * time.Second

// storeGraph stores a result, as hosts store the results of other requests, and reports whether it is the first.
// If the graph is kept it tries until the context ends.
func (x *call) storeGraph(ctx context.Context, reply *envelope.Reply) (isFirst bool, err error) {
	message, err := x.service.results.Result(x.env.Result(reply, time.Now()))
	if err != nil {
		return false, err
	}
	for {
		bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
		receipt, err := x.service.bus.PublishAndWait(bounded, message)
		cancel()
		if err == nil || errors.Is(err, bus.ErrTooLarge) || !x.isKept() || process.Sleep(ctx, outagePause) != nil {
			return !receipt.Duplicate, err
		}
	}
}

// sendEnded hands over how a piece has ended, unless nobody waits for it.
func (g *graphRun) sendEnded(ctx context.Context, out endedPiece) {
	select {
	case g.ended <- out:
	case <-ctx.Done():
	}
}

// slowestItems is how many items of a map are in the timeline, for each step.
const slowestItems = 3

// shorten returns a timeline in the order of arrival, with the slowest items of maps alone, of at most
// pipeline.MaxSteps entries. It reuses the slice.
func shorten(steps []request.StepTiming) []request.StepTiming {
	if len(steps) > slowestItems {
		steps = keepSlowest(steps)
	}
	slices.SortStableFunc(steps, func(a, b request.StepTiming) int { return cmp.Compare(a.Arrival, b.Arrival) })
	return steps[:min(len(steps), pipeline.MaxSteps)]
}

// keepSlowest keeps the slowest items of each step.
func keepSlowest(steps []request.StepTiming) []request.StepTiming {
	took := func(t *request.StepTiming) time.Duration { return t.QueueWait + t.BatchWait + t.Run }
	byPath := map[string][]time.Duration{}
	for i := range steps {
		path := envelope.WithoutIndices(steps[i].Path)
		byPath[path] = append(byPath[path], took(&steps[i]))
	}
	for _, all := range byPath {
		slices.Sort(all)
	}
	kept := map[string]int{}
	return slices.DeleteFunc(steps, func(one request.StepTiming) bool {
		path := envelope.WithoutIndices(one.Path)
		all := byPath[path]
		if took(&one) < all[max(0, len(all)-slowestItems)] || kept[path] == slowestItems {
			return true
		}
		kept[path]++
		return false
	})
}
