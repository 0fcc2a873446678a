package schema

import (
	"errors"
	"fmt"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Contract is a spec whose JSON Schemas are compiled.
type Contract struct {
	spec            runner.Spec
	inputs, outputs documents
}

// Compile returns the contract of a spec. An error names the part and the place in its
// schema.
func Compile(spec runner.Spec) (*Contract, error) {
	inputs, err := compileAll("inputs", spec.Inputs)
	if err != nil {
		return nil, err
	}
	outputs, err := compileAll("outputs", spec.Outputs)
	if err != nil {
		return nil, err
	}
	return &Contract{spec: spec, inputs: inputs, outputs: outputs}, nil
}

// Spec returns the spec of the contract.
func (c *Contract) Spec() runner.Spec { return c.spec }

// Outputs validates a runner's outputs for one item, and returns them in the rank of
// the inputs. Of the final outputs of a chunked response it validates only the kinds: Chunk
// has validated the chunks.
func (c *Contract) Outputs(parts []payload.Part, f Fitted) ([]payload.Part, error) {
	if c.spec.Stream {
		if err := c.eachOutput(parts, checkKind); err != nil {
			return nil, err
		}
		return parts, nil
	}
	if err := c.checkDocuments(parts); err != nil {
		return nil, err
	}
	if err := c.eachOutput(parts, checkOutput); err != nil {
		return nil, err
	}
	for _, want := range c.spec.Outputs {
		got, ok := payload.Find(parts, want.Name)
		if !ok && !want.Optional {
			return nil, badOutput("output %q is missing", want.Name)
		}
		if ok && want.IsTensor() && c.spec.BatchAxis == runner.BatchRows && got.Tensor.Rows() != int64(f.Rows) {
			return nil, badOutput("output %q has %d rows for an item of %d", want.Name, got.Tensor.Rows(), f.Rows)
		}
	}
	if !f.Lifted {
		return parts, nil
	}
	return dropRowAxis(parts), nil
}

// Chunk validates a chunk of a response against the spec, and its JSON against its
// schemas.
func (c *Contract) Chunk(parts []payload.Part) error {
	if err := c.eachOutput(parts, checkOutput); err != nil {
		return err
	}
	return c.checkDocuments(parts)
}

// eachOutput checks that receivers can read the outputs, or a chunk of them, and checks the
// ones that the spec names. The stage can still report an error here; a receiver cannot.
func (c *Contract) eachOutput(parts []payload.Part, check func(want runner.PartSpec, got payload.Part) error) error {
	if err := payload.Validate("outputs", parts); err != nil {
		return badOutput("%s", fault.From(err).Message)
	}
	for _, want := range c.spec.Outputs {
		if got, ok := payload.Find(parts, want.Name); ok {
			if err := check(want, got); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkDocuments validates JSON outputs against their schemas.
func (c *Contract) checkDocuments(parts []payload.Part) error {
	if c.outputs == nil {
		return nil
	}
	for _, part := range parts {
		broken, err := c.outputs.check("outputs."+part.Name, part)
		if f, ok := errors.AsType[*fault.Fault](err); ok {
			return f
		}
		if err != nil {
			return badOutput("output %q %s", part.Name, err).WithViolation("outputs."+part.Name, "%s", err)
		}
		if len(broken) > 0 {
			return violationFault(fault.RunnerOutputInvalid, fmt.Sprintf("output %q", part.Name), broken)
		}
	}
	return nil
}

func badOutput(format string, args ...any) *fault.Fault {
	return fault.Newf(fault.RunnerOutputInvalid, format, args...)
}

// violationFault returns the fault of JSON that violates its schema.
func violationFault(reason fault.Reason, what string, broken []fault.Violation) *fault.Fault {
	first := broken[0]
	out := fault.Newf(reason, "%s breaks its schema: %s: %s", what, first.Field, first.Description)
	out.Violations = broken
	return out
}

// checkOutput validates an output against its spec, except the number of its rows.
func checkOutput(want runner.PartSpec, got payload.Part) error {
	if err := checkKind(want, got); err != nil {
		return err
	}
	if want.IsTensor() && !matches(got.Tensor.Shape, want.Shape) {
		return badOutput("output %q has shape %s, the stage declares %s", want.Name, shape(got.Tensor.Shape), shape(want.Shape))
	}
	return nil
}

// checkKind validates the kind and the datatype of an output.
func checkKind(want runner.PartSpec, got payload.Part) error {
	switch {
	case want.IsTensor() != (got.Tensor != nil):
		return badOutput("output %q is not of the kind that the stage declares", want.Name)
	case want.IsTensor() && got.Tensor.Datatype != want.Datatype:
		return badOutput("output %q is %s, the stage declares %s", want.Name, got.Tensor.Datatype, want.Datatype)
	}
	return nil
}

// dropRowAxis removes axis 0 from tensors of one row.
func dropRowAxis(parts []payload.Part) []payload.Part {
	out := append([]payload.Part(nil), parts...)
	for i, p := range out {
		if p.Tensor == nil || len(p.Tensor.Shape) == 0 || p.Tensor.Shape[0] != 1 {
			continue
		}
		row := tensor.Tensor{Datatype: p.Tensor.Datatype, Shape: p.Tensor.Shape[1:], Raw: p.Tensor.Raw}
		out[i].Tensor = &row
	}
	return out
}
