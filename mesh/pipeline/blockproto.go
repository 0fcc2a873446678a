package pipeline

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

func stepsToProto(steps []Step) []*meshv1.PipelineStep {
	out := make([]*meshv1.PipelineStep, len(steps))
	for i, s := range steps {
		out[i] = &meshv1.PipelineStep{
			Name: string(s.Name), Stage: string(s.Stage), Model: s.Model.ToProto(),
			Parameters: s.Parameters.ToProto(), Inputs: s.Inputs, Locked: s.Locked,
		}
		s.Block.toProto(out[i])
	}
	return out
}

func (b *Block) toProto(out *meshv1.PipelineStep) {
	switch {
	case b.Parallel != nil:
		out.Block = &meshv1.PipelineStep_Parallel{Parallel: &meshv1.ParallelBlock{
			Branches: branchesToProto(b.Parallel.Branches), Quorum: uint32(b.Parallel.Quorum), Within: spanToProto(b.Parallel.Within),
		}}
	case b.Map != nil:
		out.Block = &meshv1.PipelineStep_Map{Map: &meshv1.MapBlock{
			Over: b.Map.Over, MaxItems: uint32(b.Map.MaxItems), Steps: stepsToProto(b.Map.Steps), Give: b.Map.Give,
			OnItemError: string(b.Map.OnItemError), Fill: constantsToProto(b.Map.Fill), Indices: b.Map.Indices,
		}}
	case b.Switch != nil:
		cases := make([]*meshv1.SwitchCase, len(b.Switch))
		for i, c := range b.Switch {
			cases[i] = &meshv1.SwitchCase{When: c.When.toProto(), Steps: stepsToProto(c.Steps), Give: c.Give}
			if c.Else != nil {
				cases[i].Steps = stepsToProto(c.Else)
			}
			if c.Fail != nil {
				cases[i].Fail = &meshv1.SwitchFailure{Reason: string(c.Fail.Reason), Message: c.Fail.Message}
			}
		}
		out.Block = &meshv1.PipelineStep_Switch{Switch: &meshv1.SwitchBlock{Cases: cases}}
	case b.Split != nil:
		out.Block = &meshv1.PipelineStep_Split{Split: &meshv1.SplitBlock{Branches: branchesToProto(b.Split.Branches), ByMetadata: b.Split.ByMetadata}}
	case b.Try != nil:
		try := &meshv1.TryBlock{Steps: stepsToProto(b.Try.Steps), Within: spanToProto(b.Try.Within), Else: stepsToProto(b.Try.Else)}
		for _, reason := range b.Try.On {
			try.On = append(try.On, string(reason))
		}
		out.Block = &meshv1.PipelineStep_Try{Try: try}
	}
}

