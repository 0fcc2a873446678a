package call

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/gateway/correlate"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// What a streamed answer may have unread. Runners are not slowed down by their
// readers, so this is for a whole answer that comes in one burst.
const (
	streamReplies = 1 << 14
	streamBytes   = 16 << 20
	// streamsBytes is what all of them may have unread, beyond a little for each.
	streamsBytes = 256 << 20
)

// exchange is one call between its publish and its answer.
type exchange struct {
	service *Service
	request *Request
	env     *envelope.Envelope
	// emit takes the chunks; nil where the caller wants the answer alone.
	emit func(Chunk) error
	// label is the pipeline's in metrics.
	label string
	// waits says that the call waits for room; slowest is the queue that it is
	// expected to be in for longest, if any.
	waits   bool
	slowest *admission.Queue
	// seq is the number of the last message of the answer; silence ends a stream whose
	// next message is overdue, and is nil before the first.
	seq     uint64
	silence *time.Timer
	// cancelled gets the fault that ends a call which is called off by its id;
	// calledOff says that one was.
	cancelled chan *fault.Fault
	calledOff bool
	// stranded gets a word when nobody serves the first step.
	stranded chan struct{}
	// gaveUp says that the call has ended by what came of its answer: nobody takes the
	// rest.
	gaveUp bool
	// answered says that the terminal reply came: nothing is left to call off.
	answered bool
	// search is for the stored answer, where it is stored.
	search search

	// Of the execution that is registered.
	waiter  *correlate.Waiter
	message bus.Message
	tries   int
	// published gets what became of each publish, of which one at a time is
	// on its way; again ticks when the next is due. Trouble gets a word where it
	// was anything but queued: nearly all are, and of those nobody needs to wake.
	published chan published
	trouble   chan struct{}
	again     <-chan time.Time
	// latest is what became of the publish before, as far as it was looked at.
	latest *published
}

type published struct {
	receipt bus.Receipt
	err     error
}

func newExchange(s *Service, r *Request, env *envelope.Envelope, emit func(Chunk) error) *exchange {
	return &exchange{service: s, request: r, env: env, emit: emit, label: s.settings.Catalog.Label(r.Pipeline), cancelled: make(chan *fault.Fault, 1), stranded: make(chan struct{}, 1)}
}

func (c *exchange) run(ctx context.Context) (*Response, error) {
	if c.env.StoresAnswer() {
		c.search.reconnected = c.service.results.reconnects.next()
	}
	if err := c.register(); err != nil {
		return nil, err
	}
	defer func() { c.waiter.Forget() }()
	defer c.heard(0)
	c.service.capacity.Sent(c.env)
	c.publish()
	for {
		response, err := c.step(ctx)
		if err != nil && c.unwanted(err) {
			c.service.callOffs.start(c.leftover())
		}
		if response != nil || err != nil {
			c.book(err)
			return response, err
		}
	}
}

// book tells what is known of queues that the call is over.
func (c *exchange) book(err error) {
	switch {
	case err != nil && fault.From(err).Reason == fault.DeadlineExceeded:
		if c.slowest != nil {
			c.slowest.Late()
		}
	case c.answered:
		c.service.capacity.Answered(c.env)
	}
}

// step handles one event; response is nil while the call goes on.
func (c *exchange) step(ctx context.Context) (*Response, error) {
	select {
	case <-c.trouble:
		return nil, c.afterPublish()
	case <-c.again:
		c.publishAgain()
		return nil, nil
	case <-c.waiter.Ready():
		return c.next()
	case f := <-c.waiter.Failed():
		return nil, f
	case f := <-c.cancelled:
		c.calledOff = true
		return nil, f
	case <-c.stranded:
		return nil, c.withdraw(ctx)
	case <-c.search.reconnected:
		c.search.reconnected = c.service.results.reconnects.next()
		c.search.begin()
		return nil, nil
	case <-c.search.due:
		return c.look(ctx)
	case <-c.overdue():
		return nil, fault.Newf(fault.StreamInterrupted, "the answer broke after %d chunks: nothing more came of it in time", c.seq)
	case <-ctx.Done():
		return c.ended(ctx)
	}
}

// ended is what a call's context says when it is over.
func (c *exchange) ended(ctx context.Context) (*Response, error) {
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return nil, ctx.Err()
	}
	if p, known := c.outcome(); known && errors.Is(p.err, bus.ErrQueueFull) {
		return nil, admission.Rejection(p.err, c.env.Hop())
	}
	if c.env.StoresAnswer() {
		if response, err := c.lastLook(ctx); response != nil || err != nil {
			return response, err
		}
	}
	return nil, ctx.Err()
}

