package importtriton

import (
	"maps"
	"slices"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// node is a step of an ensemble. in and out map names of the model to tensors of the ensemble; an
// output that the ensemble does not use is "".
type node struct {
	*model
	in, out map[string]string
	step    pipeline.Step
}

// nodes returns the steps of an ensemble.
func (r *repository) nodes(m *model, steps names) (out []node, err error) {
	for _, s := range m.EnsembleScheduling.Step {
		target, isKnown := r.models[s.ModelName]
		switch {
		case !isKnown:
			return nil, m.errorf(s.ModelName, "the repository has no model %q; add its folder, or change model_name", s.ModelName)
		case target.EnsembleScheduling != nil:
			return nil, m.errorf(s.ModelName, "%s is an ensemble, and pipelines do not nest; put its steps here instead", s.ModelName)
		}
		if s.ModelVersion > 0 && s.ModelVersion != target.version {
			target.others = append(target.others, s.ModelVersion)
		}
		n := node{model: target, in: map[string]string{}, out: map[string]string{}}
		n.step = pipeline.Step{Name: pipeline.StepName(steps.add(s.ModelName)), Stage: pipeline.StageName(target.stage)}
		if n.step.Stage == "" {
			n.step.Stage, n.step.Model.Model = pipeline.StageName(r.server), s.ModelName
		}
		for _, output := range target.Output {
			n.out[output.Name] = ""
		}
		for _, p := range s.OutputMap {
			n.out[p.Key] = p.Value
		}
		for _, p := range s.InputMap {
			n.in[p.Key] = p.Value
		}
		out = append(out, n)
	}
	return out, nil
}

// levels returns the steps by depth: each reads what callers send and what earlier levels make.
func levels(m *model, nodes []node) (out [][]node, err error) {
	makers := map[string]int{}
	for _, input := range m.Input {
		makers[input.Name] = -1
	}
	for i, n := range nodes {
		for _, tensor := range slices.Sorted(maps.Values(n.out)) {
			if _, isMade := makers[tensor]; isMade && tensor != "" {
				return nil, m.errorf(tensor, "the tensor %q is made twice; give that of %s another name", tensor, n.name)
			}
			makers[tensor] = i
		}
	}
	depths := make([]int, len(nodes))
	for round, isSettled := 0, false; !isSettled; round++ {
		isSettled = true
		for i, n := range nodes {
			for _, tensor := range slices.Sorted(maps.Values(n.in)) {
				switch maker, isMade := makers[tensor]; {
				case !isMade:
					return nil, m.missing(tensor)
				case maker >= 0 && depths[maker] >= depths[i] && round > len(nodes):
					return nil, m.errorf(n.name, "a cycle: the steps %s and %s wait for each other's tensors; an ensemble has none", nodes[maker].name, n.name)
				case maker >= 0 && depths[maker] >= depths[i]:
					depths[i], isSettled = depths[maker]+1, false
				}
			}
		}
	}
	out = make([][]node, slices.Max(depths)+1)
	for i, n := range nodes {
		out[depths[i]] = append(out[depths[i]], n)
	}
	for _, output := range m.Output {
		if _, isMade := makers[output.Name]; !isMade {
			return nil, m.missing(output.Name)
		}
	}
	return out, nil
}

func (m *model) missing(tensor string) error {
	return m.errorf(tensor, "no step makes the tensor %q, and it is no input of the ensemble; add it to an output_map, or change the name", tensor)
}

// pipeline returns the pipeline of an ensemble.
func (r *repository) pipeline(m *model) (p pipeline.Pipeline, err error) {
	steps := names{}
	if len(m.EnsembleScheduling.Step) == 0 || len(m.Output) == 0 {
		return p, m.errorf("ensemble", "an ensemble has steps in ensemble_scheduling, and outputs; add them")
	}
	all, err := r.nodes(m, steps)
	if err != nil {
		return p, err
	}
	ordered, err := levels(m, all)
	if err != nil {
		return p, err
	}
	p, isRight := build(m, ordered, maps.Clone(steps), false)
	if !isRight {
		p, _ = build(m, ordered, steps, true)
	}
	for _, n := range all {
		n.isInner = n.isInner || n.step.Name != p.Steps[len(p.Steps)-1].Name
	}
	return p, nil
}

// build returns the pipeline of the levels. A part has the name of the stage's output, or in a branch
// the name of the ensemble's tensor. isRight is false if a step would read another tensor of the same name.
// With renamed all parts have the names of tensors, which are unique.
func build(m *model, levels [][]node, steps names, renamed bool) (p pipeline.Pipeline, isRight bool) {
	// parts has the name of each tensor, tensors what each name stands for after the steps so far.
	parts, tensors, previous, answer := map[string]string{}, map[string]string{}, map[string]string{}, map[string]bool{}
	for _, input := range m.Input {
		parts[input.Name], tensors[input.Name], previous[input.Name] = input.Name, input.Name, input.Name
	}
	for _, output := range m.Output {
		answer[output.Name] = true
		p.Outputs = append(p.Outputs, output.Name)
	}
	p.Name, isRight = pipeline.Name(m.stage), true
	for i, level := range levels {
		isWrapped, block, given := renamed || len(level) > 1, pipeline.Parallel{Branches: map[string]pipeline.Branch{}}, map[string]string{}
		for _, n := range level {
			step, give := n.step, map[string]string{}
			step.Inputs = map[string]string{}
			for input, tensor := range n.in {
				part := parts[tensor]
				isRight = isRight && tensors[part] == tensor
				if part != input || step.Model.Model != "" { // models of a server declare no inputs
					step.Inputs[input] = part
				}
				if _, is := previous[part]; !is {
					p.Keep = append(p.Keep, part)
				}
			}
			for output, tensor := range n.out {
				if tensor != "" {
					give[tensor] = output
				}
				isWrapped = isWrapped || answer[tensor] && tensor != output
			}
			block.Branches[string(step.Name)] = pipeline.Branch{Steps: []pipeline.Step{step}, Give: give}
		}
		only := level[0]
		// Without blocks a pipeline answers with all outputs of its last step.
		isAnswer := maps.EqualFunc(only.out, answer, func(tensor string, _ bool) bool { return tensor != "" })
		if i == len(levels)-1 && !p.HasBlocks() && !isAnswer || isWrapped {
			name := "parallel"
			if len(level) == 1 {
				name = "rename-" + only.name
			}
			p.Steps = append(p.Steps, pipeline.Step{Name: pipeline.StepName(steps.add(name)), Block: pipeline.Block{Parallel: &block}})
			for _, branch := range block.Branches {
				for tensor := range branch.Give {
					given[tensor] = tensor
				}
			}
		} else {
			p.Steps = append(p.Steps, block.Branches[string(only.step.Name)].Steps...)
			given = only.out
		}
		for part, tensor := range given {
			parts[tensor], tensors[part] = part, tensor
		}
		previous = given
	}
	for output := range answer {
		isRight = isRight && tensors[output] == output
	}
	slices.Sort(p.Keep)
	if p.Keep = slices.Compact(p.Keep); p.HasBlocks() {
		p.Keep = nil
	} else {
		p.Outputs = nil
	}
	return p, isRight
}
