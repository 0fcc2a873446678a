package envelope

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/wire"
)

func writeRoute(w *wire.Writer, route []pipeline.Hop) {
	for i := range route {
		writeHop(w, &route[i])
	}
}

func writeHop(w *wire.Writer, hop *pipeline.Hop) {
	start := w.Begin(routeTag, len(hop.Step)+len(hop.Stage)+hop.Parameters.WireSize()/2)
	w.Text(stepNameTag, string(hop.Step))
	w.Text(stepStageTag, string(hop.Stage))
	hop.Model.Write(w, stepModelTag)
	hop.Parameters.Write(w, stepParametersTag)
	w.TextMap(stepInputsTag, hop.Inputs)
	for _, name := range hop.Keep {
		w.AnyText(stepKeepTag, name)
	}
	w.Text(stepHostTag, string(hop.Host))
	w.End(start)
}

// routeReader reads an envelope's steps.
type routeReader struct {
	route []pipeline.Hop
	// count is of all steps, also of those beyond the limit.
	count int
	// problem is the error of the first invalid step.
	problem error
}

func (r *routeReader) read(m *wire.Message) {
	if r.count++; r.count > pipeline.MaxSteps {
		return
	}
	if r.route == nil {
		r.route = make([]pipeline.Hop, 0, m.Run(pipeline.MaxSteps))
	}
	var hop hopReader
	hop.read(m)
	if err := hop.finish(); err != nil && r.problem == nil {
		r.problem = fmt.Errorf("route[%d]: %w", len(r.route), err)
	}
	r.route = append(r.route, hop.hop)
}

func (r *routeReader) hops() ([]pipeline.Hop, error) {
	if r.count == 0 || r.count > pipeline.MaxSteps {
		return nil, fmt.Errorf("a route of %d steps", r.count)
	}
	return r.route, r.problem
}

// hopReader reads one step.
type hopReader struct {
	hop        pipeline.Hop
	parameters payload.ParameterReader
	// kept counts all names to keep, also those beyond the limit.
	kept int
}

func (r *hopReader) read(m *wire.Message) {
	in := m.Inner()
	for in.Next() {
		switch in.Tag {
		case stepNameTag:
			r.hop.Step = pipeline.StepName(in.Text())
		case stepStageTag:
			r.hop.Stage = pipeline.StageName(in.Text())
		case stepModelTag:
			r.hop.Model.Read(&in)
		case stepParametersTag:
			r.parameters.Read(&in)
		case stepInputsTag:
			r.hop.Inputs = in.TextEntry(r.hop.Inputs)
		case stepKeepTag:
			r.keep(&in)
		case stepHostTag:
			r.hop.Host = pipeline.HostID(in.Text())
		}
	}
	m.Fail(in.Err())
}

func (r *hopReader) keep(m *wire.Message) {
	name := m.Text()
	if r.kept++; r.kept <= payload.MaxParts {
		r.hop.Keep = append(r.hop.Keep, name)
	}
}

// finish completes the step and validates it.
func (r *hopReader) finish() (err error) {
	if err := pipeline.ValidName("step", string(r.hop.Step)); err != nil {
		return err
	}
	if err := pipeline.ValidName("stage", string(r.hop.Stage)); err != nil {
		return err
	}
	if r.hop.Host != "" {
		if err := pipeline.ValidName("host", string(r.hop.Host)); err != nil {
			return err
		}
	}
	if r.kept > payload.MaxParts {
		return fmt.Errorf("keeps %d parts, at most %d are taken", r.kept, payload.MaxParts)
	}
	r.hop.Parameters, err = r.parameters.Parameters()
	return err
}

// StepTiming is the timeline entry of one step.
type StepTiming struct {
	Step  pipeline.StepName
	Stage pipeline.StageName
	Host  pipeline.HostID
	// Attempt counts deliveries of the item to hosts of the stage.
	Attempt uint32
	// QueueWait is from the broker's receipt of the item to its delivery.
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

// ToProto converts the timing to its protobuf message.
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
	// count is of all timings, also of those beyond the limit.
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

// timings returns the list, never nil, of at most so many timings.
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
