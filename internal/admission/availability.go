package admission

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Availability knows which stages have hosts, how full their queues are, and how
// long an item waits there. It asks about each queue only while requests come for
// it, one question at a time and at most one per reportAge.
type Availability struct {
	broker   Broker
	isShared bool
	// stopping ends the wait of requests that wait for capacity.
	stopping <-chan struct{}

	// ctx ends with Stop; queries are the questions that are open.
	ctx     context.Context
	cancel  context.CancelFunc
	queries sync.WaitGroup

	// mu guards all below, the queues too.
	mu      sync.Mutex
	stopped bool
	queues  map[queueKey]*Queue
	// durabilities are the queues of each stage that has answered, as its hosts
	// reported last. They are empty where hosts did not report them in time.
	durabilities map[pipeline.StageName][]pipeline.Durability
}

// Broker is what Availability asks: a bus.Bus.
type Broker interface {
	Connected() bool
	Alive(context.Context, pipeline.StageName) (bus.Availability, error)
	Backlog(context.Context, pipeline.StageName, pipeline.Durability) (bus.Backlog, error)
}

var _ Broker = (*bus.Bus)(nil)

type queueKey struct {
	stage      pipeline.StageName
	durability pipeline.Durability
}

// Queue is what is known of one queue of a stage.
type Queue struct {
	queueKey
	// hosts is the latest report about its hosts, which may not be done, and
	// previous the one before.
	hosts, previous *hostReport
	// isAsked is true while the broker is asked for the backlog.
	isAsked  bool
	estimate estimator
	// busy is true when a host had items waiting at its last report.
	busy bool
	// tenants are those with items on their way through the queue, where tenants share it.
	tenants map[string]int64
}

// hostReport is the answer to one question about a stage's hosts. Its fields are
// set when done is closed.
type hostReport struct {
	done         chan struct{}
	availability bus.Availability
	err          error
	until        time.Time
}

const (
	// reportAge is how long a report is current. One that found hosts is used for
	// as long again while the next is awaited, so that requests of a steady load
	// never wait for hosts that answer in time.
	reportAge = 100 * time.Millisecond
	// maxQueues bounds the queues that are remembered: callers can name any stage.
	maxQueues = 4096
	// waitPause is how long a request that waits for capacity waits before it
	// checks again.
	waitPause = 50 * time.Millisecond
)

// NewAvailability returns the availability of stages behind the broker. Requests
// that wait for capacity are rejected when stopping closes. If queues are shared, no tenant gets
// all of one.
func NewAvailability(b Broker, isShared bool, stopping <-chan struct{}) *Availability {
	a := &Availability{broker: b, isShared: isShared, stopping: stopping, queues: map[queueKey]*Queue{}, durabilities: map[pipeline.StageName][]pipeline.Durability{}}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	return a
}

// Stop cancels the open questions and waits for their goroutines.
func (a *Availability) Stop() {
	a.mu.Lock()
	a.stopped = true
	a.mu.Unlock()
	a.cancel()
	a.queries.Wait()
}

// Admit admits the tenant's item, which must Leave, when every stage on the route can take it: at
// once or, where the caller waits, later.
func (a *Availability) Admit(ctx context.Context, env *envelope.Envelope, tenant string, wait bool) (*Admitted, *fault.Fault) {
	f := a.CheckHosts(ctx, env.Route, env.Durability)
	for f == nil {
		var in *Admitted
		if in, f = a.enter(env, tenant); f == nil || !wait {
			return in, f
		}
		f = a.pause(ctx, env, f)
	}
	return nil, f
}

// Admitted is an item that was admitted. It counts in the queues of its route until it leaves, among
// its tenant's and, before it is sent, as if it were in them: of many that come together each is
// checked with those before it.
type Admitted struct {
	availability *Availability
	tenant       string
	class        int
	queues       []*Queue
	// slowest is the queue where the item is expected to wait longest, or nil.
	slowest *Queue
	isSent  bool
}

// enter checks the queues and admits the item.
func (a *Availability) enter(env *envelope.Envelope, tenant string) (*Admitted, *fault.Fault) {
	a.mu.Lock()
	defer a.mu.Unlock()
	slowest, f := a.checkQueuesLocked(env, tenant)
	if f != nil {
		return nil, f
	}
	return a.count(env, tenant, slowest), nil
}

