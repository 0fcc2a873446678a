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
	FirstChunk, Idle time.Duration
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
	if h.unbound {
		s.MaxInFlight = s.room()
	}
	// Nobody has posted yet: the host is not ready, and not on the bus.
	h.events = make(chan event, s.eventRoom())
	return nil
}

// streams reports whether the host's runner answers in chunks.
func (h *Host) streams() bool { return h.settings.Batch.Mode == batch.Stream }

// watch ends the run of a stream that is silent for too long: its item is answered,
// and the runner told that nobody wants more of it. It returns when the run is over.
func (r *run) watch(ctx context.Context) {
	timer := time.NewTimer(r.patience())
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		left := time.Until(r.silentUntil())
		if left > 0 {
			timer.Reset(left)
			continue
		}
		r.end(0, r.silence())
		return
	}
}

// patience is how long the runner may say nothing before its first chunk.
func (r *run) patience() time.Duration { return r.host.settings.Stream.FirstChunk }

// silentUntil is until when the runner may say nothing.
func (r *run) silentUntil() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.spoke.IsZero() {
		return r.started.Add(r.patience())
	}
	return r.spoke.Add(r.host.settings.Stream.Idle)
}

// silence is the fault of a stream that is silent for too long.
func (r *run) silence() *fault.Fault {
	limits := r.host.settings.Stream
	r.mu.Lock()
	defer r.mu.Unlock()
	if it := r.items[0]; it.chunks > 0 {
		return fault.Newf(fault.StreamInterrupted, "the answer broke after %d chunks: the runner has sent none for %s, the stage's stream.idle_timeout", it.chunks, limits.Idle)
	}
	return fault.Newf(fault.RunnerStalled, "the runner has sent no chunk for %s, the stage's stream.first_chunk_timeout", limits.FirstChunk)
}
