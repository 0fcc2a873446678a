package admission

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Queue is what is known of one queue of a stage.
type Queue struct {
	key queueKey
	// hosts is the latest report about its hosts, which may not be done, and
	// previous the one before; the lock of Availability guards both.
	hosts, previous *hostReport
	// asked is full while the broker is asked for the backlog.
	asked chan struct{}

	mu       sync.Mutex
	estimate estimator
	// busy is true when a host had items waiting at its last report.
	busy bool
}

// maxWaitShare is the part of a request's time that it may be expected to wait:
// the estimate is of a mean, and late work is lost work.
const maxWaitShare = 0.8

// CheckQueues returns nil when every queue on the item's route has space for it,
// and the work ahead of it leaves it enough time. It also returns the queue where
// the item is expected to wait longest, if any.
func (a *Availability) CheckQueues(env *envelope.Envelope) (slowest *Queue, f *fault.Fault) {
	now := time.Now()
	class := env.Class()
	var total, longest time.Duration
	slowestHop := env.Hop()
	for _, hop := range env.Route {
		q := a.known(queueKey{hop.Stage, env.Durability})
		wait, f := q.wait(hop, class, now)
		if f != nil {
			return nil, f
		}
		total += wait
		if wait > longest {
			longest, slowestHop, slowest = wait, hop, q
		}
	}
	left := env.Deadline.Sub(now)
	if left <= 0 {
		return slowest, nil // the call ends by its deadline
	}
	if late := total - time.Duration(maxWaitShare*float64(left)); late > 0 {
		f := fault.Newf(fault.Overloaded, "there is about %s of work ahead of the request, most of it at stage %s, and it has %s left",
			total.Round(time.Millisecond), slowestHop.Stage, left.Round(time.Millisecond))
		return nil, at(f, slowestHop).WithRetryAfter(spread(late))
	}
	return slowest, nil
}

// wait returns how long an item will be with the stage, 0 where that is not known,
// or the fault that the queue has no space for it.
func (q *Queue) wait(hop pipeline.Hop, class pipeline.Class, now time.Time) (time.Duration, *fault.Fault) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if full, free := q.estimate.full(class, now); full {
		f := fault.Newf(fault.QueueFull, "the queue of stage %s has no space for a request of priority class %s", hop.Stage, class)
		return 0, at(f, hop).WithRetryAfter(spread(free))
	}
	wait, _ := q.estimate.wait(class, now)
	return wait, nil
}

// Sent records that this gateway has sent the item to its first queue.
func (a *Availability) Sent(env *envelope.Envelope) {
	q := a.known(queueKey{env.Hop().Stage, env.Durability})
	q.mu.Lock()
	defer q.mu.Unlock()
	q.estimate.own.sent[indexOf(env.Class())]++
}

// Answered records that the item was answered in time: it is in no queue any more.
func (a *Availability) Answered(env *envelope.Envelope) {
	for _, hop := range env.Route {
		a.known(queueKey{hop.Stage, env.Durability}).add(func(own *counters) { own.answered++ })
	}
}

// Withdrawn records that the item was taken back from its first queue.
func (a *Availability) Withdrawn(env *envelope.Envelope) {
	a.known(queueKey{env.Hop().Stage, env.Durability}).add(func(own *counters) { own.withdrawn++ })
}

// Late records that an item was not answered in time which was expected to wait
// longest in this queue.
func (q *Queue) Late() {
	q.add(func(own *counters) { own.late++ })
}

func (q *Queue) add(count func(*counters)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	count(&q.estimate.own)
}

func (q *Queue) fresh(now time.Time) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.estimate.fresh(now)
}

// observed reports whether the broker has ever reported the queue.
func (q *Queue) observed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.estimate.observed
}

func (q *Queue) own() counters {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.estimate.own
}

// observe takes the backlog that the broker reported when it was asked at that
// time, with this gateway's counters of then, and a host's report.
func (q *Queue) observe(b bus.Backlog, asked time.Time, own counters, p bus.Availability) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if p.Answered {
		// A host that is too busy to report is as busy as it was.
		q.busy = p.Busy
	}
	s := sample{
		at: asked, taken: b.Taken, own: own, after: q.estimate.own, epoch: string(b.Epoch), total: b.Items, bytes: b.Bytes, last: b.Last,
		maxItems: b.MaxItems, maxBytes: b.MaxBytes, busy: q.busy,
	}
	for i, class := range pipeline.Classes() {
		s.items[i] = b.Classes[class]
	}
	q.estimate.observe(s)
}

// Report registers the gauges of queue lengths and drain rates.
func (a *Availability) Report(meter metric.Meter) error {
	items, err := meter.Int64ObservableGauge("stagemesh.gateway.queue_items", metric.WithDescription("Items in a stage's queue, waiting or in flight, as this gateway estimates."))
	if err != nil {
		return err
	}
	rate, err := meter.Float64ObservableGauge("stagemesh.gateway.drain_rate", metric.WithDescription("Items per second that a busy stage takes from its queue, if known."))
	if err != nil {
		return err
	}
	_, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		a.mu.Lock()
		queues := slices.Collect(maps.Values(a.queues))
		a.mu.Unlock()
		for _, q := range queues {
			q.report(o, items, rate, time.Now())
		}
		return nil
	}, items, rate)
	return err
}

// report skips a queue that nobody has asked about lately.
func (q *Queue) report(o metric.Observer, items metric.Int64Observable, rate metric.Float64Observable, now time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.estimate.fresh(now) {
		return
	}
	of := metric.WithAttributeSet(attribute.NewSet(attribute.String("stage", string(q.key.stage)), attribute.String("durability", string(q.key.durability))))
	o.ObserveInt64(items, int64(q.estimate.items(pipeline.Low, now)), of)
	if r, known := q.estimate.rate(now); known {
		o.ObserveFloat64(rate, r, of)
	}
}
