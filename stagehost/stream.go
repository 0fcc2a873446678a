package stagehost

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/stagehost/batch"
)

// StreamSettings bound how long a runner that answers in chunks may say nothing. 0
// means the default.
type StreamSettings struct {
	// FirstChunk is from the start of an item's run to its first chunk, Idle from each
	// to the next. The outcome counts as one.
	FirstChunk time.Duration `yaml:"first_chunk_timeout"`
	Idle       time.Duration `yaml:"idle_timeout"`
}

// Defaults of StreamSettings.
const (
	DefaultFirstChunk = 30 * time.Second
	DefaultIdle       = 30 * time.Second
)

func (s StreamSettings) withDefaults() StreamSettings {
	orDefault(&s.FirstChunk, DefaultFirstChunk)
	orDefault(&s.Idle, DefaultIdle)
	return s
}

func (s StreamSettings) validate() error {
	switch {
	case s.FirstChunk < 0:
		return fmt.Errorf("stream.first_chunk_timeout: %s is negative", s.FirstChunk)
	case s.Idle < 0:
		return fmt.Errorf("stream.idle_timeout: %s is negative", s.Idle)
	}
	return nil
}

// adapt has the host serve its runner as that wants to be, once it has said so.
func (h *Host) adapt() error {
	s := &h.settings
	switch streams := h.spec.Stream; {
	case streams && s.Batch.Mode == "":
		s.Batch.Mode = batch.Stream
	case streams && s.Batch.Mode != batch.Stream:
		return fmt.Errorf("batch.mode: %s is for runners of batches, and this one answers in chunks; use stream, or leave the key out", s.Batch.Mode)
	case !streams && s.Batch.Mode == batch.Stream:
		return errors.New("batch.mode: stream is for runners that answer in chunks, and this one does not; leave the key out")
	}
	orDefault(&s.MaxInFlight, s.defaultInFlight())
	h.events = make(chan event, s.eventRoom())
	h.tasks, h.resting = make(chan task), make(chan struct{}, s.Runner.Concurrency())
	return nil
}

// streams reports whether the host's runner answers in chunks.
func (h *Host) streams() bool { return h.settings.Batch.Mode == batch.Stream }

// watch ends the run of a stream that is silent for too long: its item is answered,
// and the runner told that nobody wants more of it. It returns when the run is over.
func (r *run) watch(ctx context.Context) {
	timer := time.NewTimer(r.nextLook(time.Now()))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if left := r.nextLook(time.Now()); left > 0 {
			timer.Reset(left)
			continue
		}
		r.end(0, r.silence())
		return
	}
}

// nextLook is when the runner's silence is to be looked at next; it has been too long
// where that is now. A chunk that comes meanwhile may make it sooner.
func (r *run) nextLook(now time.Time) time.Duration {
	limits := r.host.settings.Stream
	r.mu.Lock()
	defer r.mu.Unlock()
	until := r.spoke.Add(limits.Idle)
	switch {
	case !r.spoke.IsZero():
	case r.batch.Suspect:
		// It may wait for a worker of its own, for as long as others stream there.
		until = r.latest()
	default:
		until = r.started.Add(limits.FirstChunk)
	}
	return min(until.Sub(now), limits.Idle)
}

// silence is the fault of a stream that is silent for too long.
func (r *run) silence() *fault.Fault {
	limits := r.host.settings.Stream
	r.mu.Lock()
	defer r.mu.Unlock()
	switch it := r.items[0]; {
	case it.chunks > 0:
		return fault.Newf(fault.StreamInterrupted, "the answer broke after %d chunks: the runner has sent none for %s, the stage's stream.idle_timeout", it.chunks, limits.Idle)
	case !r.spoke.IsZero():
		return fault.Newf(fault.RunnerStalled, "the runner has sent no chunk for %s, the stage's stream.idle_timeout", limits.Idle)
	default:
		return fault.Newf(fault.RunnerStalled, "the runner has sent no chunk for %s, the stage's stream.first_chunk_timeout", limits.FirstChunk)
	}
}
