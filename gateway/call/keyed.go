package call

import (
	"context"
	"errors"
	"time"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
)

// keyed is a call whose request has an idempotency key. It runs its request where
// the key is free, and else has the answer of the request that has the key.
type keyed struct {
	service *Service
	key     store.Key
	digest  envelope.Digest
	// own is the exchange of its own request. joined stands for the exchange of
	// the request that it waits for; nil while there is none.
	own, joined *exchange
	counted     bool
}

func newKeyed(c *exchange) *keyed {
	return &keyed{
		service: c.service,
		key:     store.Key{Tenant: c.env.Tenant, Pipeline: c.env.Pipeline, Key: c.env.IdempotencyKey},
		digest:  digest(c.request),
		own:     c,
	}
}

// run returns the answer, and the request whose answer it is.
func (k *keyed) run(ctx context.Context) (*Response, pipeline.RequestID, error) {
	response, err := k.answer(ctx)
	if k.joined != nil {
		return response, k.joined.env.RequestID, err
	}
	return response, k.own.env.RequestID, err
}

func (k *keyed) answer(ctx context.Context) (*Response, error) {
	if f := k.ready(ctx); f != nil {
		return nil, f
	}
	at, err := k.look(ctx)
	for err == nil {
		switch at.verdict(k.digest, time.Now()) {
		case finished:
			k.join(at.record.Claim.RequestID, stored)
			return k.joined.found(at.result)
		case mismatched:
			return nil, k.mismatch()
		case running:
			if at.record.Claim.RequestID == k.own.env.RequestID {
				// Its own claim, of which the broker's word was lost.
				return k.made(ctx, at.record)
			}
			k.join(at.record.Claim.RequestID, follower)
			at, err = k.wait(ctx, at)
		case free:
			response, taken := k.take(ctx, at)
			if !errors.Is(taken, store.ErrKeyTaken) {
				return response, taken
			}
			at, err = k.lookAgain(ctx)
		}
	}
	return k.ended(ctx, err)
}

// ready returns nil when there is a place for the key and for the answer.
func (k *keyed) ready(ctx context.Context) *fault.Fault {
	if f := k.service.keys.place.ensure(ctx); f != nil {
		return f
	}
	return k.service.results.ensure(ctx)
}

// look asks who has the key, and whether that request is answered.
func (k *keyed) look(ctx context.Context) (seen, error) {
	record, err := k.service.keys.store.Get(ctx, k.key)
	if err != nil || record.Claim == nil {
		return seen{record: record}, err
	}
	r, err := k.service.results.store.Get(ctx, record.Claim.RequestID)
	if errors.Is(err, store.ErrNoResult) {
		return seen{record: record}, nil
	}
	return seen{record: record, result: r}, err
}

const lookPause = 50 * time.Millisecond

// lookAgain is look of a call that has waited: that the broker does not say is no
// reason to fail before the deadline.
func (k *keyed) lookAgain(ctx context.Context) (seen, error) {
	pause := time.NewTicker(lookPause)
	defer pause.Stop()
	for {
		at, err := k.look(ctx)
		if err == nil || errors.Is(err, envelope.ErrMalformed) {
			return at, err
		}
		select {
		case <-pause.C:
		case <-ctx.Done():
			return seen{}, ctx.Err()
		}
	}
}

// join makes the call one that has the answer of the request.
func (k *keyed) join(request pipeline.RequestID, how string) {
	env := *k.own.env
	env.RequestID = request
	k.joined = newExchange(k.service, k.own.request, &env, k.own.emit)
	k.countOnce(how)
}

// wait waits for the request that has the key, with all calls here that do, and
// returns what is known then.
func (k *keyed) wait(ctx context.Context, at seen) (seen, error) {
	j, f := k.service.keys.follow(k, at)
	if f != nil {
		return seen{}, f
	}
	defer k.service.keys.leave(j)
	select {
	case <-j.over:
	case <-ctx.Done():
		return seen{}, ctx.Err()
	}
	if j.result != nil {
		return seen{record: at.record, result: j.result}, nil
	}
	now, err := k.lookAgain(ctx)
	now.lost = j.lost && now.record.Seq == at.record.Seq
	return now, err
}

