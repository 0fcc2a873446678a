package call

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/trace"

	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/route"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Infer runs one request and returns its response.
func (s *Service) Infer(ctx context.Context, r *request.Request) (*request.Response, error) {
	return s.Stream(ctx, r, nil)
}

// Stream is Infer that hands chunks to emit, in order, as they come; emit may be
// nil. An error of emit ends the call as CANCELLED: its caller has disconnected.
func (s *Service) Stream(ctx context.Context, r *request.Request, emit func(request.Chunk) error) (*request.Response, error) {
	begin, label := time.Now(), s.settings.Router.Label(r.Pipeline, r.ByModel)
	span, carried := s.tracer.begin(r, begin)
	memory := budget.FromContext(ctx)
	response, f := s.infer(ctx, incoming{Request: r, label: label}, reserveChunks(memory, emit), begin, span, carried)
	if f == nil {
		f = reserveResponse(memory, response)
	}
	now := time.Now()
	r.Origin.End(span, f, now)
	s.metrics.request(contextOf(span), label, f, now.Sub(begin))
	s.countRequest(ctx, r, response, f, now.Sub(begin))
	if f != nil {
		return response, f
	}
	return response, nil
}

// reserveChunks returns emit with memory reserved for each chunk while it is written.
func reserveChunks(memory *budget.Account, emit func(request.Chunk) error) func(request.Chunk) error {
	if emit == nil || memory == nil {
		return emit
	}
	return func(c request.Chunk) error {
		part := memory.Part()
		defer part.Close()
		if err := part.ReserveResponse(int64(payload.Size(c.Outputs))); err != nil {
			return err
		}
		return emit(c)
	}
}

// reserveResponse reserves memory for an answer until its port has written it. The caller of
// one that does not fit gets the fault.
func reserveResponse(memory *budget.Account, r *request.Response) *fault.Fault {
	if err := memory.ReserveResponse(int64(payload.Size(r.Outputs))); err != nil {
		return fault.From(err).WithMetadata(requestIDKey, r.RequestID)
	}
	return nil
}

// infer is the path of every request: admit, resolve, check, register, publish,
// await, finish. Over HTTP/2 each request has a new goroutine, and here its stack is
// near 8 KiB. Growing beyond takes 7 % of the gateway's time, so no function on this
// path has large values.
func (s *Service) infer(ctx context.Context, r incoming, emit func(request.Chunk) error, begin time.Time, span trace.Span, carried envelope.Trace) (*request.Response, *fault.Fault) {
	in := s.placeOf(ctx)
	if !r.isShadow() {
		if f := in.admit(r.Request); f != nil {
			return nil, f
		}
		defer in.release()
	}
	id := r.ID
	if id == "" {
		id = pipeline.RequestID(newID())
	}
	p, f := s.Resolve(r.Pipeline, r.ByModel)
	if f != nil {
		return nil, s.reject(id, r.Request, f, span, begin)
	}
	if r.isShadow() {
		r.replaceModels(&p)
	}
	if f := s.limiter.AcquirePipeline(in.tenant, p.Name, p.MaxInFlight); f != nil {
		return nil, s.reject(id, r.Request, f, span, begin)
	}
	defer s.limiter.ReleasePipeline(in.tenant, p.Name, p.MaxInFlight)
	env, f := s.adaptAndCheck(ctx, in, id, &r, &p, begin)
	if f != nil {
		return nil, s.reject(id, r.Request, f, span, begin)
	}
	var again *route.Shadow
	if p.HasBlocks() {
		f = s.settings.Router.Pin(env)
	} else {
		again, f = s.placeModels(env)
	}
	for f != nil && !r.isShadow() && s.settings.Router.Moved(r.Pipeline, r.ByModel, &p) {
		if env, f = s.adaptAndCheck(ctx, in, id, &r, &p, begin); f == nil {
			again, f = s.placeModels(env)
		}
	}
	if f != nil {
		return nil, s.reject(id, r.Request, f, span, begin)
	}
	env.Trace = carried
	describe(span, env)
	if earlier, ok := ctx.Deadline(); ok && !earlier.After(env.Deadline) {
		env.Deadline = earlier
	} else {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, env.Deadline)
		defer cancel()
	}
	env.TakesChunks = emit != nil
	env.Tenant = budget.TenantOf(ctx)
	x := &call{service: s, request: r, env: env, tenant: in.tenant, emit: emit, span: span, published: untraced}
	x.setPipeline(ctx, &p, in.memory)
	response, id, err := s.respond(ctx, x)
	took := time.Since(begin)
	x.published.End() // if nothing has acknowledged it
	if err != nil {
		f := s.logFailure(id, r.Request, deadlineFault(fault.From(err), env), span)
		x.remember(id, took, f, s.tracer.keep(x, f, took))
		s.tap(x, &p, nil, f, took)
		if r.StoreResult {
			return &request.Response{Timeline: request.Timeline{Total: took, Steps: x.steps, Branches: x.branches()}}, f
		}
		return nil, f
	}
	x.remember(id, took, nil, s.tracer.keep(x, nil, took))
	response.Timeline.Total = took
	if x.activation.stages != nil {
		x.addActivated(response)
	}
	s.tap(x, &p, response, nil, took)
	if again != nil && id == x.env.RequestID {
		s.startShadow(x, again, response)
	}
	return response, nil
}

