package envelope

import (
	"fmt"

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
	// count is of all steps, also of those that are too many to look at.
	count int
	// problem is what is wrong with the first step that cannot be.
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
	// kept counts all names to keep, also those that are too many.
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

// finish completes the step, and says what is wrong with it.
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