func (k *keyed) mismatch() *fault.Fault {
	k.joined = nil
	k.countOnce(mismatch)
	return fault.New(fault.IdempotencyMismatch, "idempotency_key: a request with another payload has it; use a new key for a new request").
		WithViolation("idempotency_key", "used with another payload")
}

// take claims the key and makes the call's own request. store.ErrKeyTaken says that
// another call was quicker.
func (k *keyed) take(ctx context.Context, at seen) (*Response, error) {
	k.joined = nil
	if f := k.service.ready(ctx, k.own); f != nil {
		return nil, k.orLook(f)
	}
	record, err := k.service.keys.store.Claim(ctx, k.key, k.claim(), at.record.Seq)
	switch {
	case errors.Is(err, store.ErrKeyTaken):
		return nil, err
	case err != nil:
		response, err := k.ended(ctx, err)
		return response, k.orLook(err)
	case at.record.Seq == 0:
		k.service.metrics.keyed(first)
	default:
		k.service.metrics.keyed(takenOver)
	}
	return k.made(ctx, record)
}

// orLook is the error, or store.ErrKeyTaken, at which the call looks again: it has waited
// for another, and the broker that is away now may be back before its deadline.
func (k *keyed) orLook(err error) error {
	if k.counted && fault.From(err).Reason == fault.BrokerUnavailable {
		return store.ErrKeyTaken
	}
	return err
}

// made makes the call's own request, which has the key.
func (k *keyed) made(ctx context.Context, record store.KeyRecord) (*Response, error) {
	k.joined = nil
	response, err := k.service.exchanged(ctx, k.own)
	if err != nil && k.own.frees(fault.From(err)) {
		k.service.keys.release(k.key, record)
	}
	return response, err
}

func (k *keyed) claim() *envelope.Claim {
	env := k.own.env
	return &envelope.Claim{
		Mesh: env.Mesh, Tenant: env.Tenant, Pipeline: env.Pipeline,
		RequestID: env.RequestID, Digest: k.digest,
		AdmittedAt: env.AdmittedAt, Deadline: env.Deadline, Durability: env.Durability,
	}
}

// frees reports whether the request, which ended by the fault, leaves its key to
// others: it was never queued, or it ended in a way that does not bind. A caller
// that left does not end it.
func (c *exchange) frees(f *fault.Fault) bool {
	left := f.Reason == fault.Cancelled && !c.answered && !c.calledOff
	if !binds(f) && !left {
		return true
	}
	return !c.answered && c.unqueued()
}

// unqueued reports whether nothing of the request was ever queued. It waits for
// the queue's word where that is on its way.
func (c *exchange) unqueued() bool {
	if c.tries == 0 {
		return true
	}
	l := c.leftover()
	return l.unsent(l.outcome())
}

// ended is what a call gets that could not find out about its key, or whose time
// is over.
func (k *keyed) ended(ctx context.Context, err error) (*Response, error) {
	c := k.own
	if k.joined != nil {
		c = k.joined
	}
	switch f, ok := errors.AsType[*fault.Fault](err); {
	case ok:
		return nil, f
	case ctx.Err() != nil:
		return c.ended(ctx)
	case errors.Is(err, envelope.ErrMalformed):
		return nil, unreadable(err)
	case errors.Is(err, bus.ErrQueueFull):
		return nil, fault.New(fault.Overloaded, "the mesh remembers as many idempotency keys as idempotency.max_bytes allows; the request was not queued").
			WithRetryAfter(admission.RetryAfter).Caused(err)
	case errors.Is(err, bus.ErrNoClaims):
		k.service.keys.place.missing(ctx)
	}
	return nil, unavailable(err)
}

func (k *keyed) countOnce(how string) {
	if !k.counted {
		k.service.metrics.keyed(how)
	}
	k.counted = true
}