// setPipeline sets what the call has of its pipeline. It is no part of infer, whose stack it would take.
func (x *call) setPipeline(ctx context.Context, p *pipeline.Pipeline, memory *budget.Account) {
	x.waitForCapacity = p.WaitForCapacity
	if x.request.WaitForCapacity != nil {
		x.waitForCapacity = *x.request.WaitForCapacity
	}
	if p.HasBlocks() {
		own := *p // it leaves the stack, also in requests without blocks if it were p
		x.graph = newGraphRun(&own, cmp.Or(memory, budget.FromContext(ctx)))
	}
}

// adaptAndCheck adapts the request by Settings.Adapt and checks it. The call keeps the caller's request too,
// which its idempotency key stands for.
func (s *Service) adaptAndCheck(ctx context.Context, in place, id pipeline.RequestID, r *incoming, p *pipeline.Pipeline, begin time.Time) (*envelope.Envelope, *fault.Fault) {
	if s.settings.Adapt == nil || len(r.Inputs) != 1 || !isDocument(r.Inputs[0]) || r.Passthrough {
		return s.check(id, r.Request, p, begin)
	}
	adapted, err := s.settings.Adapt(r.Request, *p, cmp.Or(in.memory, budget.FromContext(ctx)))
	if err != nil {
		return nil, fault.From(err)
	}
	r.adapted = adapted
	return s.check(id, adapted, p, begin)
}

// isDocument reports whether a part is JSON or MessagePack without a name.
func isDocument(p payload.Part) bool {
	return p.Name == "" && p.Tensor == nil && (payload.IsJSON(p.Blob.ContentType) || msgpack.Is(p.Blob.ContentType))
}

// remember records how the request ended, for Explain; kept is the span that it got then. A
// call with the response of another request, whose key it has, is none of its own.
func (x *call) remember(id pipeline.RequestID, took time.Duration, f *fault.Fault, kept trace.Span) {
	if id == x.env.RequestID {
		x.service.finished.Add(x.env, x.steps, x.branches(), took, f, cmp.Or(traceID(x.span), traceID(kept), x.env.Trace.ID()))
	}
}

// branches returns the blocks and branches of the timeline; none without blocks.
func (x *call) branches() []envelope.Branch {
	if x.graph == nil {
		return nil
	}
	return x.graph.branches
}

// reject ends a request that has no envelope yet.
func (s *Service) reject(id pipeline.RequestID, r *request.Request, f *fault.Fault, span trace.Span, begin time.Time) *fault.Fault {
	s.finished.Add(&envelope.Envelope{RequestID: id, Pipeline: pipeline.Name(r.Pipeline), Gateway: s.settings.Gateway, AdmittedAt: begin},
		nil, nil, time.Since(begin), f, cmp.Or(traceID(span), r.Trace.ID()))
	return s.logFailure(id, r, f, span)
}

// respond returns the response, and the request whose response it is: the
// call's own, or the first request with its idempotency key.
func (s *Service) respond(ctx context.Context, x *call) (*request.Response, pipeline.RequestID, error) {
	if x.env.IdempotencyKey != "" {
		i := &idempotent{
			service: s, own: x, digest: digest(x.request.Request),
			key: request.Key{Tenant: x.env.Tenant, Pipeline: x.env.Pipeline, Key: x.env.IdempotencyKey},
		}
		response, err := i.runOrFollow(ctx)
		return response, i.current().env.RequestID, err
	}
	defer func() { x.admitted.Leave() }()
	if f := s.awaitCapacity(ctx, x); f != nil {
		return nil, x.env.RequestID, f
	}
	response, err := x.run(ctx)
	return response, x.env.RequestID, err
}

