package call

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/gateway/correlate"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Infer runs one request and returns its answer.
func (s *Service) Infer(ctx context.Context, r *Request) (*Response, error) {
	return s.Stream(ctx, r, nil)
}

// Stream is Infer that hands chunks to emit, in order, as they come; emit may
// be nil. An error of emit ends the call as CANCELLED: its caller is gone.
func (s *Service) Stream(ctx context.Context, r *Request, emit func(Chunk) error) (*Response, error) {
	begin := time.Now()
	response, f := s.admitted(ctx, r, emit, begin)
	s.metrics.request(s.settings.Catalog.Label(r.Pipeline), f, time.Since(begin))
	if f != nil {
		return nil, f
	}
	return response, nil
}

func (s *Service) admitted(ctx context.Context, r *Request, emit func(Chunk) error, begin time.Time) (*Response, *fault.Fault) {
	if f := s.gate.Enter(); f != nil {
		return nil, f
	}
	defer s.gate.Leave()
	id := pipeline.RequestID(uuid.Must(uuid.NewV7()).String())
	response, f := s.identified(ctx, id, r, emit, begin)
	if f != nil {
		s.log(id, r, f)
		return nil, f.WithMetadata("request_id", string(id))
	}
	response.Timeline.Total = time.Since(begin)
	return response, nil
}

func (s *Service) identified(ctx context.Context, id pipeline.RequestID, r *Request, emit func(Chunk) error, begin time.Time) (*Response, *fault.Fault) {
	env, f := s.plan(id, r, begin)
	if f != nil {
		return nil, f
	}
	ctx, cancel := context.WithDeadline(ctx, env.Deadline)
	defer cancel()
	// The caller's context may end before.
	env.Deadline, _ = ctx.Deadline()
	if f := s.capacity.check(ctx, env.Route); f != nil {
		return nil, f
	}
	c := &exchange{service: s, request: r, env: env, emit: emit}
	response, err := c.run(ctx)
	if err != nil {
		return nil, fault.From(err)
	}
	return response, nil
}

// What a streamed answer may have unread. Runners are not slowed down by their
// readers, so this is for a whole answer that comes in one burst.
const (
	streamReplies = 1 << 14
	streamBytes   = 16 << 20
)

// exchange is one call between its publish and its answer.
type exchange struct {
	service *Service
	request *Request
	env     *envelope.Envelope
	// emit takes the chunks; nil where the caller wants the answer alone.
	emit func(Chunk) error
	// seq is the number of the last message of the answer.
	seq uint64

	// Of the execution that is registered.
	waiter  *correlate.Waiter
	message bus.Message
	tries   int
	// published gets what became of each publish, of which one at a time is
	// on its way; again ticks when the next is due.
	published chan published
	again     <-chan time.Time
}

type published struct {
	receipt bus.Receipt
	err     error
}

func (c *exchange) run(ctx context.Context) (*Response, error) {
	if err := c.register(); err != nil {
		return nil, err
	}
	defer func() { c.waiter.Forget() }()
	c.publish()
	for {
		select {
		case p := <-c.published:
			if err := c.afterPublish(p); err != nil {
				return nil, err
			}
		case <-c.again:
			c.publish()
		case <-c.waiter.Ready():
			response, err := c.next()
			if response != nil || err != nil {
				return response, err
			}
		case f := <-c.waiter.Failed():
			return nil, f
		case <-ctx.Done():
			return nil, c.ended(ctx)
		}
	}
}

// ended is what a call's context says when it is over.
func (c *exchange) ended(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		timeout := c.env.Deadline.Sub(c.env.AdmittedAt).Round(time.Millisecond)
		return fault.Newf(fault.DeadlineExceeded, "no answer within %s", timeout).Caused(ctx.Err())
	}
	return ctx.Err()
}

// register mints an execution and encodes it. The id is new for every
// execution: one used before would be taken for a duplicate and swallowed.
func (c *exchange) register() error {
	c.env.ExecutionID = pipeline.ExecutionID(uuid.Must(uuid.NewV7()).String())
	message, err := c.service.bus.Item(c.env)
	if err != nil {
		return c.unsendable(err)
	}
	waiter, err := c.service.table.Register(c.env.ExecutionID, stagesOf(c.env.Route), c.room())
	if err != nil {
		return fault.Newf(fault.Overloaded, "%w", err).WithRetryAfter(retryAfter)
	}
	c.waiter, c.message, c.tries = waiter, message, 0
	c.published = make(chan published, 1)
	return nil
}

func (c *exchange) room() correlate.Room {
	if c.emit == nil {
		return correlate.Room{}
	}
	return correlate.Room{Replies: streamReplies, Bytes: streamBytes}
}

