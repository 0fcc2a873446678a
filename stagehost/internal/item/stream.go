package item

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// StreamSettings bound how long a runner that answers in chunks may say nothing. 0
// means the default.
type StreamSettings struct {
	// FirstChunk is from the start of an item's run to its first chunk, Idle from each
	// to the next. The outcome counts as one.
	FirstChunk time.Duration `yaml:"first_chunk_timeout"`
	Idle       time.Duration `yaml:"idle_timeout"`
}

// mayRunAgain reports whether the item may be retried here or on another host. It may not
// once a chunk was sent, because sent chunks must not repeat. nak and mayReturn make an
// exception for items whose result is stored: the gateway ends a stream that begins again.
func (a *answer) mayRunAgain() bool { return a.chunks == 0 }

// Chunk implements runner.Sink. A caller that takes no chunks gets only the final
// reply, so its item may still be retried. If a chunk cannot be sent, the item
// fails: later chunks would leave a gap.
func (r *run) Chunk(i int, parts []payload.Part) error {
	if i < 0 || i >= len(r.attempts) {
		return runner.ErrNoSuchItem
	}
	if a := &r.attempts[i]; a.isCancelled() || a.expired(time.Now()) {
		return runner.ErrCancelled
	}
	err := r.chunk(i, parts)
	if f, bad := errors.AsType[*fault.Fault](err); bad {
		r.endItem(i, f)
	}
	return err
}

// chunk sends a chunk of item i; its errors are faults where it cannot be sent.
func (r *run) chunk(i int, parts []payload.Part) (err error) {
	defer r.recoverCheck(&err)
	a := &r.attempts[i]
	if !a.env.Last() {
		return fault.New(fault.NotSupported, "only the last stage of a pipeline may answer in chunks")
	}
	if err := a.contract.Chunk(parts); err != nil {
		return fault.From(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.checkOpenLocked(i); err != nil {
		return err
	}
	if a.env.TakesChunks {
		if f := r.send(a.work(), parts); f != nil {
			return f
		}
	}
	r.lastChunk = time.Now()
	return nil
}

func (r *run) send(w work, parts []payload.Part) *fault.Fault {
	reply := &envelope.Reply{
		Mesh: w.env.Mesh, RequestID: w.env.RequestID, ExecutionID: w.env.ExecutionID,
		Seq: w.chunks + 1, Attempt: w.timing.Attempt, Chunk: true, Parts: parts,
	}
	if r.streams() {
		reply.NextWithin = r.Stream.Idle
	}
	if w.env.Local != nil {
		if _, err := r.Sender.HandOverReply(w.env, reply); err != nil {
			return encodeFault(w.env.Hop(), err)
		}
	} else {
		message, err := r.Sender.Reply(w.env.Gateway, reply)
		if err != nil {
			return encodeFault(w.env.Hop(), err)
		}
		if err := r.Sender.PublishUnacked(message); err != nil {
			return fault.Newf(fault.StreamInterrupted, "the answer broke after %d chunks: %w", w.chunks, err)
		}
	}
	if w.chunks++; w.chunks == 1 {
		trace.SpanFromContext(r.traced).AddEvent("first chunk")
	}
	r.Metrics.countChunk(w.chunks == 1, r.started)
	return nil
}

// endItem gives item i a fault in place of the runner, and cancels a stream.
func (r *run) endItem(i int, f *fault.Fault) {
	r.mu.Lock()
	open := r.checkOpenLocked(i) == nil
	if open {
		r.attempts[i].outcomeBy = byHost
	}
	r.mu.Unlock()
	if !open {
		return
	}
	a := &r.attempts[i]
	a.took = time.Since(r.started)
	r.traceRun(a.work())
	r.Post(&itemDone{run: r, at: i, outcome: runner.Failed(f)})
	if r.streams() {
		r.cancel()
	}
}

// watch ends a stream that sends nothing for too long. It returns when the run is
// over.
func (r *run) watch(ctx context.Context) {
	timer := time.NewTimer(r.untilStall(time.Now()))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if left := r.untilStall(time.Now()); left > 0 {
			timer.Reset(left)
			continue
		}
		r.endItem(0, r.stallFault())
		return
	}
}

// untilStall returns how long until the runner's silence is checked again; 0 or
// less where it has lasted too long. A chunk that arrives meanwhile may make it
// shorter.
func (r *run) untilStall(now time.Time) time.Duration {
	limits := r.Stream
	r.mu.Lock()
	defer r.mu.Unlock()
	until := r.lastChunk.Add(limits.Idle)
	switch {
	case !r.lastChunk.IsZero():
	case r.batch.Suspect:
		// It may wait for a worker of its own while others stream there.
		until = r.latest()
	default:
		until = r.started.Add(limits.FirstChunk)
	}
	return min(until.Sub(now), limits.Idle)
}

// stallFault is the fault of a stream that sends nothing for too long.
func (r *run) stallFault() *fault.Fault {
	limits := r.Stream
	r.mu.Lock()
	defer r.mu.Unlock()
	switch chunks := r.attempts[0].chunks; {
	case chunks > 0:
		return fault.Newf(fault.StreamInterrupted, "the answer broke after %d chunks: the runner has sent none for %s, the stage's stream.idle_timeout", chunks, limits.Idle)
	case !r.lastChunk.IsZero():
		return fault.Newf(fault.RunnerStalled, "the runner has sent no chunk for %s, the stage's stream.idle_timeout", limits.Idle)
	default:
		return fault.Newf(fault.RunnerStalled, "the runner has sent no chunk for %s, the stage's stream.first_chunk_timeout", limits.FirstChunk)
	}
}