// run makes the request. Callers may cancel it meanwhile.
func (x *call) run(ctx context.Context) (*request.Response, error) {
	if !x.isKeptPiece() {
		x.mintExecution()
	}
	x.env.Local = (*localGateway)(x.service)
	if err := x.register(); err != nil {
		return nil, err
	}
	defer x.pending.forget()
	if x.graph != nil {
		response, err := x.runGraph(ctx)
		x.leaveGraph(ctx)
		return response, err
	}
	err := x.send()
	var response *request.Response
	for response == nil && err == nil {
		response, err = x.handleNext(ctx)
	}
	x.finish(err)
	return response, err
}

// send hands the item to a host in this process, or publishes it.
func (x *call) send() error {
	x.tracePublish()
	isHandedOver := x.service.bus.HandOver(x.env)
	if isHandedOver {
		x.published.End()
	} else {
		if err := x.copies.Reserve(int64(payload.Size(x.env.Parts) + payload.Size(x.env.Kept))); err != nil {
			return err
		}
		if err := x.encode(); err != nil {
			return err
		}
	}
	x.admitted.Sent()
	if !isHandedOver {
		x.publish()
	}
	return nil
}

// incoming is a request of a caller or, with shadowModels, one that the gateway repeats on other
// models: the models of its steps. It takes no place of callers' requests.
type incoming struct {
	*request.Request
	// adapted is the request with the inputs, parameters and outputs of a document; nil without one.
	adapted *request.Request
	// label is the pipeline's in metrics; empty for a shadow.
	label        string
	shadowModels map[pipeline.StepName]payload.ModelRef
}

// options returns the request with the parameters and outputs that count.
func (r incoming) options() *request.Request { return cmp.Or(r.adapted, r.Request) }

func (r incoming) isShadow() bool { return r.shadowModels != nil }

// call is one request, from its admission to its response.
type call struct {
	service *Service
	request incoming
	env     *envelope.Envelope
	// tenant is whose places the request takes.
	tenant string
	// emit takes the chunks; nil where the caller wants the response alone.
	emit func(request.Chunk) error
	// waitForCapacity is true where the request waits for capacity. admitted is nil before it has.
	waitForCapacity bool
	admitted        *admission.Admitted
	// activation records the waits for first hosts: for which stages, since when, and when the caller
	// last got an event.
	activation struct {
		stages          []string
		since, notified time.Time
	}

	// graph is nil where the pipeline has no blocks. copies has the message of a step of one that has, of
	// which many may have the same parts; nil for a whole request.
	graph  *graphRun
	copies *budget.Account

	pending *pending
	// steps is the timeline that the last reply had.
	steps []request.StepTiming
	// span is the request's, published of its way to the first stage: untraced where the request
	// is not traced.
	span, published trace.Span
	// sending is the publish, progress the state of the answer, and search the look-ups
	// of the stored result.
	sending  sending
	progress progress
	search   search
}

// place is what a request takes of a gateway while it is in flight.
type place struct {
	service *Service
	// tenant is whose place it is, and memory has the inputs where no port has reserved them.
	tenant string
	memory *budget.Account
}

// placeOf returns the place of a request of that context, which it does not have yet. All callers
// in this process are one tenant: a job that one tenant's share refuses would hold up the jobs of all.
func (s *Service) placeOf(ctx context.Context) place {
	if budget.FromContext(ctx) == nil {
		return place{s, "", budget.NewAccount(s.settings.Budget, "")}
	}
	return place{s, budget.TenantOf(ctx), nil}
}

// admit takes a request into flight, which must release.
func (p place) admit(r *request.Request) *fault.Fault {
	if f := p.service.limiter.Acquire(p.tenant); f != nil {
		return f
	}
	if err := p.memory.Reserve(int64(payload.Size(r.Inputs))); err != nil {
		p.service.limiter.Release(p.tenant)
		return fault.From(err)
	}
	return nil
}

func (p place) release() {
	p.memory.Close()
	p.service.limiter.Release(p.tenant)
}