func (a *Availability) count(env *envelope.Envelope, tenant string, slowest *Queue) *Admitted {
	in := &Admitted{a, tenant, env.Class().Index(), make([]*Queue, len(env.Route)), slowest, false}
	for i := range env.Route {
		q := a.queueLocked(queueKey{env.Route[i].Queue(), env.Durability})
		if a.isShared {
			if q.tenants == nil {
				q.tenants = map[string]int64{}
			}
			q.tenants[tenant]++
		}
		in.queues[i] = q
	}
	in.queues[0].estimate.entering++
	return in
}

// Sent records that this gateway has sent the item to its first queue.
func (in *Admitted) Sent() {
	in.availability.mu.Lock()
	defer in.availability.mu.Unlock()
	e := &in.queues[0].estimate
	e.entering--
	e.own.sent[in.class]++
	in.isSent = true
}

// Late records that the item was not answered in time.
func (in *Admitted) Late() {
	in.availability.mu.Lock()
	defer in.availability.mu.Unlock()
	if in.slowest != nil {
		in.slowest.estimate.own.late++
	}
}

// Leave ends the item's count. A nil item was not admitted.
func (in *Admitted) Leave() {
	if in == nil {
		return
	}
	in.availability.mu.Lock()
	defer in.availability.mu.Unlock()
	for _, q := range in.queues {
		if q.tenants[in.tenant] > 1 {
			q.tenants[in.tenant]--
		} else {
			delete(q.tenants, in.tenant)
		}
	}
	if !in.isSent {
		in.queues[0].estimate.entering--
	}
}

// pause waits until it is time to check the queues again, after a check that
// rejected the item.
func (a *Availability) pause(ctx context.Context, env *envelope.Envelope, rejection *fault.Fault) *fault.Fault {
	timer := time.NewTimer(waitPause)
	defer timer.Stop()
	select {
	case <-timer.C:
		if f := a.CheckHosts(ctx, env.Route, env.Durability); ctx.Err() == nil {
			return f
		}
	case <-a.stopping:
		return Stopping()
	case <-ctx.Done():
	}
	if f := fault.From(ctx.Err()); f.Reason == fault.Cancelled {
		return f
	}
	return rejection
}

// CheckHosts returns nil when every stage on the route has a host that serves
// requests of the durability. While the broker is disconnected, earlier reports do not
// count.
func (a *Availability) CheckHosts(ctx context.Context, route []pipeline.Hop, d pipeline.Durability) *fault.Fault {
	if !a.broker.Connected() {
		return bus.Rejection(bus.ErrDisconnected, &route[0])
	}
	reports := make([]*hostReport, len(route))
	for i, hop := range route {
		reports[i] = a.report(queueKey{hop.Queue(), d})
	}
	for i, r := range reports {
		if !r.isDone() { // or the context of each request would make a channel
			select {
			case <-r.done:
			case <-ctx.Done():
				return fault.From(ctx.Err())
			}
		}
		if f := r.fault(&route[i], d); f != nil {
			return f
		}
	}
	return nil
}

func (r *hostReport) fault(hop *pipeline.Hop, d pipeline.Durability) *fault.Fault {
	if r.err != nil {
		return bus.Rejection(r.err, hop)
	}
	switch cause := r.availability.Cause; {
	case r.serves(d):
	case cause != "":
		f := fault.Newf(fault.NoCapacity, "stage %s has no ready host for durability %s: %s", hop.Stage, d, cause)
		return at(f, hop).WithRetryAfter(budget.RetryAfter)
	default:
		return at(fault.Newf(fault.NotSupported, "stage %s has no queue of durability %s, only %v; ask for one of those, or add it to the stage's queue.durabilities", hop.Stage, d, r.availability.Durabilities), hop)
	}
	return nil
}

// serves reports whether the stage has such a queue, as far as its hosts reported
// their queues.
func (r *hostReport) serves(d pipeline.Durability) bool {
	return len(r.availability.Durabilities) == 0 || slices.Contains(r.availability.Durabilities, d)
}

