package call

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/gateway/admit"
	"github.com/stagemesh/stagemesh/gateway/load"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// share of a request's time is what it may be expected to wait: the estimate is
// of a mean, and late work is lost work.
const share = 0.8

// room returns nil when every queue on the item's route has room for it, and its
// time is enough for what is ahead of it there; and the queue, if any, that it is
// expected to wait in for longest.
func (c *capacity) room(env *envelope.Envelope) (slowest *queue, f *fault.Fault) {
	now := time.Now()
	class := env.Class()
	var ahead, longest time.Duration
	at := env.Hop()
	for _, hop := range env.Route {
		q := c.known(queueKey{hop.Stage, env.Durability})
		wait, f := q.room(hop, class, now)
		if f != nil {
			return nil, f
		}
		ahead += wait
		if wait > longest {
			longest, at, slowest = wait, hop, q
		}
	}
	left := env.Deadline.Sub(now)
	if left <= 0 {
		return slowest, nil // the call ends by its deadline
	}
	if late := ahead - time.Duration(share*float64(left)); late > 0 {
		return nil, fault.Newf(fault.Overloaded, "there is about %s of work ahead of the request, most of it at stage %s, and it has %s left", rounded(ahead), at.Stage, rounded(left)).
			At(string(at.Stage), string(at.Step), "").WithRetryAfter(spread(late))
	}
	return slowest, nil
}

func (c *capacity) known(key queueKey) *queue {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.queue(key)
}

// queued books an item that is sent to its first queue.
func (c *capacity) queued(env *envelope.Envelope) {
	q := c.known(queueKey{env.Hop().Stage, env.Durability})
	q.mu.Lock()
	defer q.mu.Unlock()
	q.load.Sent(env.Class())
}

// answered books that an item is in none of its queues any more.
func (c *capacity) answered(env *envelope.Envelope) {
	for _, hop := range env.Route {
		c.known(queueKey{hop.Stage, env.Durability}).book((*load.Queue).Done)
	}
}

// withdrawn books that an item was taken back from its first queue.
func (c *capacity) withdrawn(env *envelope.Envelope) {
	c.known(queueKey{env.Hop().Stage, env.Durability}).book((*load.Queue).Withdrawn)
}

func (q *queue) book(what func(*load.Queue)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	what(&q.load)
}

// room returns how long an item will be with the stage, 0 where that is not known,
// or that its queue has no room for it.
func (q *queue) room(hop pipeline.Hop, class pipeline.Class, now time.Time) (time.Duration, *fault.Fault) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if full, free := q.load.Full(class, now); full {
		f := fault.Newf(fault.QueueFull, "the queue of stage %s has no room for a request of priority class %s", hop.Stage, class).
			At(string(hop.Stage), string(hop.Step), "")
		return 0, f.WithRetryAfter(spread(free))
	}
	wait, _ := q.load.Wait(class, now)
	return wait, nil
}

func (q *queue) fresh(now time.Time) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.load.Fresh(now)
}

func (q *queue) seen() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.load.Seen()
}

func (q *queue) own() load.Own {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.load.Own()
}

// observe takes what the broker said when it was asked at that time, at which
// this gateway had done so much, and what a host said of itself.
func (q *queue) observe(b bus.Backlog, at time.Time, own load.Own, p bus.Presence) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if p.Heard {
		// One that has too much to do to say so is as busy as it was.
		q.busy = p.Busy
	}
	s := load.Sample{
		At: at, Taken: b.Taken, Own: own, After: q.load.Own(), Epoch: string(b.Epoch), Total: b.Items, Bytes: b.Bytes, Last: b.Last,
		MaxItems: b.MaxItems, MaxBytes: b.MaxBytes, Busy: q.busy,
	}
	for i, class := range pipeline.Classes() {
		s.Items[i] = b.Classes[class]
	}
	q.load.Observe(s)
}

// report registers the gauges of what is known of queues.
func (c *capacity) report(meter metric.Meter) error {
	items, err := meter.Int64ObservableGauge("stagemesh.gateway.queue_items", metric.WithDescription("Items in a stage's queue, waiting or in flight, as this gateway estimates."))
	if err != nil {
		return err
	}
	rate, err := meter.Float64ObservableGauge("stagemesh.gateway.drain_rate", metric.WithDescription("Items per second that a busy stage takes from its queue, if known."))
	if err != nil {
		return err
	}
	_, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		for _, q := range c.all() {
			q.report(o, items, rate, time.Now())
		}
		return nil
	}, items, rate)
	return err
}

func (c *capacity) all() []*queue {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.queues))
}

// report says nothing of a queue that nobody has asked about lately.
func (q *queue) report(o metric.Observer, items metric.Int64Observable, rate metric.Float64Observable, now time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.load.Fresh(now) {
		return
	}
	of := metric.WithAttributeSet(attribute.NewSet(attribute.String("stage", string(q.key.stage)), attribute.String("durability", string(q.key.durability))))
	o.ObserveInt64(items, int64(q.load.Items(pipeline.Low, now)), of)
	if r, known := q.load.Rate(now); known {
		o.ObserveFloat64(rate, r, of)
	}
}

// The least and the most that a refused caller is asked to wait.
const (
	leastRetry = 100 * time.Millisecond
	mostRetry  = 30 * time.Second
)

// spread is when a caller should come back that is refused for that long: the
// refused ones would come back all at once. Where nothing is known it is after
// retryAfter.
func spread(after time.Duration) time.Duration {
	if after <= 0 {
		after = retryAfter
	}
	after = min(max(after, leastRetry), mostRetry)
	return after + rand.N(after/4)
}

func rounded(d time.Duration) time.Duration { return d.Round(time.Millisecond) }

// patience is how long a call that waits for room waits before it looks again.
const patience = 50 * time.Millisecond

// awaitRoom returns nil when there is room, at once or, where the call waits for
// it, later; else why there is none.
func (s *Service) awaitRoom(ctx context.Context, c *exchange) *fault.Fault {
	for {
		slowest, f := s.capacity.room(c.env)
		c.slowest = slowest
		if f == nil || !c.waits {
			return f
		}
		if gone := s.pauseForRoom(ctx, c.env, f); gone != nil {
			return gone
		}
	}
}

// pauseForRoom waits until it is time to look for room again, of which f said
// that there is none.
func (s *Service) pauseForRoom(ctx context.Context, env *envelope.Envelope, f *fault.Fault) *fault.Fault {
	look := time.NewTimer(patience)
	defer look.Stop()
	select {
	case <-look.C:
		if gone := s.capacity.check(ctx, env.Route, env.Durability); ctx.Err() == nil {
			return gone
		}
		return outOfPatience(ctx, f)
	case <-s.gate.Open().Done():
		return admit.Stopping()
	case <-ctx.Done():
		return outOfPatience(ctx, f)
	}
}

// outOfPatience is what a call gets that waited for room in vain: why there was
// none, unless its caller is gone.
func outOfPatience(ctx context.Context, f *fault.Fault) *fault.Fault {
	if gone := fault.From(ctx.Err()); gone.Reason == fault.Cancelled {
		return gone
	}
	return f
}