// spanToProto returns nil for 0.
func spanToProto(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

func branchesToProto(branches map[string]Branch) map[string]*meshv1.PipelineBranch {
	out := make(map[string]*meshv1.PipelineBranch, len(branches))
	for name, b := range branches {
		out[name] = &meshv1.PipelineBranch{Steps: stepsToProto(b.Steps), Give: b.Give, Missing: constantsToProto(b.Missing), Optional: b.Optional, Weight: uint32(b.Weight)}
	}
	return out
}

func constantsToProto(constants map[string]Constant) map[string]*meshv1.ConstantTensor {
	out := make(map[string]*meshv1.ConstantTensor, len(constants))
	for name, c := range constants {
		out[name] = &meshv1.ConstantTensor{Datatype: string(c.Datatype), Shape: c.shape(), Data: valuesToProto(c.Data)}
	}
	return out
}

func valuesToProto(values []payload.Value) []*inferencev1.Value {
	out := make([]*inferencev1.Value, len(values))
	for i, v := range values {
		out[i] = v.ToProto()
	}
	return out
}

func (p *Predicate) toProto() *meshv1.Predicate {
	if p == nil {
		return nil
	}
	out := &meshv1.Predicate{In: valuesToProto(p.In), Above: p.Above, Below: p.Below, Matches: p.Matches, Exists: p.Exists, Any: p.Any, All: p.All, Index: p.Index}
	if p.Equals != nil {
		out.Equals = p.Equals.ToProto()
	}
	switch {
	case p.Part != "":
		out.Subject = &meshv1.Predicate_Part{Part: p.Part}
	case p.Parameter != "":
		out.Subject = &meshv1.Predicate_Parameter{Parameter: p.Parameter}
	case p.Metadata != "":
		out.Subject = &meshv1.Predicate_Metadata{Metadata: p.Metadata}
	case p.Tenant:
		out.Subject = &meshv1.Predicate_Tenant{Tenant: true}
	}
	return out
}

// stepsFromProto converts steps at a depth. What is nested too deep is an error before all of it is
// converted.
func stepsFromProto(in []*meshv1.PipelineStep, depth int) (out []Step, err error) {
	if depth > MaxDepth {
		return nil, fmt.Errorf("blocks nest deeper than %d", MaxDepth)
	}
	for i, step := range in {
		s, err := stepFromProto(step, depth)
		if err != nil {
			return nil, under(fmt.Sprintf("steps[%d]", i), err)
		}
		out = append(out, s)
	}
	return out, nil
}

func blockFromProto(in *meshv1.PipelineStep, depth int) (out Block, err error) {
	switch b := in.GetBlock().(type) {
	case *meshv1.PipelineStep_Parallel:
		out.Parallel = &Parallel{Quorum: int(b.Parallel.GetQuorum())}
		if out.Parallel.Within, err = spanFromProto(b.Parallel.GetWithin()); err == nil {
			out.Parallel.Branches, err = branchesFromProto(b.Parallel.GetBranches(), depth)
		}
	case *meshv1.PipelineStep_Map:
		m := &Map{Over: b.Map.GetOver(), MaxItems: int(b.Map.GetMaxItems()), Give: b.Map.GetGive(), OnItemError: ItemError(b.Map.GetOnItemError()), Indices: b.Map.GetIndices()}
		out.Map = m
		if m.Fill, err = constantsFromProto(b.Map.GetFill()); err == nil {
			m.Steps, err = stepsFromProto(b.Map.GetSteps(), depth+1)
		}
	case *meshv1.PipelineStep_Switch:
		out.Switch, err = casesFromProto(b.Switch.GetCases(), depth)
	case *meshv1.PipelineStep_Split:
		out.Split = &Split{ByMetadata: b.Split.GetByMetadata()}
		out.Split.Branches, err = branchesFromProto(b.Split.GetBranches(), depth)
	case *meshv1.PipelineStep_Try:
		t := &Try{}
		out.Try = t
		for _, reason := range b.Try.GetOn() {
			t.On = append(t.On, fault.Reason(reason))
		}
		if t.Within, err = spanFromProto(b.Try.GetWithin()); err != nil {
			return out, err
		}
		if t.Steps, err = stepsFromProto(b.Try.GetSteps(), depth+1); err == nil {
			t.Else, err = stepsFromProto(b.Try.GetElse(), depth+1)
		}
	}
	return out, err
}

func casesFromProto(in []*meshv1.SwitchCase, depth int) ([]Case, error) {
	out := make([]Case, len(in))
	for i, c := range in {
		steps, err := stepsFromProto(c.GetSteps(), depth+1)
		if err != nil {
			return nil, under(fmt.Sprintf("switch[%d]", i), err)
		}
		out[i] = Case{Steps: steps, Give: c.GetGive()}
		if f := c.GetFail(); f != nil {
			out[i].Fail = &Failure{fault.Reason(f.GetReason()), f.GetMessage()}
		}
		if out[i].When, err = predicateFromProto(c.GetWhen()); err != nil {
			return nil, under(fmt.Sprintf("switch[%d].when", i), err)
		}
		if i == len(in)-1 && out[i].When == nil {
			out[i].Steps, out[i].Else = nil, append([]Step{}, steps...)
		}
	}
	return out, nil
}

func branchesFromProto(in map[string]*meshv1.PipelineBranch, depth int) (map[string]Branch, error) {
	out := make(map[string]Branch, len(in))
	for name, b := range in {
		steps, err := stepsFromProto(b.GetSteps(), depth+1)
		if err != nil {
			return nil, under("branches."+name, err)
		}
		missing, err := constantsFromProto(b.GetMissing())
		if err != nil {
			return nil, under("branches."+name+".missing", err)
		}
		out[name] = Branch{Steps: steps, Give: b.GetGive(), Missing: missing, Optional: b.GetOptional(), Weight: int(b.GetWeight())}
	}
	return out, nil
}

func constantsFromProto(in map[string]*meshv1.ConstantTensor) (map[string]Constant, error) {
	if len(in) == 0 {
		return nil, nil
	}
	out := make(map[string]Constant, len(in))
	for name, c := range in {
		data, err := valuesFromProto(c.GetData())
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		constant := Constant{Datatype: tensor.Datatype(c.GetDatatype()), Data: data}
		if !slices.Equal(c.GetShape(), constant.shape()) {
			constant.Shape = append([]int64{}, c.GetShape()...)
		}
		out[name] = constant
	}
	return out, nil
}

func valuesFromProto(in []*inferencev1.Value) (out []payload.Value, err error) {
	for _, v := range in {
		value, err := payload.ValueFromProto(v)
		if err != nil {
			return nil, err
		}
		out = append(out, value)
	}
	return out, nil
}

func predicateFromProto(in *meshv1.Predicate) (*Predicate, error) {
	if in == nil {
		return nil, nil
	}
	out := &Predicate{
		Part: in.GetPart(), Parameter: in.GetParameter(), Metadata: in.GetMetadata(), Tenant: in.GetTenant(),
		Above: in.Above, Below: in.Below, Matches: in.GetMatches(), Exists: in.Exists, Any: in.GetAny(), All: in.GetAll(), Index: in.Index,
	}
	var err error
	if out.In, err = valuesFromProto(in.GetIn()); err != nil {
		return nil, err
	}
	if in.GetEquals() != nil {
		value, err := payload.ValueFromProto(in.GetEquals())
		if err != nil {
			return nil, err
		}
		out.Equals = &value
	}
	return out, nil
}

func spanFromProto(d *durationpb.Duration) (time.Duration, error) {
	if d == nil {
		return 0, nil
	}
	if err := d.CheckValid(); err != nil {
		return 0, fmt.Errorf("within: %w", err)
	}
	return d.AsDuration(), nil
}
