package pipelines

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// treeLine is a line of a pipeline's tree.
type treeLine struct {
	depth int
	name  string
	text  string
}

// steps checks a list of steps; field is the list's in the file.
func (c *checker) steps(steps []pipeline.Step, field string, depth int) {
	for i := range steps {
		step := &steps[i]
		at := stepCheck{Step: *step, field: fmt.Sprintf("%s[%d]", field, i), first: depth == 0 && i == 0, last: depth == 0 && i == len(steps)-1}
		line := len(*c.tree)
		*c.tree = append(*c.tree, treeLine{depth: depth, name: string(step.Name)})
		if step.IsBlock() {
			c.block(step, at.field, depth)
			(*c.tree)[line].text = blockText(step)
		} else {
			at.Stage, at.known = c.stages[step.Stage]
			c.step(at)
			(*c.tree)[line].text = string(step.Stage)
			if inputs := at.Spec.GetInputs(); len(inputs) > 0 {
				var sources []string
				for _, input := range inputs {
					sources = append(sources, cmp.Or(step.Inputs[input.GetName()], input.GetName()))
				}
				(*c.tree)[line].text += ": " + strings.Join(sources, ", ")
			}
		}
		(*c.tree)[line].text += " -> " + typesOf(c.previous)
	}
}

// blockText says what a block does.
func blockText(s *pipeline.Step) string {
	switch {
	case s.Parallel != nil:
		text := "parallel, all"
		if s.Parallel.Quorum > 0 {
			text = fmt.Sprintf("parallel, %d of %d", s.Parallel.Quorum, len(s.Parallel.Branches))
		}
		if s.Parallel.Within > 0 {
			text += " within " + s.Parallel.Within.String()
		}
		return text
	case s.Map != nil:
		return fmt.Sprintf("map over %s, at most %d", strings.Join(slices.Sorted(maps.Values(s.Map.Over)), ", "), cmp.Or(s.Map.MaxItems, pipeline.DefaultMaxItems))
	case s.Switch != nil:
		var subjects []string
		for _, one := range s.Switch {
			if w := one.When; w != nil {
				name := cmp.Or(w.Part, w.Parameter, w.Metadata, "tenant")
				if !slices.Contains(subjects, name) {
					subjects = append(subjects, name)
				}
			}
		}
		return "switch on " + strings.Join(subjects, ", ")
	case s.Split != nil:
		var weights []string
		for _, name := range slices.Sorted(maps.Keys(s.Split.Branches)) {
			weights = append(weights, fmt.Sprintf("%s %d%%", name, s.Split.Branches[name].Weight))
		}
		return "split, " + strings.Join(weights, ", ")
	}
	text := "try"
	if s.Try.Within > 0 {
		text += " within " + s.Try.Within.String()
	}
	return text
}

// typesOf lists parts with their types.
func typesOf(parts []output) string {
	switch {
	case parts == nil:
		return "unknown parts"
	case len(parts) == 0:
		return "nothing"
	}
	var out []string
	for _, o := range parts {
		text := o.GetName()
		if t := o.GetTensor(); t != nil {
			text += " " + t.GetDatatype() + strings.ReplaceAll(fmt.Sprint(t.GetShape()), " ", ",")
		}
		if o.GetOptional() {
			text += " (optional)"
		}
		out = append(out, text)
	}
	return strings.Join(out, ", ")
}

// Tree returns a pipeline as a tree, with what each step reads and gives.
func Tree(p pipeline.Pipeline, stages map[pipeline.StageName]Stage) string {
	c := newChecker(p, stages, 0)
	c.steps(p.Steps, "steps", 0)
	var out strings.Builder
	fmt.Fprintln(&out, p.Name)
	lines := *c.tree
	for i, line := range lines {
		for depth := range line.depth + 1 {
			isLast := true // of its siblings
			for _, later := range lines[i+1:] {
				if later.depth <= depth {
					isLast = later.depth < depth
					break
				}
			}
			switch {
			case depth == line.depth && isLast:
				out.WriteString("└─ ")
			case depth == line.depth:
				out.WriteString("├─ ")
			case isLast:
				out.WriteString("   ")
			default:
				out.WriteString("│  ")
			}
		}
		fmt.Fprintf(&out, "%s  %s\n", line.name, line.text)
	}
	return out.String()
}

// Outputs returns the parts with which a pipeline answers, nil if they are unknown.
func Outputs(p pipeline.Pipeline, stages map[pipeline.StageName]Stage) []*stagev1.PartSpec {
	c := newChecker(p, stages, 0)
	c.steps(p.Steps, "steps", 0)
	out := c.previous
	if len(p.Outputs) > 0 {
		out = c.named(p.Outputs)
	}
	var specs []*stagev1.PartSpec
	for _, o := range out {
		specs = append(specs, o.PartSpec)
	}
	return specs
}