// awaitCapacity returns nil when the mesh can take the request: now or, where it
// waits for capacity, later. After it, also if it fails, x.admitted leaves.
func (s *Service) awaitCapacity(ctx context.Context, x *call) (f *fault.Fault) {
	if x.env.StoresResult() {
		if f := s.BrokerFault(); f != nil {
			return f
		}
	}
	f = s.admit(ctx, x, false)
	if f == nil || x.admitted != nil || !x.waitForCapacity && !s.activations.waitsFor(f) {
		return f
	}
	waiting, leave := s.unsent.join(ctx, x.env)
	defer leave()
	try := func() *fault.Fault { return s.admit(waiting, x, x.waitForCapacity) }
	if !s.activations.waitsFor(f) {
		f = try()
	}
	if s.activations.waitsFor(f) {
		f = s.awaitHosts(waiting, x, f, try)
	}
	if waiting.Err() != nil && ctx.Err() == nil {
		return cancelledFault()
	}
	return f
}

// admit is awaitCapacity of a mesh whose stages have hosts; wait has it wait for room in their queues.
func (s *Service) admit(ctx context.Context, x *call, wait bool) (f *fault.Fault) {
	if x.graph != nil {
		return s.admitGraph(ctx, x)
	}
	isForHost := slices.ContainsFunc(x.env.Route, func(hop pipeline.Hop) bool { return hop.Host != "" })
	x.admitted, f = s.availability.Admit(ctx, x.env, x.tenant, wait && !isForHost)
	if f != nil && isForHost {
		if f.Reason == fault.NoCapacity || f.Reason == fault.BrokerUnavailable {
			forAnyHost(x.env.Route)
		}
		x.admitted, f = s.availability.Admit(ctx, x.env, x.tenant, wait)
	}
	if f == nil {
		f = s.checkClock() // the broker has just reported a queue, and its time
	}
	if f == nil && x.env.StoresResult() {
		f = s.readyStore(ctx, x)
	}
	return f
}

// readyStore returns nil where the broker can store the result of a request.
func (s *Service) readyStore(ctx context.Context, x *call) *fault.Fault {
	f := s.StoreFault()
	if f == nil && !x.isKeptPiece() { // else the request has reserved space
		if f = s.resultsStream.Ensure(ctx); f == nil {
			// It is about as large as the inputs. A job's is deleted soon, and a fault would hold up the jobs of all tenants.
			var stored func()
			if stored, f = s.reserveStored(ctx, s.results.Share, s.settings.Shared && !x.request.StoreResult, int64(payload.Size(x.request.Inputs))); f == nil {
				stored() // by whoever ends the request
			}
		}
	}
	return f
}

// register makes the call pending under its execution.
func (x *call) register() error {
	x.pending = &pending{execution: x.env.ExecutionID, env: x.env, graph: x.graph, isLossy: x.request.LossyChunks}
	if err := x.service.table.register(x.pending); err != nil {
		if f, ok := errors.AsType[*fault.Fault](err); ok {
			return f
		}
		return fault.Newf(fault.Overloaded, "%w", err).WithRetryAfter(budget.RetryAfter)
	}
	return nil
}

// newID returns a UUID of version 7.
func newID() string { return uuid.Must(uuid.NewV7()).String() }

// mintExecution gives the execution an ID. It is new for every execution: the broker would
// drop one used before as a duplicate.
func (x *call) mintExecution() {
	x.env.ExecutionID = pipeline.ExecutionID(newID())
}

// encode encodes the execution into the message to publish.
func (x *call) encode() error {
	var err error
	x.sending = sending{failed: make(chan struct{}, 1)}
	x.sending.message, err = x.service.bus.Item(x.env)
	switch {
	case errors.Is(err, bus.ErrTooLarge):
		return bus.Rejection(err, x.env.Hop())
	case err != nil:
		// All else that the encoder refuses is text that is not UTF-8.
		return fault.Newf(fault.InvalidRequest, "the request cannot be encoded: %w", err)
	}
	return nil
}

// memoryStages are the stages of the route whose memory queues may hold the
// request: none for a durable one.
func (x *call) memoryStages(d pipeline.Durability) []pipeline.StageName {
	if d == pipeline.File {
		return nil
	}
	return stagesOf(x.env.Route)
}

// stagesOf returns the stages of a route. A request that waits in a host's own queue is not
// lost with that: others take it over.
func stagesOf(route []pipeline.Hop) []pipeline.StageName {
	out := make([]pipeline.StageName, len(route))
	for i := range route {
		out[i] = route[i].Stage
	}
	return out
}