func stagesOf(route []pipeline.Hop) []pipeline.StageName {
	out := make([]pipeline.StageName, len(route))
	for i, hop := range route {
		out[i] = hop.Stage
	}
	return out
}

// unsendable says why a request has no message: it is too large, or one of its
// texts is not UTF-8, which is all that an encoder refuses.
func (c *exchange) unsendable(err error) *fault.Fault {
	if errors.Is(err, bus.ErrTooLarge) {
		return refused(err, c.env.Hop())
	}
	return fault.Newf(fault.InvalidRequest, "the request cannot be sent on: %w", err)
}

func (c *exchange) publish() {
	c.tries++
	answer := c.published
	c.service.bus.Send(c.message, func(r bus.Receipt, err error) { answer <- published{r, err} })
}

// afterPublish decides what a publish's answer means. Without one it is
// repeated under the same id, which cannot run the request twice. A duplicate
// on the first try is somebody else's id: nothing of ours was queued.
func (c *exchange) afterPublish(p published) error {
	switch {
	case errors.Is(p.err, bus.ErrUnknown), errors.Is(p.err, bus.ErrDisconnected) && c.tries > 1:
		// The broker may come back, or the answer may come meanwhile.
		c.again = time.After(publishPause)
	case p.err != nil:
		return refused(p.err, c.env.Hop())
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

const (
	retryAfter   = time.Second
	publishPause = 50 * time.Millisecond
)

// refused is what a bus error about a hop tells the caller: where, unless the
// broker itself is away, and when to come back.
func refused(err error, hop pipeline.Hop) *fault.Fault {
	f := bus.FaultOf(err, hop.Stage)
	if f.Reason != fault.BrokerUnavailable {
		f = f.At(string(hop.Stage), string(hop.Step), "")
	}
	if f.Retryable() {
		f = f.WithRetryAfter(retryAfter)
	}
	return f
}

// next handles one reply, if there is one; response is nil while more follow.
func (c *exchange) next() (*Response, error) {
	data, ok := c.waiter.Next()
	if !ok {
		return nil, nil
	}
	r, err := envelope.DecodeReply(data)
	if err == nil && (r.RequestID != c.env.RequestID || r.ExecutionID != c.env.ExecutionID) {
		err = errMismatch
	}
	if err != nil {
		c.service.metrics.reply("malformed")
		return nil, fault.Newf(fault.Internal, "a host's answer cannot be read: %w", err)
	}
	return c.reply(r)
}

var errMismatch = errors.New("its ids are not the request's")

// reply handles a reply. A caller that takes no chunks misses none.
func (c *exchange) reply(r *envelope.Reply) (*Response, error) {
	c.seq++
	switch {
	case r.Fault != nil:
		return nil, r.Fault
	case c.emit != nil && r.Seq != c.seq:
		return nil, fault.Newf(fault.StreamInterrupted, "message %d of the answer came where %d was due", r.Seq, c.seq)
	case r.Chunk:
		return nil, c.chunk(r)
	}
	return c.response(r)
}

func (c *exchange) chunk(r *envelope.Reply) error {
	err := c.emit(Chunk{RequestID: string(r.RequestID), Seq: r.Seq, Attempt: r.Attempt, Outputs: r.Parts})
	if err == nil {
		return nil
	}
	select {
	case f := <-c.waiter.Failed():
		return f // while emit waited for the caller
	default:
		return gone(err)
	}
}

// gone is what an error of emit means: the caller does not take its answer.
func gone(err error) *fault.Fault {
	if f := fault.From(err); f.Reason != fault.Internal {
		return f
	}
	return fault.New(fault.Cancelled, "the caller stopped taking its answer").Caused(err)
}

func (c *exchange) response(r *envelope.Reply) (*Response, error) {
	outputs, err := wanted(r.Parts, c.request.Outputs)
	if err != nil {
		return nil, err
	}
	return &Response{
		RequestID: string(r.RequestID),
		Outputs:   outputs,
		Metadata:  r.Metadata,
		Timeline:  Timeline{Steps: r.Timings},
	}, nil
}

// wanted picks the outputs that the request names, in its order.
func wanted(parts []payload.Part, names []string) ([]payload.Part, error) {
	if len(names) == 0 {
		return parts, nil
	}
	out := make([]payload.Part, 0, len(names))
	for _, name := range names {
		part, ok := payload.Find(parts, name)
		if !ok {
			return nil, fault.Newf(fault.InvalidRequest, "outputs: the pipeline puts out no %.*q", shown, name).WithViolation("outputs", "%.*q is not put out", shown, name)
		}
		out = append(out, part)
	}
	return out, nil
}
