package call

import (
	"errors"
	"time"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// next handles one reply, if there is one; response is nil while more follow.
func (c *exchange) next() (*Response, error) {
	data, ok := c.waiter.Next()
	if !ok {
		return nil, nil
	}
	r, err := envelope.DecodeReply(data)
	switch {
	case err != nil:
	case r.RequestID != c.env.RequestID, r.ExecutionID != c.env.ExecutionID:
		err = errMismatch
	case r.Stored && !c.env.StoresAnswer():
		err = errNotStored
	}
	if err != nil {
		c.gaveUp = true
		c.service.metrics.reply("malformed")
		return nil, fault.Newf(fault.Internal, "a host's answer cannot be read: %w", err)
	}
	return c.reply(r)
}

var (
	errMismatch  = errors.New("its ids are not the request's")
	errNotStored = errors.New("it names a stored answer of a request whose answer is not stored")
)

// reply handles a reply. A caller that takes no chunks misses none.
func (c *exchange) reply(r *envelope.Reply) (*Response, error) {
	c.answered = r.Terminal()
	c.seq++
	switch {
	case r.Fault != nil:
		return nil, r.Fault
	case r.Stored:
		c.seq-- // it stands for the answer and is no part of it
		c.search.announce()
		return nil, nil
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
		c.heard(r.NextWithin)
		c.service.metrics.chunk(c.label, r.Seq == 1, time.Since(c.env.AdmittedAt))
		return nil
	}
	c.gaveUp = true
	select {
	case f := <-c.waiter.Failed():
		return f // while emit waited for the caller
	default:
		return gone(err)
	}
}

// onTheWay is how long a message may be on its way here.
const onTheWay = time.Second

// heard books that the next message of a stream comes within a time; 0 is that
// nobody knows.
func (c *exchange) heard(nextWithin time.Duration) {
	nextWithin = min(nextWithin, time.Until(c.env.Deadline)) // and what is longer says nothing
	switch {
	case nextWithin <= 0 && c.silence == nil:
	case nextWithin <= 0:
		c.silence.Stop()
	case c.silence == nil:
		c.silence = time.NewTimer(nextWithin + onTheWay)
	default:
		c.silence.Reset(nextWithin + onTheWay)
	}
}

// overdue returns a channel that gets a value when the next message of a stream is
// overdue.
func (c *exchange) overdue() <-chan time.Time {
	if c.silence == nil {
		return nil
	}
	return c.silence.C
}

// gone is what an error of emit means: the caller does not take its answer.
func gone(err error) *fault.Fault {
	if f := fault.From(err); f.Reason != fault.Internal {
		return f
	}
	return fault.New(fault.Cancelled, "the caller stopped taking its answer").Caused(err)
}

func (c *exchange) response(r *envelope.Reply) (*Response, error) {
	names := c.request.Outputs
	if c.emit != nil && r.Seq > 1 && len(r.Parts) == 0 {
		names = nil // they came in chunks, which need not be put together
	}
	outputs, err := wanted(r.Parts, names)
	if err != nil {
		return nil, err
	}
	return &Response{
		RequestID: string(r.RequestID),
		Pipeline:  string(c.env.Pipeline),
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
