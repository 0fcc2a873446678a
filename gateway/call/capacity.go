package call

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/gateway/load"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// capacityAge is how long an answer about a stage's hosts is good. One that had hosts
// is good for as long again while the next is on its way: under a steady load nobody
// waits for hosts that answer in time.
const capacityAge = 100 * time.Millisecond

// capacity knows which stages have hosts, and what is in their queues. It asks
// about each queue at most once at a time and per capacityAge, and only as long
// as requests come for it.
type capacity struct {
	bus broker
	// open ends when nothing more is to be asked; asking are the questions that
	// are open.
	open   context.Context
	close  context.CancelFunc
	asking sync.WaitGroup

	mu     sync.Mutex
	closed bool
	queues map[queueKey]*queue
	// served are the queues that a stage has, as its hosts said last; none where they
	// said nothing for so long that it is not waited for any more.
	served map[pipeline.StageName][]pipeline.Durability
}

// broker is what capacity asks.
type broker interface {
	Connected() bool
	Alive(context.Context, pipeline.StageName) (bus.Presence, error)
	Backlog(context.Context, pipeline.StageName, pipeline.Durability) (bus.Backlog, error)
}

var _ broker = (*bus.Bus)(nil)

type queueKey struct {
	stage      pipeline.StageName
	durability pipeline.Durability
}

// queue is what is known of one queue.
type queue struct {
	key queueKey
	// heard is what was, or is being, heard about its hosts, and before what was
	// heard before that; capacity's lock guards both.
	heard, before *answer

	// asked is taken while the broker is asked what is in it.
	asked chan struct{}

	mu   sync.Mutex
	load load.Queue
	// busy says that a host had items waiting when last heard of.
	busy bool
}

// answer is what was, or is being, heard about a stage.
type answer struct {
	done     chan struct{}
	presence bus.Presence
	err      error
	until    time.Time
}

func newCapacity(b broker) *capacity {
	c := &capacity{bus: b, queues: map[queueKey]*queue{}, served: map[pipeline.StageName][]pipeline.Durability{}}
	c.open, c.close = context.WithCancel(context.Background())
	return c
}

// stop ends what is being asked, and waits for that.
func (c *capacity) stop() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.close()
	c.asking.Wait()
}

// maxQueues bounds the queues that are remembered: a caller can name any stage.
const maxQueues = 4096

// check returns nil when every stage on the route has a host that serves such
// requests. While the broker is away nothing is known of hosts, whatever was
// heard before.
func (c *capacity) check(ctx context.Context, route []pipeline.Hop, d pipeline.Durability) *fault.Fault {
	if !c.bus.Connected() {
		return refused(bus.ErrDisconnected, route[0])
	}
	asked := make([]*answer, len(route))
	for i, hop := range route {
		asked[i] = c.of(queueKey{hop.Stage, d})
	}
	for i, a := range asked {
		select {
		case <-a.done:
		case <-ctx.Done():
			return fault.From(ctx.Err())
		}
		if f := a.fault(route[i], d); f != nil {
			return f
		}
	}
	return nil
}

func (a *answer) fault(hop pipeline.Hop, d pipeline.Durability) *fault.Fault {
	if a.err != nil {
		return refused(a.err, hop)
	}
	if !a.has(d) {
		return fault.Newf(fault.NotSupported, "stage %s has no queue of durability %s, only %v; ask for one of those, or add it to the stage's queue.durabilities", hop.Stage, d, a.presence.Durabilities).
			At(string(hop.Stage), string(hop.Step), "")
	}
	return nil
}

// has reports whether the stage has such a queue, as far as its hosts have said.
func (a *answer) has(d pipeline.Durability) bool {
	has := a.presence.Durabilities
	return len(has) == 0 || slices.Contains(has, d)
}

// of returns what is known about a queue's hosts, asking if that is nothing or
// old.
func (c *capacity) of(key queueKey) *answer {
	c.mu.Lock()
	defer c.mu.Unlock()
	q := c.queue(key)
	if c.closed {
		return ended()
	}
	now := time.Now()
	if q.heard == nil || q.heard.stale(now) {
		q.before, q.heard = q.heard, &answer{done: make(chan struct{})}
		c.ask(q, q.heard)
	}
	if q.before.bridges(key.durability, now) && !closed(q.heard.done) {
		return q.before
	}
	return q.heard
}

