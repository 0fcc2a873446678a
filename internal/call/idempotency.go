package call

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"hash"
	"maps"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// idempotent is a call whose request has an idempotency key. It runs its own
// request where the key is free. Else it follows the first request: the one that
// has the key.
type idempotent struct {
	service *Service
	key     request.Key
	digest  envelope.Digest
	// own is the call of its own request. first stands for the call of the
	// first request, while the call follows one.
	own, first *call
	isCounted  bool
}

// current is the call whose response the call gets, as far as is known.
func (i *idempotent) current() *call {
	if i.first != nil {
		return i.first
	}
	return i.own
}

func (i *idempotent) runOrFollow(ctx context.Context) (*request.Response, error) {
	state, err := i.lookUp(ctx)
	for err == nil {
		switch state.status(i.digest, time.Now()) {
		case keyAnswered:
			i.follow(state.record.Claim.RequestID, stored)
			return i.first.responseOf(state.result)
		case keyMismatched:
			return nil, i.mismatch()
		case keyRunning:
			if state.record.Claim.RequestID == i.own.env.RequestID {
				// Its own claim, whose acknowledgement was lost.
				return i.run(ctx, state.record)
			}
			i.follow(state.record.Claim.RequestID, follower)
			state, err = i.awaitFirst(ctx, state)
		case keyFree:
			response, failure := i.claimAndRun(ctx, state)
			if !errors.Is(failure, store.ErrKeyTaken) {
				return response, failure
			}
			state, err = i.lookUpWithRetry(ctx)
		}
	}
	return i.end(ctx, err)
}

// lookUp reads who has the key, and that request's result. It makes the streams of both
// where they are missing: a key that is lost with its stream is free.
func (i *idempotent) lookUp(ctx context.Context) (keyState, error) {
	for _, stream := range []*store.LazyStream{i.service.keys.stream, i.service.resultsStream} {
		if f := stream.Ensure(ctx); f != nil {
			return keyState{}, f
		}
	}
	record, err := i.service.keys.store.Get(ctx, i.key)
	if err != nil || record.Claim == nil {
		return keyState{record: record}, err
	}
	r, err := i.service.results.Get(ctx, record.Claim.RequestID)
	if errors.Is(err, store.ErrNoResult) {
		return keyState{record: record}, nil
	}
	return keyState{record: record, result: r}, err
}

// lookUpWithRetry is lookUp of a call that has waited. It retries until the deadline while
// the broker does not answer.
func (i *idempotent) lookUpWithRetry(ctx context.Context) (state keyState, err error) {
	err = untilAnswered(ctx, func() (err error) {
		state, err = i.lookUp(ctx)
		return err
	})
	return state, err
}

// lookUpPause is the pause between two questions to a broker that does not answer.
const lookUpPause = 50 * time.Millisecond

// untilAnswered asks until there is an answer. Its errors are the context's, and
// envelope.ErrMalformed for an answer that cannot be read.
func untilAnswered(ctx context.Context, ask func() error) error {
	for {
		if err := ask(); err == nil || errors.Is(err, envelope.ErrMalformed) {
			return err
		}
		if err := process.Sleep(ctx, lookUpPause); err != nil {
			return err
		}
	}
}

// follow makes the call one that gets the response of the first request.
func (i *idempotent) follow(request pipeline.RequestID, outcome string) {
	env := *i.own.env
	env.RequestID = request
	i.first = &call{service: i.service, request: i.own.request, env: &env, emit: i.own.emit, span: untraced, published: untraced}
	i.countOnce(outcome)
}

// awaitFirst waits for the first request, with all calls here that follow it, and
// returns the state of the key then.
func (i *idempotent) awaitFirst(ctx context.Context, state keyState) (keyState, error) {
	w, f := i.service.keys.join(i, state)
	if f != nil {
		return keyState{}, f
	}
	defer i.service.keys.leave(w)
	select {
	case <-w.done:
	case <-ctx.Done():
		return keyState{}, ctx.Err()
	}
	if w.result != nil {
		return keyState{record: state.record, result: w.result}, nil
	}
	now, err := i.lookUpWithRetry(ctx)
	now.isLost = w.isLost && now.record.Seq == state.record.Seq
	return now, err
}