// Reads returns the names of all parts that steps, conditions and maps of a pipeline read, sorted.
func Reads(p pipeline.Pipeline, stages map[pipeline.StageName]Stage) []string {
	out := map[string]bool{}
	var visit func(steps []pipeline.Step)
	visit = func(steps []pipeline.Step) {
		for i := range steps {
			s := &steps[i]
			for _, input := range stages[s.Stage].Spec.GetInputs() {
				out[cmp.Or(s.Inputs[input.GetName()], input.GetName())] = true
			}
			for _, source := range s.Inputs {
				out[source] = true
			}
			if s.Map != nil {
				for _, source := range s.Map.Over {
					out[source] = true
				}
			}
			for _, c := range s.Switch {
				if c.When != nil && c.When.Part != "" {
					out[c.When.Part] = true
				}
			}
			for _, list := range s.Lists() {
				visit(list.Steps)
			}
		}
	}
	visit(p.Steps)
	return slices.Sorted(maps.Keys(out))
}

// decides reports whether a condition in the steps reads the parameter.
func decides(steps []pipeline.Step, parameter string) bool {
	return slices.ContainsFunc(steps, func(s pipeline.Step) bool {
		return slices.ContainsFunc(s.Switch, func(c pipeline.Case) bool { return c.When != nil && c.When.Parameter == parameter }) ||
			slices.ContainsFunc(s.Lists(), func(l pipeline.List) bool { return decides(l.Steps, parameter) })
	})
}

// named returns kept parts by their names, nil if one is unknown.
func (c *checker) named(names []string) (out []output) {
	for _, name := range names {
		kept := c.kept[name]
		if len(kept) == 0 {
			return nil
		}
		out = append(out, kept[0])
	}
	return out
}

// ends checks the outputs that the pipeline names.
func (c *checker) ends() {
	for i, name := range c.pipeline.Outputs {
		if len(c.kept[name]) == 0 && c.previous != nil {
			c.report(requestsFail, fmt.Sprintf("outputs[%d]", i), "no step gives the part %s; the last one gives %s", name, listed(names(c.previous)))
		}
	}
}

// block checks a block, and records what it gives.
func (c *checker) block(s *pipeline.Step, field string, depth int) {
	if s.Map != nil {
		c.mapping(s, field, depth)
		return
	}
	var given [][]output
	var asked [][]Input
	isUnknown := false
	for i, list := range s.Lists() {
		if s.Switch != nil {
			if when := s.Switch[i].When; when != nil {
				c.condition(when, field+"."+list.Field()+".when")
			}
			if f := s.Switch[i].Fail; f != nil {
				*c.tree = append(*c.tree, treeLine{depth: depth + 1, name: list.Name, text: "fails with " + string(f.Reason)})
				continue
			}
		}
		*c.tree = append(*c.tree, treeLine{depth: depth + 1, name: list.Name})
		line := len(*c.tree) - 1
		one, reads, known := c.list(list, field, depth+1)
		gives := typesOf(one)
		if !known && len(list.Give) > 0 {
			gives = strings.Join(slices.Sorted(maps.Keys(list.Give)), ", ")
		}
		(*c.tree)[line].text = "-> " + gives
		isUnknown = isUnknown || !known
		given, asked = append(given, one), append(asked, reads)
	}
	c.addLists(s, asked)
	switch {
	case isUnknown:
		c.give(nil)
	case s.Parallel != nil:
		c.give(c.joined(s.Parallel, given, field))
	default:
		c.give(c.either(s, given, field))
	}
}

// list checks a list of steps in a block, and returns what it gives and what it asks callers for.
func (c *checker) list(list pipeline.List, field string, depth int) (out []output, asked []Input, known bool) {
	own := *c
	own.kept, own.asked = maps.Clone(c.kept), nil
	own.steps(list.Steps, field+"."+list.StepsField(), depth+1)
	switch {
	case len(list.Give) == 0 && len(list.Steps) == 0:
		return []output{}, nil, true
	case len(list.Give) == 0:
		return own.previous, own.asked, own.previous != nil
	}
	known = true
	out = []output{}
	for _, name := range slices.Sorted(maps.Keys(list.Give)) {
		kept := own.kept[list.Give[name]]
		if len(kept) == 0 {
			if known = false; own.previous != nil {
				c.report(requestsFail, field+"."+list.Field()+".give."+name, "no step of the branch gives the part %s; the last one gives %s", list.Give[name], listed(names(own.previous)))
			}
			continue
		}
		out = append(out, renamed(kept[0], name))
	}
	return out, own.asked, known
}