// handleNext handles one event; response is nil while the call continues.
func (x *call) handleNext(ctx context.Context) (*request.Response, error) {
	select {
	case <-x.sending.failed:
		return nil, x.handleFailedPublish(ctx)
	case <-x.sending.retry:
		x.publishAgain()
		return nil, nil
	case <-x.pending.ready:
		return x.handleEvent(ctx, x.pending.next())
	case <-x.search.due:
		return x.lookUpResult(ctx)
	case <-x.progress.overdue():
		return nil, fault.Newf(fault.StreamInterrupted, "the stream broke after %d chunks: the next message did not come in time", x.progress.seq)
	case <-ctx.Done():
		return x.end(ctx)
	}
}

// lastLookUp bounds the look-up of a stored result at the deadline.
const lastLookUp = 500 * time.Millisecond

// end returns the response or error of a call whose context has ended.
func (x *call) end(ctx context.Context) (*request.Response, error) {
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		if cause := context.Cause(ctx); errors.Is(cause, errBranchEnded) {
			return nil, cause
		}
		return nil, ctx.Err()
	}
	if p, known := x.sending.outcome(); known && errors.Is(p.err, bus.ErrQueueFull) {
		return nil, bus.Rejection(p.err, x.env.Hop())
	}
	if x.env.StoresResult() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastLookUp)
		defer cancel()
		if response, err := x.lookUpResult(last); response != nil || err != nil {
			return response, err
		}
	}
	return nil, x.deadlineError()
}

// finish cancels remaining work and updates the queue estimates.
func (x *call) finish(err error) {
	x.progress.stop()
	if err != nil && x.leavesWork(err) {
		x.service.cancels.start(x)
	}
	switch {
	case err != nil && fault.From(err).Reason == fault.DeadlineExceeded:
		if !x.request.isShadow() {
			x.admitted.Late()
		}
	case x.progress.isFinal:
		x.service.availability.Answered(x.env)
	}
}

// deadlineFault returns the fault. Where that is the end of the call's own time, it
// says how long that was.
func deadlineFault(f *fault.Fault, env *envelope.Envelope) *fault.Fault {
	if f.Reason != fault.DeadlineExceeded || !errors.Is(f, context.DeadlineExceeded) || f.Stage != "" {
		return f
	}
	return fault.Newf(fault.DeadlineExceeded, "no answer within %s", env.TimeoutText()).Caused(context.DeadlineExceeded)
}

// logFailure logs the fault and returns it with the request's ID: at debug level, or
// louder where the mesh is at fault.
func (s *Service) logFailure(id pipeline.RequestID, r *request.Request, f *fault.Fault, span trace.Span) *fault.Fault {
	level := slog.LevelDebug
	if f.Reason == fault.Internal {
		level = slog.LevelError
	}
	s.settings.Logger.With(tracing.LogIDs(span)...).Log(context.Background(), level, "request failed", "request_id", id, "pipeline", fmt.Sprintf("%.*s", fault.MaxQuoted, r.Pipeline),
		"reason", f.Reason, "error", f, "cause", f.Unwrap())
	return f.WithMetadata(requestIDKey, string(id))
}

// sending is the publish of an execution.
type sending struct {
	message bus.Message
	tries   int
	// latest is the latest publish, nil before the first.
	latest *publication
	// failed gets a value where the item was not newly queued: nearly all are, and
	// then nothing needs to wake.
	failed chan struct{}
	// retry ticks when the next publish is due.
	retry <-chan time.Time
}

// publication is one publish. Its outcome is set when done closes: the call and its
// cancellation may both wait for it.
type publication struct {
	done    chan struct{}
	outcome publishOutcome
}

type publishOutcome struct {
	receipt bus.Receipt
	err     error
}

// outcome returns the outcome of the latest publish, where that is known.
func (s *sending) outcome() (o publishOutcome, known bool) {
	if s.latest == nil {
		return publishOutcome{}, false
	}
	select {
	case <-s.latest.done:
		return s.latest.outcome, true
	default:
		return publishOutcome{}, false
	}
}

// outcomeTimeout bounds the wait for the outcome of a publish.
const outcomeTimeout = time.Second

