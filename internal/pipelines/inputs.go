package pipelines

import (
	"slices"

	"google.golang.org/protobuf/proto"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Input is a part that callers send, by their name for it. It has no body if any part will do.
type Input struct {
	*stagev1.PartSpec
	// Rows is true if a single row may come without axis 0.
	Rows bool
}

// Inputs returns the parts that callers of a pipeline send: what its steps read and no step before
// gives. An input that only some branches read is optional. Inputs returns nil where a step takes
// whatever callers send, or is unknown.
func Inputs(p pipeline.Pipeline, stages map[pipeline.StageName]Stage) []Input {
	c := newChecker(p, stages, 0)
	c.steps(p.Steps, "steps", 0)
	if *c.open {
		return nil
	}
	return c.asked
}

// ask adds the inputs of a step that no step before gives.
func (c *checker) ask(at stepCheck) {
	inputs := at.Spec.GetInputs()
	isFirst := c.previous == nil
	switch {
	case c.lost:
		return
	case isFirst && len(inputs) == 0:
		*c.open = true
	}
	// One part feeds a single input whatever its name. A part that the pipeline lists in keep is
	// meant for the input of its name.
	takesAny := c.hasBlocks && len(inputs) == 1 && c.only() != nil
	for _, want := range inputs {
		source, isRenamed := at.source(want.GetName())
		if c.gives(source) || !isFirst && (!c.keeps(source) || takesAny && !isRenamed) {
			continue
		}
		c.add(Input{withName(want, source), at.Spec.GetBatchAxis() == stagev1.BatchAxis_BATCH_AXIS_ROWS})
	}
}

// gives reports whether a step before gives a part of that name.
func (c *checker) gives(name string) bool {
	return len(c.kept[name]) > 0 || slices.ContainsFunc(c.previous, func(o output) bool { return o.GetName() == name })
}

// add adds an input, or combines it with the one of its name.
func (c *checker) add(in Input) {
	at := slices.IndexFunc(c.asked, func(other Input) bool { return other.GetName() == in.GetName() })
	if at < 0 {
		c.asked = append(c.asked, in)
		return
	}
	isOptional := in.GetOptional() && c.asked[at].GetOptional()
	if c.asked[at].GetBody() == nil {
		c.asked[at] = in
	}
	c.asked[at].PartSpec = proto.CloneOf(c.asked[at].PartSpec)
	c.asked[at].Optional = isOptional
}

// addLists adds what the lists of a block ask for. What only some of them need is optional, unless
// those run always: the branches of a parallel block, and the steps of a try.
func (c *checker) addLists(s *pipeline.Step, lists [][]Input) {
	for i, list := range lists {
		for _, in := range list {
			isNeeded := func(list []Input) bool {
				return slices.ContainsFunc(list, func(other Input) bool { return other.GetName() == in.GetName() && !other.GetOptional() })
			}
			runsAlways := s.Parallel != nil || s.Try != nil && i == 0
			if !runsAlways && slices.ContainsFunc(lists, func(other []Input) bool { return !isNeeded(other) }) {
				in.PartSpec = proto.CloneOf(in.PartSpec)
				in.Optional = true
			}
			c.add(in)
		}
	}
}

// addItems adds what the steps of a map ask for. An item that no step gives is an element of a
// caller's tensor; one alone feeds a single input whatever its name.
func (c *checker) addItems(m *pipeline.Map, asked []Input) {
	for _, in := range asked {
		source, isItem := m.Over[in.GetName()]
		for _, only := range m.Over {
			if len(m.Over) == 1 && len(asked) == 1 && !c.gives(only) {
				source, isItem = only, true
			}
		}
		if isItem {
			in.PartSpec = withName(in.PartSpec, source)
			if t := in.GetTensor(); t != nil {
				item := t.GetShape()
				if in.Rows && len(item) > 0 {
					item = item[1:]
				}
				t.Shape = append([]int64{-1}, item...)
			}
			in.Rows = false
		}
		if !c.gives(in.GetName()) {
			c.add(in)
		}
	}
}

// withName returns a copy of a part with a name.
func withName(part *stagev1.PartSpec, name string) *stagev1.PartSpec {
	out := proto.CloneOf(part)
	out.Name = name
	return out
}