func renamed(o output, name string) output {
	o.PartSpec = proto.CloneOf(o.PartSpec)
	o.Name = name
	return o
}

func optional(o output) output {
	o.PartSpec = proto.CloneOf(o.PartSpec)
	o.Optional = true
	return o
}

// joined returns what the branches of a parallel block give together.
func (c *checker) joined(p *pipeline.Parallel, given [][]output, field string) []output {
	out := []output{}
	by := map[string]string{}
	for i, name := range slices.Sorted(maps.Keys(p.Branches)) {
		branch := p.Branches[name]
		for _, o := range given[i] {
			if other, isTwice := by[o.GetName()]; isTwice {
				c.report(requestsFail, fmt.Sprintf("%s.parallel.branches.%s", field, name), "the branches %s and %s both give a part %s; rename one with give", other, name, o.GetName())
				continue
			}
			by[o.GetName()] = name
			if branch.Optional || p.Quorum > 0 && branch.Missing == nil {
				o = optional(o)
			}
			out = append(out, o)
		}
	}
	return out
}

// either returns what one of several lists gives: what not all give is optional.
func (c *checker) either(s *pipeline.Step, given [][]output, field string) []output {
	out := []output{}
	for i, one := range given {
		for _, o := range one {
			at := slices.IndexFunc(out, func(other output) bool { return other.GetName() == o.GetName() })
			switch {
			case at < 0 && i == 0:
				out = append(out, o)
			case at < 0:
				out = append(out, optional(o))
			case !fits(out[at], o.PartSpec, stagev1.BatchAxis_BATCH_AXIS_UNSPECIFIED):
				c.report(requestsFail, field, "one branch of %s gives %s, and another %s", s.Name, describe(out[at].PartSpec), describe(o.PartSpec))
			}
		}
		for k, o := range out {
			if i > 0 && !slices.ContainsFunc(one, func(other output) bool { return other.GetName() == o.GetName() }) {
				out[k] = optional(o)
			}
		}
	}
	return out
}

// condition checks the part of a predicate.
func (c *checker) condition(p *pipeline.Predicate, field string) {
	kept := c.kept[p.Part]
	if p.Part != "" && !c.lost && !c.gives(p.Part) {
		c.add(Input{PartSpec: &stagev1.PartSpec{Name: p.Part, Optional: true}})
	}
	if p.Part == "" || len(kept) == 0 {
		return // a caller may send it
	}
	t := kept[0].GetTensor()
	switch {
	case t == nil || p.Any || p.All || p.Index != nil || p.Exists != nil:
	case slices.ContainsFunc(t.GetShape(), func(n int64) bool { return n > 1 }):
		c.report(requestsFail, field, "%s has several elements, so the condition needs any, all or index", describe(kept[0].PartSpec))
	}
}

// mapping checks a map. Its items are the elements of axis 0, and what they give is stacked.
func (c *checker) mapping(s *pipeline.Step, field string, depth int) {
	items, known := []output{}, true
	for _, name := range slices.Sorted(maps.Keys(s.Map.Over)) {
		kept := c.kept[s.Map.Over[name]]
		if len(kept) == 0 {
			known = false // a caller may send it
			continue
		}
		t := kept[0].GetTensor()
		if t == nil || len(t.GetShape()) == 0 {
			c.report(requestsFail, field+".map.over."+name, "%s has no items: map is for tensors with at least one axis", describe(kept[0].PartSpec))
			known = false
			continue
		}
		item := renamed(kept[0], name)
		item.GetTensor().Shape = t.GetShape()[1:]
		items = append(items, item)
	}
	own := *c
	own.kept = maps.Clone(c.kept)
	if !known {
		items = nil
	}
	own.give(items)
	own.lost = c.lost
	given, asked, isKnown := own.list(s.Lists()[0], field, depth)
	c.addItems(s.Map, asked)
	if !isKnown {
		c.give(nil)
		return
	}
	out := []output{}
	for _, o := range given {
		t := o.GetTensor()
		if t == nil {
			c.report(requestsFail, field+".map", "an item gives %s, and only tensors can be stacked", describe(o.PartSpec))
			continue
		}
		stacked := renamed(o, o.GetName())
		shape := t.GetShape()
		if o.rowless && len(shape) > 0 {
			shape = shape[1:]
		}
		stacked.GetTensor().Shape = append([]int64{-1}, shape...)
		stacked.rowless = false
		out = append(out, stacked)
	}
	if s.Map.Indices != "" {
		out = append(out, output{step: s.Name, PartSpec: &stagev1.PartSpec{
			Name: s.Map.Indices, Body: &stagev1.PartSpec_Tensor{Tensor: &stagev1.TensorSpec{Datatype: "INT64", Shape: []int64{-1}}},
		}})
	}
	c.give(out)
}
