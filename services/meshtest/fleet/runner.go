package fleet

import (
	"bytes"
	"context"
	"os"
	"time"

	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// newRunner returns a runner that gives back its inputs after base + n*per item,
// and records first which ones it runs.
func newRunner(s HostSpec) (runner.Runner, error) {
	record, err := os.OpenFile(s.Record, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	return inproc.New(inproc.Settings{Concurrency: max(1, s.Concurrency)}, func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
		// One write: what is on record is whole, whenever the process ends.
		if _, err := record.Write(linesOf(batch)); err != nil {
			return err
		}
		if took := s.Base + time.Duration(len(batch.Items))*s.PerItem; took > 0 {
			timer := time.NewTimer(took)
			defer timer.Stop()
			select {
			case <-timer.C:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		for i, item := range batch.Items {
			if err := sink.Settle(i, runner.Output(item.Inputs...)); err != nil {
				return err
			}
		}
		return nil
	}), nil
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
