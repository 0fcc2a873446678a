package call

import (
	"context"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// keys are the idempotency keys as the calls of one gateway share them: the first
// requests that calls follow, and the keys that are released in the background.
type keys struct {
	service *Service
	store   *store.Keys
	stream  *store.LazyStream
	// watches wait for first requests, releases release keys.
	watches, releases *tasks

	mu sync.Mutex
	// firsts are the first requests that calls here follow. Each call is admitted
	// and follows at most one.
	firsts map[pipeline.RequestID]*firstRequest
}

// firstRequest is a request that has a key, and is followed here. One subscription
// and one copy of its result serve all followers.
type firstRequest struct {
	id        pipeline.RequestID
	followers int
	cancel    context.CancelFunc
	// done closes when there is a result, or something else to be known of the key.
	// The fields below are set before.
	done   chan struct{}
	result *envelope.Result
	isLost bool
}

func newKeys(s *Service) *keys {
	k := &keys{
		service: s, store: store.NewKeys(s.bus, s.settings.Idempotency), firsts: map[pipeline.RequestID]*firstRequest{},
		// Watches that nobody follows any more end while others begin.
		watches: newTasks(2 * s.settings.MaxInFlight), releases: newTasks(s.settings.MaxInFlight),
	}
	k.stream = s.NewLazyStream("the broker stores no idempotency keys", k.store.Ensure)
	return k
}

// join makes a call a follower of the request that has its key. It must leave.
func (k *keys) join(i *idempotent, state keyState) (*firstRequest, *fault.Fault) {
	k.mu.Lock()
	defer k.mu.Unlock()
	claim := state.record.Claim
	if r, ok := k.firsts[claim.RequestID]; ok {
		r.followers++
		return r, nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &firstRequest{id: claim.RequestID, followers: 1, cancel: cancel, done: make(chan struct{})}
	stages := i.own.memoryStages(claim.Durability)
	if f := k.watches.start(func(stopping context.Context) {
		defer context.AfterFunc(stopping, cancel)()
		k.watch(ctx, r, i.key, state.record, stages)
	}); f != nil {
		cancel()
		return nil, f
	}
	k.firsts[r.id] = r
	return r, nil
}

// leave takes a follower out. The last one ends the watch.
func (k *keys) leave(r *firstRequest) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if r.followers--; r.followers == 0 {
		r.cancel()
		k.removeLocked(r)
	}
}

// removeLocked makes later calls look up the key themselves.
func (k *keys) removeLocked(r *firstRequest) {
	if k.firsts[r.id] == r {
		delete(k.firsts, r.id)
	}
}

// watch waits until the request has a result, its key's record changes, its queue
// is lost or its time is over; or until nobody follows it.
func (k *keys) watch(ctx context.Context, r *firstRequest, key request.Key, record store.KeyRecord, stages []pipeline.StageName) {
	defer func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.removeLocked(r)
		close(r.done)
	}()
	ctx, cancel := context.WithDeadline(ctx, record.Claim.Deadline.Add(grace))
	var pumps sync.WaitGroup
	defer pumps.Wait()
	defer cancel()
	results, changed := make(chan *envelope.Result, 1), make(chan struct{}, 1)
	pumps.Go(func() {
		var result *envelope.Result // nil where it cannot be read, or the context ends
		_ = untilAnswered(ctx, func() (err error) {
			result, err = k.service.results.Wait(ctx, r.id)
			return err
		})
		results <- result
	})
	pumps.Go(func() {
		_ = untilAnswered(ctx, func() error { return k.store.Wait(ctx, key, record.Seq) })
		changed <- struct{}{}
	})
	// The request, of whatever gateway, may wait in one of these queues.
	lost, unwatch := k.service.watchLostQueue(stages, record.Claim.AdmittedAt.Add(clockSlack))
	defer unwatch()
	select {
	case r.result = <-results:
	case <-lost:
		r.isLost = true
	case <-changed:
	}
}

// clockSlack is how far the clocks of two gateways and the broker may differ: a
// queue that was made within so much of a request's admission may be the one that
// it waits in.
const clockSlack = 200 * time.Millisecond

// releaseTimeout is the least that a release has to get through to the broker.
const releaseTimeout = time.Second

// release frees the key in the background. Where that does not succeed the key is
// free once the request's deadline has passed.
func (k *keys) release(key request.Key, r store.KeyRecord) {
	until := r.Claim.Deadline.Add(grace)
	if least := time.Now().Add(releaseTimeout); until.Before(least) {
		until = least
	}
	_ = k.releases.start(func(ctx context.Context) {
		ctx, cancel := context.WithDeadline(ctx, until)
		defer cancel()
		if err := k.store.Release(ctx, key, r); err == nil {
			k.service.metrics.idempotent(released)
		}
	})
}

// stop waits for the releases, for a second at most.
func (k *keys) stop() {
	k.watches.stop(0)
	k.releases.stop(releaseTimeout)
}
