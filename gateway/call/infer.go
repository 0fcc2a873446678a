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
// be nil. An error of emit ends the call.
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
	if f := s.capacity.check(ctx, env.Route); f != nil {
		return nil, f
	}
	c := &exchange{service: s, request: r, env: env, emit: emit, buffer: unaryBuffer}
	if emit != nil {
		c.buffer = streamBuffer
	}
	response, err := c.run(ctx)
	if err != nil {
		return nil, fault.From(err)
	}
	return response, nil
}

// Replies that a call may have unread.
const (
	unaryBuffer  = 4
	streamBuffer = 256
)

// exchange is one call between its publish and its answer.
type exchange struct {
	service *Service
	request *Request
	env     *envelope.Envelope
	emit    func(Chunk) error
	buffer  int

	waiter  *correlate.Waiter
	message bus.Message
	// published gets what became of each publish, of which one at a time is
	// on its way.
	published chan published
	tries     int
	seq       uint64
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
			if err := c.afterPublish(ctx, p); err != nil {
				return nil, err
			}
		case data := <-c.waiter.Replies():
			response, err := c.reply(data)
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
		return bus.FaultOf(err, c.env.Hop().Stage)
	}
	stages := make([]pipeline.StageName, len(c.env.Route))
	for i, hop := range c.env.Route {
		stages[i] = hop.Stage
	}
	c.waiter, err = c.service.table.Register(c.env.ExecutionID, stages, c.buffer)
	if err != nil {
		return fault.Newf(fault.Overloaded, "%w", err)
	}
	c.message = message
	c.published = make(chan published, 1)
	return nil
}

func (c *exchange) publish() {
	c.tries++
	answer := c.published
	c.service.bus.Send(c.message, func(r bus.Receipt, err error) { answer <- published{r, err} })
}

// afterPublish decides what a publish's answer means. Without one it is
// repeated under the same id, which cannot run the request twice. A duplicate
// on the first try is somebody else's id: nothing of ours was queued.
func (c *exchange) afterPublish(ctx context.Context, p published) error {
	switch {
	case errors.Is(p.err, bus.ErrUnknown):
		return c.publishAgain(ctx)
	case errors.Is(p.err, bus.ErrDisconnected) && c.tries > 1:
		return c.publishAgain(ctx)
	case p.err != nil:
		return c.refused(p.err)
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

func (c *exchange) refused(err error) error {
	f := bus.FaultOf(err, c.env.Hop().Stage)
	if f.Retryable() {
		f = f.WithRetryAfter(retryAfter)
	}
	return f
}

const (
	retryAfter   = time.Second
	publishPause = 50 * time.Millisecond
)

// publishAgain repeats an unconfirmed publish after a pause, during which the
// broker may come back. The answer may come meanwhile: the call goes on
// waiting for it.
func (c *exchange) publishAgain(ctx context.Context) error {
	pause := time.NewTimer(publishPause)
	defer pause.Stop()
	select {
	case <-pause.C:
		c.publish()
		return nil
	case f := <-c.waiter.Failed():
		return f
	case <-ctx.Done():
		return c.ended(ctx)
	}
}

// reply handles one reply; response is nil while more follow.
func (c *exchange) reply(data []byte) (*Response, error) {
	r, err := envelope.DecodeReply(data)
	if err != nil || r.RequestID != c.env.RequestID || r.ExecutionID != c.env.ExecutionID {
		c.service.metrics.reply("malformed")
		return nil, fault.Newf(fault.Internal, "a host's answer cannot be read: %w", errors.Join(err, errMismatch))
	}
	c.seq++
	switch {
	case r.Fault != nil:
		return nil, r.Fault
	case r.Seq != c.seq:
		return c.gap(r)
	case r.Chunk:
		return nil, c.chunk(r)
	}
	return c.response(r)
}

var errMismatch = errors.New("its ids are not the request's")

// gap handles a message out of sequence. A caller that takes no chunks misses
// none.
func (c *exchange) gap(r *envelope.Reply) (*Response, error) {
	if c.emit == nil && r.Terminal() {
		return c.response(r)
	}
	return nil, fault.Newf(fault.StreamInterrupted, "message %d of the answer came where %d was due", r.Seq, c.seq)
}

func (c *exchange) chunk(r *envelope.Reply) error {
	if c.emit == nil {
		return nil
	}
	return c.emit(Chunk{RequestID: string(r.RequestID), Seq: r.Seq, Attempt: r.Attempt, Outputs: r.Parts})
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
			return nil, fault.Newf(fault.InvalidRequest, "outputs: the pipeline puts out no %q", name).WithViolation("outputs", "%q is not put out", name)
		}
		out = append(out, part)
	}
	return out, nil
}