func (i *idempotent) mismatch() *fault.Fault {
	i.first = nil
	i.countOnce(mismatch)
	return fault.InField(fault.IdempotencyMismatch, "idempotency_key", "a request with another payload has it; use a new key for a new request")
}

// keyBytes is about what the record of a key takes.
const keyBytes = 512

// claimAndRun claims the key and runs the call's own request. Its error is
// store.ErrKeyTaken where the call looks up the key again.
func (i *idempotent) claimAndRun(ctx context.Context, state keyState) (*request.Response, error) {
	i.first = nil
	defer func() { i.own.admitted.Leave() }()
	if f := i.service.awaitCapacity(ctx, i.own); f != nil {
		return nil, i.retryIfDisconnected(ctx, f)
	}
	env := i.own.env
	if state.record.Seq == 0 {
		stored, f := i.service.ReserveStored(ctx, i.service.keys.store.Share, keyBytes)
		if f != nil {
			return nil, f
		}
		stored() // soon
	}
	record, err := i.service.keys.store.Claim(ctx, i.key, &envelope.Claim{
		Mesh: env.Mesh, Tenant: env.Tenant, Pipeline: env.Pipeline,
		RequestID: env.RequestID, Digest: i.digest,
		AdmittedAt: env.AdmittedAt, Deadline: env.Deadline, Durability: env.Durability,
	}, state.record.Seq)
	switch {
	case errors.Is(err, store.ErrKeyTaken):
		return nil, err
	case err != nil:
		response, err := i.end(ctx, err)
		return response, i.retryIfDisconnected(ctx, err)
	case state.record.Seq == 0:
		i.service.metrics.idempotent(first)
	default:
		i.service.metrics.idempotent(takenOver)
	}
	return i.run(ctx, record)
}

// retryIfDisconnected turns the error of a disconnected broker into store.ErrKeyTaken,
// after a pause, for a call that has followed another: the broker may reconnect before its
// deadline.
func (i *idempotent) retryIfDisconnected(ctx context.Context, err error) error {
	if !i.isCounted || fault.From(err).Reason != fault.BrokerUnavailable {
		return err
	}
	_ = process.Sleep(ctx, lookUpPause) // the next look-up fails if the context has ended
	return store.ErrKeyTaken
}

// run runs the call's own request. The call holds the key.
func (i *idempotent) run(ctx context.Context, record store.KeyRecord) (*request.Response, error) {
	i.first = nil
	response, err := i.own.run(ctx)
	if err != nil && i.own.freesKey(fault.From(err)) {
		i.service.keys.release(i.key, record)
	}
	return response, err
}

// freesKey reports whether the request, which ended by the fault, leaves its key to
// others: it was never queued, or it ended without a binding answer. A request
// outlives a caller that left, a gateway that stops, and a store that is full for a while.
func (x *call) freesKey(f *fault.Fault) bool {
	isLeft := !x.progress.isFinal &&
		(f.Reason == fault.Cancelled && !x.isCancelled() || f.Reason == fault.ShuttingDown || f.Reason == fault.StoreFull)
	if !isBinding(f) && !isLeft {
		return true
	}
	if x.graph != nil && x.graph.seq != 0 {
		return false // it goes on
	}
	s := &x.sending
	return !x.progress.isFinal && (s.tries == 0 || s.isUnqueued(s.awaitOutcome()))
}

// end returns the error of a call whose key state is unknown or whose deadline has passed.
func (i *idempotent) end(ctx context.Context, err error) (*request.Response, error) {
	switch f, ok := errors.AsType[*fault.Fault](err); {
	case ok:
		return nil, f
	case ctx.Err() != nil:
		return i.current().end(ctx)
	case errors.Is(err, envelope.ErrMalformed):
		return nil, unreadable(err)
	case errors.Is(err, bus.ErrQueueFull):
		return nil, fault.New(fault.Overloaded, "the mesh stores as many idempotency keys as idempotency.max_bytes allows; the request was not queued").
			WithRetryAfter(budget.RetryAfter).Caused(err)
	case errors.Is(err, bus.ErrNoClaims):
		i.service.keys.stream.Reset(ctx)
	}
	return nil, store.Unavailable(err)
}

