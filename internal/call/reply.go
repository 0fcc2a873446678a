package call

import (
	"context"
	"errors"
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// What a streamed answer may have unread. Runners are not slowed down by their
// readers, so this is for a whole answer that comes in one burst.
const (
	streamReplies = 1 << 14
	streamBytes   = 16 << 20
	// streamsBytes is what all of them may have unread, beyond a little for each.
	streamsBytes = 256 << 20
)

// progress is the state of an answer that arrives.
type progress struct {
	// seq is the number of its last message, attempt the attempt of the run that sends them;
	// silence ends a stream whose next message is overdue, and is nil before the first.
	seq     uint64
	attempt uint32
	silence *time.Timer
	// isFinal is true once the final reply came: nothing is left to cancel.
	isFinal bool
	// isRejected is true where the call ends by a message of the answer: nobody
	// takes the rest.
	isRejected bool
}

// transitTime is how long a message may be on its way to the gateway.
const transitTime = time.Second

// expect sets when the next message of a stream is overdue; 0 means that it is not
// known.
func (p *progress) expect(nextWithin time.Duration) {
	switch {
	case nextWithin <= 0 && p.silence == nil:
	case nextWithin <= 0:
		p.silence.Stop()
	case p.silence == nil:
		p.silence = time.NewTimer(nextWithin + transitTime)
	default:
		p.silence.Reset(nextWithin + transitTime)
	}
}

func (p *progress) stop() { p.expect(0) }

// overdue returns a channel that gets a value when the next message of a stream is
// overdue.
func (p *progress) overdue() <-chan time.Time {
	if p.silence == nil {
		return nil
	}
	return p.silence.C
}

var errMismatch = errors.New("its IDs are not the request's")

// handleEvent handles an event of the call; response is nil while the call continues.
func (x *call) handleEvent(ctx context.Context, e event) (*request.Response, error) {
	switch {
	case e.fault != nil:
		return nil, e.fault
	case e.reply != nil:
		return x.readReply(e.reply)
	}
	if e.isReconnected {
		x.search.begin() // hosts store what they could not send meanwhile
	}
	if e.hasNoHost {
		return nil, x.failUnserved(ctx)
	}
	return nil, nil
}

func (x *call) readReply(m *message) (*request.Response, error) {
	r, err := m.decode()
	switch {
	case err != nil:
	case r.RequestID != x.env.RequestID, r.ExecutionID != x.env.ExecutionID:
		err = errMismatch
	}
	if err != nil {
		x.progress.isRejected = true
		x.service.metrics.droppedReply("malformed")
		return nil, fault.Newf(fault.Internal, "a host's reply cannot be read: %w", err)
	}
	return x.handleReply(r)
}

func (x *call) handleReply(r *envelope.Reply) (*request.Response, error) {
	p := &x.progress
	p.isFinal = r.Terminal()
	x.steps = r.Timings
	switch {
	case r.Fault != nil:
		return nil, r.Fault
	case r.Stored:
		// It announces the stored result, and is not a message of the answer.
		x.search.announce()
		return nil, nil
	}
	if p.seq++; p.seq == 1 {
		p.attempt = r.Attempt
	}
	switch {
	case x.needsAllChunks() && r.Attempt != p.attempt:
		return nil, fault.New(fault.StreamInterrupted, "another run of the item sent a message of the answer")
	case x.needsAllChunks() && r.Seq != p.seq: // a caller that takes no chunks misses none
		return nil, fault.Newf(fault.StreamInterrupted, "message %d of the answer came, message %d is missing", r.Seq, p.seq)
	case r.Chunk:
		return nil, x.handleChunk(r)
	}
	return x.response(r)
}

// needsAllChunks reports whether a missing chunk ends the call.
func (x *call) needsAllChunks() bool { return x.emit != nil && !x.request.LossyChunks }

func (x *call) handleChunk(r *envelope.Reply) error {
	err := x.emit(request.Chunk{RequestID: string(r.RequestID), Seq: r.Seq, Attempt: r.Attempt, Outputs: r.Parts})
	if err == nil {
		if x.needsAllChunks() {
			// NextWithin may exceed the deadline; the deadline then ends the call.
			x.progress.expect(min(r.NextWithin, time.Until(x.env.Deadline)))
		}
		x.service.metrics.chunk(x.request.label, r.Seq == 1, time.Since(x.env.AdmittedAt))
		return nil
	}
	x.progress.isRejected = true
	if f, _ := x.pending.outcome(); f != nil {
		return f // while emit waited for the caller
	}
	if f := fault.From(err); f.Reason != fault.Internal {
		return f
	}
	return fault.New(fault.Cancelled, "the caller stopped taking its answer").Caused(err)
}

func (x *call) response(r *envelope.Reply) (*request.Response, error) {
	names := x.request.options().Outputs
	if x.emit != nil && r.Seq > 1 && len(r.Parts) == 0 {
		names = nil // they came in chunks, which stages need not put together
	}
	outputs, err := selectOutputs(r.Parts, names)
	if err != nil {
		return nil, err
	}
	return &request.Response{
		RequestID: string(r.RequestID),
		Pipeline:  string(x.env.Pipeline),
		Outputs:   outputs,
		Metadata:  r.Metadata,
		Timeline:  request.Timeline{Steps: r.Timings},
		Chunks:    chunksOf(r),
	}, nil
}

// chunksOf returns how many chunks came before a final reply.
func chunksOf(r *envelope.Reply) uint64 { return max(r.Seq, 1) - 1 }

// selectOutputs returns the outputs that the request names, in its order.
func selectOutputs(parts []payload.Part, names []string) ([]payload.Part, error) {
	if len(names) == 0 {
		return parts, nil
	}
	out := make([]payload.Part, 0, len(names))
	for _, name := range names {
		part, ok := payload.Find(parts, name)
		if !ok {
			return nil, fault.InField(fault.InvalidRequest, "outputs", "the pipeline has no output %.*q", fault.MaxQuoted, name)
		}
		out = append(out, part)
	}
	return out, nil
}

// search says when a call looks up its stored result. The zero search never does.
type search struct {
	// due ticks when a look-up is due. left are those to come, without end where a
	// host announced the result.
	due         <-chan time.Time
	pause       time.Duration
	left        int
	isAnnounced bool
}

// After a reconnect a call looks for about 3 s: a broker that has just restarted
// may not know yet what it has stored.
const (
	lookUps    = 8
	firstPause = 25 * time.Millisecond
	maxPause   = time.Second
)

// begin makes a look-up due at once.
func (s *search) begin() { s.pause, s.left, s.due = firstPause, lookUps, time.After(0) }

func (s *search) announce() {
	s.isAnnounced = true
	s.begin()
}

// scheduleNext makes another look-up due later, after one that found nothing.
func (s *search) scheduleNext() {
	s.left--
	if s.left <= 0 && !s.isAnnounced {
		s.due = nil
		return
	}
	s.due = time.After(s.pause)
	s.pause = min(2*s.pause, maxPause)
}

// lookUpResult returns the response of the stored result, if there is one. A broker
// that does not answer is no reason to fail before the deadline.
func (x *call) lookUpResult(ctx context.Context) (*request.Response, error) {
	r, err := x.service.results.Get(ctx, x.env.RequestID)
	switch {
	case err == nil:
		return x.responseOf(r)
	case errors.Is(err, envelope.ErrMalformed):
		return nil, unreadable(err)
	}
	x.search.scheduleNext()
	return nil, nil
}

// responseOf returns the response of a stored result. For a stream it must follow
// the chunks that the caller has.
func (x *call) responseOf(r *envelope.Result) (*request.Response, error) {
	reply, p := r.Reply, &x.progress
	p.isFinal, x.steps = true, reply.Timings
	switch {
	case reply.RequestID != x.env.RequestID:
		return nil, unreadable(errMismatch)
	case reply.Fault != nil:
		return nil, reply.Fault
	case x.needsAllChunks() && (reply.Seq != p.seq+1 || p.seq > 0 && (reply.ExecutionID != x.env.ExecutionID || reply.Attempt != p.attempt)):
		return nil, fault.New(fault.StreamInterrupted, "chunks of the answer were lost; its end is stored, and can be fetched by the request's ID")
	}
	return x.response(reply)
}

func unreadable(err error) *fault.Fault {
	return fault.Newf(fault.Internal, "what is stored of the request cannot be read: %w", err)
}