// register mints an execution and encodes it. The id is new for every
// execution: one used before would be taken for a duplicate and swallowed.
func (c *exchange) register() error {
	c.env.ExecutionID = pipeline.ExecutionID(uuid.Must(uuid.NewV7()).String())
	message, err := c.service.bus.Item(c.env)
	if err != nil {
		return c.unsendable(err)
	}
	waiter, err := c.service.table.Register(c.env.ExecutionID, c.stages(), c.room())
	if err != nil {
		return fault.Newf(fault.Overloaded, "%w", err).WithRetryAfter(admission.RetryAfter)
	}
	c.waiter, c.message, c.tries = waiter, message, 0
	c.published, c.trouble = make(chan published, 1), make(chan struct{}, 1)
	return nil
}

func (c *exchange) room() correlate.Room {
	if c.emit == nil {
		return correlate.Room{}
	}
	return correlate.Room{Replies: streamReplies, Bytes: streamBytes}
}

// stages are those whose memory queues may hold the request. A durable one does
// not end with them.
func (c *exchange) stages() []pipeline.StageName { return c.memoryStages(c.env.Durability) }

// memoryStages are the stages of the route, where the durability is memory.
func (c *exchange) memoryStages(d pipeline.Durability) []pipeline.StageName {
	if d == pipeline.File {
		return nil
	}
	out := make([]pipeline.StageName, len(c.env.Route))
	for i, hop := range c.env.Route {
		out[i] = hop.Stage
	}
	return out
}

// unsendable says why a request has no message: it is too large, or one of its
// texts is not UTF-8, which is all that an encoder refuses.
func (c *exchange) unsendable(err error) *fault.Fault {
	if errors.Is(err, bus.ErrTooLarge) {
		return admission.Rejection(err, c.env.Hop())
	}
	return fault.Newf(fault.InvalidRequest, "the request cannot be sent on: %w", err)
}

func (c *exchange) publish() {
	c.tries++
	c.latest = nil
	answer, trouble := c.published, c.trouble
	c.service.bus.Publish(c.message, func(r bus.Receipt, err error) {
		answer <- published{r, err}
		if err != nil || r.Duplicate {
			trouble <- struct{}{}
		}
	})
}

// outcome returns what became of the latest publish, where that is known.
func (c *exchange) outcome() (p published, known bool) {
	if c.latest == nil {
		select {
		case p := <-c.published:
			c.latest = &p
		default:
			return published{}, false
		}
	}
	return *c.latest, true
}

// publishAgain repeats the publish, but not into a queue of which is known that it
// has no room.
func (c *exchange) publishAgain() {
	if c.waits && c.tries == 0 {
		if _, f := c.service.capacity.CheckQueues(c.env); f != nil {
			c.again = time.After(publishPause)
			return
		}
	}
	c.publish()
}

// afterPublish decides what it means that a publish was not queued. Without an
// answer it is repeated under the same id, which cannot run the request twice. A
// duplicate on the first try is somebody else's id: nothing of ours was queued.
func (c *exchange) afterPublish() error {
	p, _ := c.outcome()
	switch {
	case errors.Is(p.err, bus.ErrUnknown), errors.Is(p.err, bus.ErrDisconnected) && c.tries > 1:
		// The broker may come back, or the answer may come meanwhile.
		c.again = time.After(publishPause)
	case errors.Is(p.err, bus.ErrQueueFull) && c.waits:
		if c.tries == 1 {
			// Nothing was ever queued.
			c.tries = 0
		}
		c.again = time.After(publishPause)
	case p.err != nil:
		return admission.Rejection(p.err, c.env.Hop())
	case p.receipt.Duplicate && c.tries == 1:
		c.service.metrics.collision()
		c.waiter.Forget()
		if err := c.register(); err != nil {
			return err
		}
		c.publish()
	}
	return nil
}

const publishPause = 50 * time.Millisecond

// leastLeft is what a call must have left of its time to be called off: an item
// is dropped at its deadline by itself. Callers that give up at their own
// deadline are gone a little before the gateway's clock says so, and in an
// overload that would be a notice for every request.
const leastLeft = 100 * time.Millisecond

// unwanted reports whether a call that ends by err leaves work in the mesh that
// is to be called off: nobody takes the rest, or what came of it has a gap. A
// request whose answer is stored outlives its caller.
func (c *exchange) unwanted(err error) bool {
	switch {
	case c.answered:
		return false
	case c.calledOff:
		return true
	case c.env.StoresAnswer(), time.Until(c.env.Deadline) < leastLeft:
		return false
	case c.gaveUp:
		return true
	}
	switch fault.From(err).Reason {
	case fault.Cancelled, fault.SlowReader, fault.StreamInterrupted:
		return true
	case fault.QueueLost:
		// What was sent once is lost with the queue. What was sent again may be in
		// the new one, and its caller is told to ask anew.
		return c.tries > 1
	}
	return false
}

// leftover is called once, when the exchange is over.
func (c *exchange) leftover() leftover {
	if p, known := c.outcome(); known {
		c.published <- p
	}
	return leftover{env: c.env, message: c.message, published: c.published, tries: c.tries}
}
