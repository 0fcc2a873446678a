package call

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/gateway/correlate"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
)

// keys are the idempotency keys as the calls of one gateway share them: what they
// wait for, and the keys that they give back behind their callers' backs.
type keys struct {
	store   *store.Keys
	place   *place
	results *results
	table   *correlate.Table
	metrics *metrics
	// followers wait for requests, releasers give keys back.
	followers, releasers *crew

	mu sync.Mutex
	// followed are the requests that calls here wait for. Each call is admitted
	// and waits for one at most.
	followed map[pipeline.RequestID]*following
}

// following is a request that has a key, and those here that wait for it. One
// subscription and one copy of the answer serve all of them.
type following struct {
	request pipeline.RequestID
	waiting int
	leave   context.CancelFunc
	// over is closed when there is a result, or something else to be known of the
	// key. The fields below are set before.
	over   chan struct{}
	result *envelope.Result
	lost   bool
}

func newKeys(b *bus.Bus, s *Service, settings store.Settings, log *slog.Logger) *keys {
	k := &keys{
		store: store.NewKeys(b, settings), results: s.results, table: s.table, metrics: s.metrics,
		// Those that have nobody left end while others begin.
		followers: newCrew(2 * s.settings.MaxInFlight), releasers: newCrew(s.settings.MaxInFlight),
		followed: map[pipeline.RequestID]*following{},
	}
	k.place = newPlace("the broker keeps no idempotency keys", k.store.Ensure, s.results.reconnects, log)
	return k
}

// follow adds a call to those that wait for the request that has its key. It must
// leave.
func (k *keys) follow(c *keyed, at seen) (*following, *fault.Fault) {
	k.mu.Lock()
	defer k.mu.Unlock()
	request := at.record.Claim.RequestID
	if f, ok := k.followed[request]; ok {
		f.waiting++
		return f, nil
	}
	f := &following{request: request, waiting: 1, over: make(chan struct{})}
	ctx, leave := context.WithCancel(context.Background())
	f.leave = leave
	stages := c.own.memoryStages(at.record.Claim.Durability)
	refused := k.followers.start(func(all context.Context) {
		defer context.AfterFunc(all, leave)()
		k.pursue(ctx, f, c.key, at.record, stages)
	})
	if refused != nil {
		leave()
		return nil, refused
	}
	k.followed[request] = f
	return f, nil
}

// leave takes a call out. The last one ends the wait for the request.
func (k *keys) leave(f *following) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if f.waiting--; f.waiting == 0 {
		f.leave()
		k.drop(f)
	}
}

// drop makes calls that come from now on look for themselves. The lock is held.
func (k *keys) drop(f *following) {
	if k.followed[f.request] == f {
		delete(k.followed, f.request)
	}
}

// pursue waits until the request that has the key is answered, its record is
// another, its queue is lost or its time is over; or until nobody waits for it.
func (k *keys) pursue(ctx context.Context, f *following, key store.Key, record store.KeyRecord, stages []pipeline.StageName) {
	defer k.end(f)
	ctx, cancel := context.WithDeadline(ctx, record.Claim.Deadline.Add(grace))
	lost, forget := k.watchQueues(record.Claim, stages)
	defer forget()
	var pumps sync.WaitGroup
	defer pumps.Wait()
	defer cancel()
	answers, changed := make(chan *envelope.Result, 1), make(chan struct{}, 1)
	pumps.Go(func() { answers <- k.awaitResult(ctx, f.request) })
	pumps.Go(func() {
		k.awaitChange(ctx, key, record.Seq)
		changed <- struct{}{}
	})
	select {
	case f.result = <-answers:
	case fault := <-lost:
		f.lost = fault != nil
	case <-changed:
	}
}

// end tells the calls that wait.
func (k *keys) end(f *following) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.drop(f)
	close(f.over)
}

// clockSlack is how far the clocks of two gateways and the broker may differ: a
// queue that was made within so much of a request's admission may be the one that
// it waits in.
const clockSlack = 200 * time.Millisecond

// watchQueues hears when the memory queues are lost that a request may wait in
// since it was admitted, by whatever gateway.
func (k *keys) watchQueues(c *envelope.Claim, stages []pipeline.StageName) (lost <-chan *fault.Fault, forget func()) {
	if len(stages) == 0 {
		return nil, func() {}
	}
	id := pipeline.ExecutionID(uuid.Must(uuid.NewV7()).String()) // of no execution: nobody replies
	w, err := k.table.RegisterSince(c.AdmittedAt.Add(clockSlack), id, stages, correlate.Room{})
	if err != nil {
		return nil, func() {} // where too many wait here, the request's deadline tells
	}
	return w.Failed(), w.Forget
}

// awaitResult returns the request's answer; nil when it cannot be read, or the
// context ends.
func (k *keys) awaitResult(ctx context.Context, request pipeline.RequestID) (r *envelope.Result) {
	patiently(ctx, func() (err error) {
		r, err = k.results.store.Wait(ctx, request)
		return err
	})
	return r
}

// awaitChange returns when the key's record is another, or the context ends.
func (k *keys) awaitChange(ctx context.Context, key store.Key, seq uint64) {
	patiently(ctx, func() error { return k.store.Wait(ctx, key, seq) })
}

// patiently asks until there is an answer, or the context ends: that the broker
// does not say is no reason to give up.
func patiently(ctx context.Context, ask func() error) {
	pause := time.NewTicker(lookPause)
	defer pause.Stop()
	for {
		if err := ask(); err == nil || errors.Is(err, envelope.ErrMalformed) {
			return
		}
		select {
		case <-pause.C:
		case <-ctx.Done():
			return
		}
	}
}

// releaseBudget is the least that a release has to get through to the broker.
const releaseBudget = time.Second

// release frees the key behind its caller's back. Where that does not succeed it
// is free when the request's deadline has passed.
func (k *keys) release(key store.Key, r store.KeyRecord) {
	until := r.Claim.Deadline.Add(grace)
	if least := time.Now().Add(releaseBudget); until.Before(least) {
		until = least
	}
	_ = k.releasers.start(func(ctx context.Context) {
		ctx, cancel := context.WithDeadline(ctx, until)
		defer cancel()
		if err := k.store.Release(ctx, key, r); err == nil {
			k.metrics.keyed(released)
		}
	})
}

// stop waits for what is released, for a second at most.
func (k *keys) stop() {
	k.followers.stop(0)
	k.releasers.stop(releaseBudget)
}
