package envelope

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/wire"
)

// StepTiming is what one step of a request cost.
type StepTiming struct {
	Step  pipeline.StepName
	Stage pipeline.StageName
	Host  pipeline.HostID
	// Attempt counts deliveries of the item to hosts of the stage.
	Attempt uint32
	// QueueWait is from the broker's receipt until a host had the item.
	QueueWait time.Duration
	// BatchWait is from the item's arrival at the host until its dispatch.
	BatchWait time.Duration
	// Run is the runner's time for the whole batch.
	Run time.Duration
	// BatchSize counts items, BatchRows rows.
	BatchSize, BatchRows uint32
	// Dispatch is why the batch was dispatched.
	Dispatch string
}

// ToProto converts the timing for the wire.
func (t StepTiming) ToProto() *inferencev1.StepTiming {
	return &inferencev1.StepTiming{
		Step:           string(t.Step),
		Stage:          string(t.Stage),
		Host:           string(t.Host),
		Attempt:        t.Attempt,
		QueueWait:      durationpb.New(t.QueueWait),
		BatchWait:      durationpb.New(t.BatchWait),
		Run:            durationpb.New(t.Run),
		BatchSize:      t.BatchSize,
		BatchRows:      t.BatchRows,
		DispatchReason: t.Dispatch,
	}
}

func writeTimings(w *wire.Writer, t wire.Tag, timings []StepTiming) {
	for i := range timings {
		timings[i].write(w, t)
	}
}

func (t *StepTiming) write(w *wire.Writer, tag wire.Tag) {
	start := w.Begin(tag, len(t.Step)+len(t.Stage)+len(t.Host)+len(t.Dispatch))
	w.Text(timingStepTag, string(t.Step))
	w.Text(timingStageTag, string(t.Stage))
	w.Text(timingHostTag, string(t.Host))
	w.Uint(timingAttemptTag, uint64(t.Attempt))
	w.Duration(timingQueueWaitTag, t.QueueWait)
	w.Duration(timingBatchWaitTag, t.BatchWait)
	w.Duration(timingRunTag, t.Run)
	w.Uint(timingBatchSizeTag, uint64(t.BatchSize))
	w.Uint(timingBatchRowsTag, uint64(t.BatchRows))
	w.Text(timingDispatchTag, t.Dispatch)
	w.End(start)
}

// timingReader reads the list of timings of an envelope or a reply.
type timingReader struct {
	list []StepTiming
	// count is of all timings, also of those that are too many to look at.
	count int
}

func (r *timingReader) read(m *wire.Message) {
	if r.count++; r.count > pipeline.MaxSteps {
		return
	}
	if r.list == nil {
		r.list = make([]StepTiming, 0, m.Run(pipeline.MaxSteps))
	}
	r.list = append(r.list, readTiming(m))
}

// timings returns the list, never nil, of which at most so many are taken.
func (r *timingReader) timings(most int) ([]StepTiming, error) {
	switch {
	case r.count > most:
		return nil, fmt.Errorf("timings of %d steps, at most %d are taken", r.count, most)
	case r.count == 0:
		return []StepTiming{}, nil
	}
	return r.list, nil
}

func readTiming(m *wire.Message) (out StepTiming) {
	var queueWait, batchWait, run wire.Time
	in := m.Inner()
	for in.Next() {
		switch in.Tag {
		case timingQueueWaitTag:
			queueWait.Read(&in)
		case timingBatchWaitTag:
			batchWait.Read(&in)
		case timingRunTag:
			run.Read(&in)
		default:
			out.read(&in)
		}
	}
	m.Fail(in.Err())
	out.QueueWait, out.BatchWait, out.Run = queueWait.AsDuration(), batchWait.AsDuration(), run.AsDuration()
	return out
}

func (t *StepTiming) read(m *wire.Message) {
	switch m.Tag {
	case timingStepTag:
		t.Step = pipeline.StepName(m.Text())
	case timingStageTag:
		t.Stage = pipeline.StageName(m.Text())
	case timingHostTag:
		t.Host = pipeline.HostID(m.Text())
	case timingAttemptTag:
		t.Attempt = m.Uint32()
	case timingBatchSizeTag:
		t.BatchSize = m.Uint32()
	case timingBatchRowsTag:
		t.BatchRows = m.Uint32()
	case timingDispatchTag:
		t.Dispatch = m.Text()
	}
}
