package admission

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Availability knows which stages have hosts, how full their queues are, and how
// long an item waits there. It asks about each queue only while requests come for
// it, one question at a time and at most one per reportAge.
type Availability struct {
	broker Broker
	// stopping ends the wait of requests that wait for capacity.
	stopping <-chan struct{}

	// ctx ends with Stop; queries are the questions that are open.
	ctx     context.Context
	cancel  context.CancelFunc
	queries sync.WaitGroup

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
// that wait for capacity are rejected when stopping closes.
func NewAvailability(b Broker, stopping <-chan struct{}) *Availability {
	a := &Availability{broker: b, stopping: stopping, queues: map[queueKey]*Queue{}, durabilities: map[pipeline.StageName][]pipeline.Durability{}}
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

// Admit returns nil when every stage on the item's route can take it: at once or,
// where the caller waits, later. It also returns the queue where the item is
// expected to wait longest, if any.
func (a *Availability) Admit(ctx context.Context, env *envelope.Envelope, wait bool) (slowest *Queue, f *fault.Fault) {
	f = a.CheckHosts(ctx, env.Route, env.Durability)
	for f == nil {
		if slowest, f = a.CheckQueues(env); f == nil || !wait {
			return slowest, f
		}
		f = a.pause(ctx, env, f)
	}
	return nil, f
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
// requests of the durability. While the broker is away, earlier reports do not
// count.
func (a *Availability) CheckHosts(ctx context.Context, route []pipeline.Hop, d pipeline.Durability) *fault.Fault {
	if !a.broker.Connected() {
		return Rejection(bus.ErrDisconnected, route[0])
	}
	reports := make([]*hostReport, len(route))
	for i, hop := range route {
		reports[i] = a.report(queueKey{hop.Stage, d})
	}
	for i, r := range reports {
		select {
		case <-r.done:
		case <-ctx.Done():
			return fault.From(ctx.Err())
		}
		if f := r.fault(route[i], d); f != nil {
			return f
		}
	}
	return nil
}

func (r *hostReport) fault(hop pipeline.Hop, d pipeline.Durability) *fault.Fault {
	if r.err != nil {
		return Rejection(r.err, hop)
	}
	if !r.serves(d) {
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

// bridges reports whether the report is used until the next one is done: one that
// rejects is not.
func (r *hostReport) bridges(d pipeline.Durability, now time.Time) bool {
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
	q, now := a.queue(key), time.Now()
	if q.hosts == nil || q.hosts.isDone() && now.After(q.hosts.until) {
		q.previous, q.hosts = q.hosts, &hostReport{done: make(chan struct{})}
		a.ask(q, q.hosts)
	}
	if q.previous.bridges(key.durability, now) && !q.hosts.isDone() {
		return q.previous
	}
	return q.hosts
}

// queue returns what is known of a queue; the lock is held.
func (a *Availability) queue(key queueKey) *Queue {
	if q := a.queues[key]; q != nil {
		return q
	}
	if len(a.queues) >= maxQueues {
		// Keep queues that exist as long as possible: callers can name any stage.
		maps.DeleteFunc(a.queues, func(_ queueKey, q *Queue) bool { return !q.observed() })
		if len(a.queues) >= maxQueues {
			clear(a.queues)
		}
	}
	q := &Queue{key: key, asked: make(chan struct{}, 1)}
	a.queues[key] = q
	return q
}

func (a *Availability) known(key queueKey) *Queue {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.queue(key)
}

// ask fills the report. All requests that wait for it share it, so no request's
// context ends it. Where the last backlog is too old it also waits for the next
// one, for a moment.
func (a *Availability) ask(q *Queue, into *hostReport) {
	reported := make(chan struct{})
	backlog := a.askBacklog(q, into, reported)
	if q.fresh(time.Now()) {
		backlog = nil
	}
	a.queries.Go(func() {
		defer close(into.done)
		a.askHosts(q.key.stage, into)
		close(reported)
		awaitBacklog(backlog)
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
	if into.err != nil {
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

// awaitBacklog waits for a backlog; nil means that there is none to wait for.
func awaitBacklog(reported <-chan struct{}) {
	if reported == nil {
		return
	}
	timer := time.NewTimer(backlogPatience)
	defer timer.Stop()
	select {
	case <-reported:
	case <-timer.C:
	}
}

// askBacklog asks the broker for the queue's backlog, unless that question is
// open. The channel closes when the broker has answered; it is nil where the
// question was open before.
func (a *Availability) askBacklog(q *Queue, hosts *hostReport, hostsReported <-chan struct{}) <-chan struct{} {
	select {
	case q.asked <- struct{}{}:
	default:
		return nil
	}
	done := make(chan struct{})
	a.queries.Go(func() {
		defer func() { <-q.asked }()
		defer close(done)
		ctx, cancel := context.WithTimeout(a.ctx, backlogTimeout)
		defer cancel()
		at, own := time.Now(), q.own()
		b, err := a.broker.Backlog(ctx, q.key.stage, q.key.durability)
		<-hostsReported // Alive ends soon, with the broker or without, however often it is asked
		if err == nil {
			// Without an answer the last sample expires soon, and rejects nobody.
			q.observe(b, at, own, hosts.availability)
		}
	})
	return done
}