func (r *hostReport) isDone() bool {
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

// usableMeanwhile reports whether the report is used until the next one is done. A report
// that rejects is not.
func (r *hostReport) usableMeanwhile(d pipeline.Durability, now time.Time) bool {
	return r != nil && r.err == nil && r.serves(d) && now.Before(r.until.Add(reportAge))
}

// report returns the current report about a queue's hosts, and asks for another
// where there is none.
func (a *Availability) report(key queueKey) *hostReport {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.stopped {
		done := make(chan struct{})
		close(done)
		return &hostReport{done: done, err: bus.ErrClosed}
	}
	q, now := a.queueLocked(key), time.Now()
	if q.hosts == nil || q.hosts.isDone() && now.After(q.hosts.until) {
		q.previous, q.hosts = q.hosts, &hostReport{done: make(chan struct{})}
		a.askLocked(q, q.hosts)
	}
	if q.previous.usableMeanwhile(key.durability, now) && !q.hosts.isDone() {
		return q.previous
	}
	return q.hosts
}

// queueLocked returns what is known of a queue.
func (a *Availability) queueLocked(key queueKey) *Queue {
	if q := a.queues[key]; q != nil {
		return q
	}
	if len(a.queues) >= maxQueues {
		// Keep queues that exist as long as possible: callers can name any stage.
		maps.DeleteFunc(a.queues, func(_ queueKey, q *Queue) bool { return !q.estimate.observed })
		if len(a.queues) >= maxQueues {
			clear(a.queues)
		}
	}
	q := &Queue{queueKey: key}
	a.queues[key] = q
	return q
}

// askLocked fills the report. All requests that wait for it share it, so no request's
// context ends it. Where the last backlog is too old it also waits for the next
// one, for a moment.
func (a *Availability) askLocked(q *Queue, into *hostReport) {
	reported, isFresh := make(chan struct{}), q.estimate.fresh(time.Now())
	var backlog chan struct{}
	if !q.isAsked {
		q.isAsked, backlog = true, make(chan struct{})
		a.queries.Go(func() {
			defer close(backlog)
			a.askBacklog(q, into, reported)
		})
	}
	a.queries.Go(func() {
		defer close(into.done)
		a.askHosts(q.stage, into)
		close(reported)
		if backlog == nil || isFresh {
			return
		}
		select {
		case <-backlog:
		case <-time.After(backlogPatience):
		}
	})
}

// firstQuestions is how often hosts that have never reported are asked, once:
// without their report it is not known which queues the stage has.
const firstQuestions = 10

func (a *Availability) askHosts(stage pipeline.StageName, into *hostReport) {
	for range firstQuestions {
		into.availability, into.err = a.broker.Alive(a.ctx, stage)
		if into.err != nil || into.availability.Answered || a.hasAnswered(stage) {
			break
		}
	}
	into.until = time.Now().Add(reportAge)
	a.mu.Lock()
	defer a.mu.Unlock()
	if !into.availability.Answered {
		// A host that answers slowly has the queues that it had.
		into.availability.Durabilities = a.durabilities[stage]
	}
	if into.err != nil || into.availability.Cause != "" {
		return
	}
	if len(a.durabilities) >= maxQueues {
		clear(a.durabilities)
	}
	a.durabilities[stage] = into.availability.Durabilities
}

// hasAnswered reports whether a host of the stage has reported before, or has been
// waited for in vain.
func (a *Availability) hasAnswered(stage pipeline.StageName) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, ok := a.durabilities[stage]
	return ok
}

const (
	// backlogPatience bounds how long requests wait for a backlog, backlogTimeout
	// how long the broker may take to report it.
	backlogPatience = 100 * time.Millisecond
	backlogTimeout  = 2 * time.Second
)

// askBacklog asks the broker for the queue's backlog, and a host's report once that is
// there.
func (a *Availability) askBacklog(q *Queue, hosts *hostReport, hostsReported <-chan struct{}) {
	ctx, cancel := context.WithTimeout(a.ctx, backlogTimeout)
	defer cancel()
	a.mu.Lock()
	s := sample{at: time.Now(), own: q.estimate.own}
	a.mu.Unlock()
	b, err := a.broker.Backlog(ctx, q.stage, q.durability)
	<-hostsReported // Alive ends soon, with the broker or without, however often it is asked
	a.mu.Lock()
	defer a.mu.Unlock()
	q.isAsked = false
	if err != nil {
		return // the last sample expires soon, and then rejects nobody
	}
	if hosts.availability.Answered {
		// A host that is too busy to report is as busy as it was.
		q.busy = hosts.availability.Busy
	}
	s.taken, s.after, s.epoch, s.busy = b.Taken, q.estimate.own, string(b.Epoch), q.busy
	s.total, s.bytes, s.last, s.maxItems, s.maxBytes = b.Items, b.Bytes, b.Last, b.MaxItems, b.MaxBytes
	for i, class := range pipeline.Classes() {
		s.items[i] = b.Classes[class]
	}
	q.estimate.observe(s)
}

// maxWaitShare is the part of a request's time that it may be expected to wait:
// the estimate is of a mean, and late work is lost work.
const maxWaitShare = 0.8