// queue returns what is known of a queue; the lock is held.
func (c *capacity) queue(key queueKey) *queue {
	if q := c.queues[key]; q != nil {
		return q
	}
	if len(c.queues) >= maxQueues {
		c.forget()
	}
	q := &queue{key: key, asked: make(chan struct{}, 1)}
	c.queues[key] = q
	return q
}

// forget makes room: anybody can name stages that are not there, so what is known
// of others is kept as long as it can be. The lock is held.
func (c *capacity) forget() {
	maps.DeleteFunc(c.queues, func(_ queueKey, q *queue) bool { return !q.seen() })
	if len(c.queues) >= maxQueues {
		clear(c.queues)
	}
}

// ended is the answer of a capacity that is stopped.
func ended() *answer {
	done := make(chan struct{})
	close(done)
	return &answer{done: done, err: bus.ErrClosed}
}

func (a *answer) stale(now time.Time) bool { return closed(a.done) && now.After(a.until) }

// bridges reports whether an answer that was heard is good until the next is: a
// refusal is not.
func (a *answer) bridges(d pipeline.Durability, now time.Time) bool {
	return a != nil && a.err == nil && a.has(d) && now.Before(a.until.Add(capacityAge))
}

// ask fills the answer for all callers that wait, so no one caller's context ends
// it. They wait for the backlog too, for a moment, where the last word about it is
// too old.
func (c *capacity) ask(q *queue, into *answer) {
	heard := make(chan struct{})
	backlog := c.askBacklog(q, into, heard)
	if q.fresh(time.Now()) {
		backlog = nil
	}
	c.asking.Go(func() {
		defer close(into.done)
		c.askHosts(q.key.stage, into)
		close(heard)
		awaitBacklog(backlog)
	})
}

// firstAsked is how often hosts are asked that have never said anything, once: which
// queues there are is not known without them.
const firstAsked = 10

func (c *capacity) askHosts(stage pipeline.StageName, into *answer) {
	for range firstAsked {
		into.presence, into.err = c.bus.Alive(c.open, stage)
		if into.err != nil || into.presence.Heard || c.heardOf(stage) {
			break
		}
	}
	into.until = time.Now().Add(capacityAge)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !into.presence.Heard {
		// A host that is slow to answer has the queues that it had.
		into.presence.Durabilities = c.served[stage]
	}
	if into.err != nil {
		return
	}
	if len(c.served) >= maxQueues {
		clear(c.served)
	}
	c.served[stage] = into.presence.Durabilities
}

// heardOf reports whether a host of the stage has ever said anything, or has been
// waited for in vain.
func (c *capacity) heardOf(stage pipeline.StageName) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.served[stage]
	return ok
}

const (
	// backlogPatience bounds how long callers wait for the word about a queue,
	// backlogBudget how long the broker may take to say it.
	backlogPatience = 100 * time.Millisecond
	backlogBudget   = 2 * time.Second
)

// awaitBacklog waits for the word about a queue; nil is none to wait for.
func awaitBacklog(said <-chan struct{}) {
	if said == nil {
		return
	}
	patience := time.NewTimer(backlogPatience)
	defer patience.Stop()
	select {
	case <-said:
	case <-patience.C:
	}
}

// askBacklog asks what is in the queue, unless that is being asked. The channel is
// closed when the broker has said it, and nil where it was asked before.
func (c *capacity) askBacklog(q *queue, with *answer, heard <-chan struct{}) <-chan struct{} {
	select {
	case q.asked <- struct{}{}:
	default:
		return nil
	}
	said := make(chan struct{})
	c.asking.Go(func() {
		defer func() { <-q.asked }()
		defer close(said)
		c.observe(q, with, heard)
	})
	return said
}

// observe asks what is in the queue, and takes it with what a host was heard to
// say. Where the broker does not say, nothing is known of it soon, and nobody is
// refused for it.
func (c *capacity) observe(q *queue, with *answer, heard <-chan struct{}) {
	ctx, cancel := context.WithTimeout(c.open, backlogBudget)
	defer cancel()
	at, own := time.Now(), q.own()
	b, err := c.bus.Backlog(ctx, q.key.stage, q.key.durability)
	<-heard // Bus.Alive ends soon, with the bus or without, however often it is asked
	if err == nil {
		q.observe(b, at, own, with.presence)
	}
}