func (i *idempotent) countOnce(outcome string) {
	if !i.isCounted {
		i.service.metrics.idempotent(outcome)
	}
	i.isCounted = true
}

// keyState is the stored state of an idempotency key.
type keyState struct {
	record store.KeyRecord
	// result is the stored result of the request that has the key; nil where there
	// is none.
	result *envelope.Result
	// isLost is true where the request waited in a memory queue that was lost.
	isLost bool
}

// keyStatus says how a call with the key proceeds.
type keyStatus uint8

const (
	// keyFree: no request has the key, or the one that has it has no binding answer
	// and will have none. The call may claim it.
	keyFree keyStatus = iota
	// keyMismatched: a request with another payload has the key.
	keyMismatched
	// keyRunning: the request has no answer yet.
	keyRunning
	// keyAnswered: the request has a binding answer.
	keyAnswered
)

// grace is how long after its deadline a request may still find its answer: the
// clocks of two gateways differ, and its call looks it up once more.
const grace = time.Second

func (s *keyState) status(d envelope.Digest, now time.Time) keyStatus {
	c := s.record.Claim
	switch {
	case c == nil:
		return keyFree
	case s.isAnswered() && c.Digest == d:
		// Also where the key was released before the answer came.
		return keyAnswered
	case c.Released, s.isHopeless(now):
		return keyFree
	case c.Digest != d:
		return keyMismatched
	}
	return keyRunning
}

// isAnswered reports whether the request has a binding answer.
func (s *keyState) isAnswered() bool { return s.result != nil && isBinding(s.result.Reply.Fault) }

// isHopeless reports whether the request will never have one.
func (s *keyState) isHopeless(now time.Time) bool {
	if s.result != nil {
		return !s.isAnswered()
	}
	return s.isLost || now.After(s.record.Claim.Deadline.Add(grace))
}

// isBinding reports whether a request that ended by the fault, nil for success, is
// done: later requests with its key get the same answer.
func isBinding(f *fault.Fault) bool {
	return f == nil || !f.Retryable() && f.Reason != fault.Cancelled
}

// digest identifies what runners see of a request: two requests have the same
// digest exactly when that is the same. Selected outputs, timeouts and queues are
// no part of it.
func digest(r *request.Request) envelope.Digest {
	d := digester{sha256.New()}
	d.number(uint64(len(r.Inputs)))
	for _, part := range r.Inputs {
		d.part(part)
	}
	d.parameters(r.Parameters)
	d.number(uint64(len(r.Steps)))
	for _, name := range slices.Sorted(maps.Keys(r.Steps)) {
		step := r.Steps[name]
		d.texts(string(name), step.Model.Model, step.Model.Alias, step.Model.Version)
		d.parameters(step.Parameters)
	}
	d.number(uint64(len(r.Metadata)))
	for _, key := range slices.Sorted(maps.Keys(r.Metadata)) {
		d.texts(key, r.Metadata[key])
	}
	if r.IsComplete {
		d.texts("complete")
	}
	return envelope.Digest(d.hash.Sum(nil))
}

// digester writes values so that none can be taken for another: each text has its
// length before it, each list its number.
type digester struct{ hash hash.Hash }

func (d digester) part(p payload.Part) {
	d.texts(p.Name)
	if p.Tensor != nil {
		d.texts("tensor", string(p.Tensor.Datatype))
		d.number(uint64(len(p.Tensor.Shape)))
		for _, extent := range p.Tensor.Shape {
			d.number(uint64(extent))
		}
		d.bytes(p.Tensor.Raw)
	} else {
		d.texts("blob", p.Blob.ContentType)
		d.bytes(p.Blob.Data)
	}
	d.parameters(p.Parameters)
}

func (d digester) parameters(p payload.Parameters) {
	d.texts(p.Key(slices.Collect(maps.Keys(p))))
}

func (d digester) texts(texts ...string) {
	for _, text := range texts {
		d.bytes([]byte(text))
	}
}

func (d digester) bytes(b []byte) {
	d.number(uint64(len(b)))
	d.hash.Write(b)
}

func (d digester) number(n uint64) { d.hash.Write(binary.BigEndian.AppendUint64(nil, n)) }
