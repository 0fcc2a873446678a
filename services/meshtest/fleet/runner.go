package fleet

import (
	"bytes"
	"context"
	"os"

	"github.com/stagemesh/stagemesh/services/synth"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// recorder is a runner that records first which items it runs.
type recorder struct {
	runner.Runner
	record *os.File
}

// newRunner returns a runner that gives back its inputs after the base time.
func newRunner(s HostSpec) (runner.Runner, error) {
	record, err := os.OpenFile(s.Record, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	sleep, err := synth.NewSleep(synth.SleepSettings{Base: s.Base})
	if err != nil {
		return nil, err
	}
	return &recorder{sleep, record}, nil
}

// Acquire implements runner.Runner.
func (r *recorder) Acquire(ctx context.Context) (runner.Slot, error) {
	slot, err := r.Runner.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	return &recordedSlot{slot, r.record}, nil
}

type recordedSlot struct {
	runner.Slot
	record *os.File
}

// Do implements runner.Slot.
func (s *recordedSlot) Do(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
	// One write: what is on record is whole, whenever the process ends.
	if _, err := s.record.Write(linesOf(batch)); err != nil {
		s.Release()
		return err
	}
	return s.Slot.Do(ctx, batch, sink)
}

func linesOf(batch runner.Batch) []byte {
	var out bytes.Buffer
	for _, item := range batch.Items {
		out.WriteString(item.RequestID)
		out.WriteByte(' ')
		out.Write(item.Inputs[0].Blob.Data)
		out.WriteByte('\n')
	}
	return out.Bytes()
}