// HasSpace reports whether every queue on the route has space for the tenant's item, and the work
// ahead of it leaves it enough time.
func (a *Availability) HasSpace(env *envelope.Envelope, tenant string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, f := a.checkQueuesLocked(env, tenant)
	return f == nil
}

// checkQueuesLocked returns why there is no such space, or the queue where the item is expected to wait
// longest, if any.
func (a *Availability) checkQueuesLocked(env *envelope.Envelope, tenant string) (slowest *Queue, f *fault.Fault) {
	now := time.Now()
	class := env.Class()
	var total, longest time.Duration
	slowestHop := env.Hop()
	for i := range env.Route {
		hop := &env.Route[i]
		q := a.queueLocked(queueKey{hop.Queue(), env.Durability})
		if full, free := q.estimate.full(class, now); full {
			f := fault.Newf(fault.QueueFull, "the queue of stage %s has no space for a request of priority class %s", hop.Stage, class)
			return nil, at(f, hop).WithRetryAfter(spread(free))
		}
		if own := q.tenants[tenant]; a.isShared && q.estimate.isGreedy(own+1, class, now) {
			f := fault.Newf(fault.QueueFull, "this tenant has %d requests at stage %s, which leaves too little of its queue to others", own, hop.Stage)
			return nil, at(f, hop).WithRetryAfter(spread(0))
		}
		wait, _ := q.estimate.wait(class, now)
		total += wait
		if wait > longest {
			longest, slowestHop, slowest = wait, hop, q
		}
	}
	if f := CheckWork(env, total, slowestHop); f != nil {
		return nil, f
	}
	return slowest, nil
}

// CheckWork returns why a request is rejected for the work ahead of it, most of which is at the hop; nil
// where it is not.
func CheckWork(env *envelope.Envelope, work time.Duration, hop *pipeline.Hop) *fault.Fault {
	left := time.Until(env.Deadline)
	late := work - time.Duration(maxWaitShare*float64(left))
	if left <= 0 || late <= 0 {
		return nil // without time left, the call ends by its deadline
	}
	f := fault.Newf(fault.Overloaded, "there is about %s of work ahead of the request, most of it at stage %s, and it has %s left",
		work.Round(time.Millisecond), hop.Stage, left.Round(time.Millisecond))
	return at(f, hop).WithRetryAfter(spread(late))
}

// WaitOf returns how long the last of so many items of a request will be with the stage of a hop, 0 where
// that is not known.
func (a *Availability) WaitOf(hop *pipeline.Hop, env *envelope.Envelope, items float64) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	now, e := time.Now(), &a.queueLocked(queueKey{hop.Queue(), env.Durability}).estimate
	wait, known := e.wait(env.Class(), now)
	if rate, _ := e.rate(now); known && items > 1 {
		wait += durationOf((items - 1) / (rate * e.useful()))
	}
	return wait
}

// Wait returns how long an item of the lowest class will be in the queues of a stage, 0 where
// requests have not shown that lately.
func (a *Availability) Wait(stage pipeline.StageName) (longest time.Duration) {
	now := time.Now()
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, q := range a.queues {
		if key.stage == stage {
			wait, _ := q.estimate.wait(pipeline.Low, now)
			longest = max(longest, wait)
		}
	}
	return longest
}

// Deleted records that the item was deleted from its first queue.
func (a *Availability) Deleted(env *envelope.Envelope) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.queueLocked(queueKey{env.Hop().Queue(), env.Durability}).estimate.own.deleted++
}

// Answered records that the item was answered in time: it is in no queue any more.
func (a *Availability) Answered(env *envelope.Envelope) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, hop := range env.Route {
		a.queueLocked(queueKey{hop.Queue(), env.Durability}).estimate.own.answered++
	}
}

// Report registers the gauges of queue lengths and drain rates, which leave out queues that
// nobody has asked about lately.
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
		defer a.mu.Unlock()
		now := time.Now()
		for _, q := range a.queues {
			if !q.estimate.fresh(now) {
				continue
			}
			of := metric.WithAttributeSet(attribute.NewSet(attribute.String("stage", string(q.stage)), attribute.String("durability", string(q.durability))))
			o.ObserveInt64(items, int64(q.estimate.items(pipeline.Low, now)), of)
			if r, known := q.estimate.rate(now); known {
				o.ObserveFloat64(rate, r, of)
			}
		}
		return nil
	}, items, rate)
	return err
}