// awaitOutcome returns the outcome of the latest publish: unknown where that takes too
// long.
func (s *sending) awaitOutcome() publishOutcome {
	if s.latest == nil {
		return publishOutcome{err: bus.ErrUnknown}
	}
	timer := time.NewTimer(outcomeTimeout)
	defer timer.Stop()
	select {
	case <-s.latest.done:
		return s.latest.outcome
	case <-timer.C:
		return publishOutcome{err: bus.ErrUnknown}
	}
}

// isUnqueued reports whether nothing was ever queued, by the outcome of the latest
// publish: an earlier one may have queued the item.
func (s *sending) isUnqueued(latest publishOutcome) bool {
	return s.tries <= 1 && (latest.receipt.Duplicate || latest.err != nil && !errors.Is(latest.err, bus.ErrUnknown))
}

// retryPause is the pause between two publishes of an item.
const retryPause = 50 * time.Millisecond

// publish sends the item to its first queue.
func (x *call) publish() {
	s := &x.sending
	s.tries++
	p, failed, published := &publication{done: make(chan struct{})}, s.failed, x.published
	s.latest = p
	pending, stages, sentAt := x.pending, x.memoryStages(x.env.Durability), time.Now()
	x.service.bus.Publish(s.message, func(r bus.Receipt, err error) {
		if err == nil {
			published.End()
		}
		if err == nil || errors.Is(err, bus.ErrUnknown) {
			pending.recordQueues(stages, sentAt)
		}
		p.outcome = publishOutcome{r, err}
		close(p.done)
		if err != nil || r.Duplicate {
			failed <- struct{}{}
		}
	})
}

// publishAgain repeats the publish, unless it is known that the queue has no space.
func (x *call) publishAgain() {
	if x.waitForCapacity && x.sending.tries == 0 {
		if !x.service.availability.HasSpace(x.env, x.tenant) {
			x.sending.retry = time.After(retryPause)
			return
		}
		if x.service.bus.HandOver(x.env) { // it was never queued
			x.published.End()
			x.sending = sending{}
			return
		}
	}
	x.publish()
}

// handleFailedPublish decides about a publish that did not queue the item. Where
// the outcome is unknown it is repeated under the same ID, which cannot run the
// request twice. A duplicate on the first try is another request's ID: the item was
// not queued.
func (x *call) handleFailedPublish(ctx context.Context) error {
	s := &x.sending
	o, _ := s.outcome()
	switch {
	case errors.Is(o.err, bus.ErrUnknown), errors.Is(o.err, bus.ErrDisconnected) && s.tries > 1:
		// The broker may come back, or the answer may come meanwhile.
		s.retry = time.After(retryPause)
	case errors.Is(o.err, bus.ErrQueueFull) && x.waitForCapacity:
		if s.tries == 1 {
			s.tries = 0 // the item was never queued
		}
		s.retry = time.After(retryPause)
	case errors.Is(o.err, bus.ErrNoQueue) && s.tries == 1 && x.env.Hop().Host != "":
		// The host has left, and its queue with it.
		forAnyHost(x.env.Route)
		if err := x.encode(); err != nil {
			return err
		}
		x.publish()
	case o.err != nil:
		f := bus.Rejection(o.err, x.env.Hop())
		if !errors.Is(o.err, bus.ErrNoQueue) || !x.service.activations.waitsFor(f) {
			return f
		}
		// Admission could not learn whether the stage has a host.
		waiting, leave := x.service.unsent.join(ctx, x.env)
		defer leave()
		f = x.service.awaitHosts(waiting, x, f, func() *fault.Fault {
			if f, _ := x.pending.outcome(); f != nil { // cancelled meanwhile
				return f
			}
			return x.service.availability.CheckHosts(waiting, x.env.Route, x.env.Durability)
		})
		if f != nil {
			return f
		}
		if s.tries == 1 {
			s.tries = 0 // the item was never queued
		}
		x.pending.forgetQueues()
		x.publish()
	case o.receipt.Duplicate && s.tries == 1 && x.isKeptPiece():
		// Another run of the request has sent the step, and may get the reply.
		s.tries++
		x.search.announce()
	case o.receipt.Duplicate && s.tries == 1:
		x.service.metrics.collisions.Add(ctx, 1)
		x.mintExecution()
		if err := x.encode(); err != nil {
			return err
		}
		x.pending.rename(x.env.ExecutionID)
		x.publish()
	}
	return nil
}
