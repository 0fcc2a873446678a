package fleet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// Hold is how a text begins that holds its runner.
const Hold = "hold"

// recorder records which items it runs, before it does.
type recorder struct {
	spec   HostSpec
	host   string
	runs   atomic.Int64
	record *os.File
	// ends are those that were told to end.
	ends *os.File
}

// endsSuffix is what the name of the record of ends has behind that of the runs.
const endsSuffix = ".ends"

func newRunner(s HostSpec, host string) (runner.Runner, error) {
	record, err := os.OpenFile(s.Record, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	ends, err := os.OpenFile(s.Record+endsSuffix, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	r := &recorder{spec: s, host: host, record: record, ends: ends}
	return inproc.New(inproc.Settings{Spec: runner.Spec{Stream: s.Chunks > 0}, Concurrency: s.Slots}, r.run), nil
}

func (r *recorder) run(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
	// One write: what is on record is whole, whenever the process ends.
	if _, err := r.record.Write(linesOf(batch)); err != nil {
		return err
	}
	answers := r.answers(batch)
	if err := r.stream(ctx, batch, answers, sink); err != nil {
		return errors.Join(err, r.ended(batch))
	}
	for i, answer := range answers {
		if err := sink.Settle(i, runner.Output(answer)); err != nil {
			return err
		}
	}
	return nil
}

// ended records that a batch was told to end, and when.
func (r *recorder) ended(batch runner.Batch) error {
	now := time.Now().UnixNano()
	var out []byte
	for _, item := range batch.Items {
		out = fmt.Appendf(out, "%d %s\n", now, textOf(item))
	}
	_, err := r.ends.Write(out)
	return err
}

// answers returns what each item becomes by this run and by no other.
func (r *recorder) answers(batch runner.Batch) []payload.Part {
	run := r.runs.Add(1)
	out := make([]payload.Part, len(batch.Items))
	for i, item := range batch.Items {
		out[i] = payload.OfBlob("", "text/plain", fmt.Appendf(nil, "%s %s/%d", textOf(item), r.host, run))
	}
	return out
}

// stream sends the chunks, the first of them at once, and returns when the time
// that the batch takes is over.
func (r *recorder) stream(ctx context.Context, batch runner.Batch, answers []payload.Part, sink runner.Sink) error {
	for range r.spec.Chunks {
		for i, answer := range answers {
			// An error says that nobody wants it; the others' go on.
			_ = sink.Chunk(i, []payload.Part{answer})
		}
		if err := wait(ctx, r.spec.Base/time.Duration(r.spec.Chunks)); err != nil {
			return err
		}
	}
	if holds(batch) {
		<-ctx.Done()
		return ctx.Err()
	}
	if r.spec.Chunks > 0 {
		return nil
	}
	return wait(ctx, r.spec.Base)
}

func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func holds(batch runner.Batch) bool {
	for _, item := range batch.Items {
		if strings.HasPrefix(textOf(item), Hold) {
			return true
		}
	}
	return false
}

func linesOf(batch runner.Batch) []byte {
	var out bytes.Buffer
	for _, item := range batch.Items {
		fmt.Fprintf(&out, "%s %s\n", item.RequestID, textOf(item))
	}
	return out.Bytes()
}

func textOf(item runner.Item) string { return string(item.Inputs[0].Blob.Data) }
