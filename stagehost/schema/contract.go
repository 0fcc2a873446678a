package schema

import (
	"errors"
	"fmt"

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

// Fit calls the function Fit and validates JSON against its schemas.
func (c *Contract) Fit(parts, kept []payload.Part, rename map[string]string) (Fitted, error) {
	fitted, err := Fit(c.spec, parts, kept, rename)
	if err != nil || c.inputs == nil {
		return fitted, err
	}
	for _, part := range fitted.Inputs {
		broken, err := c.inputs.check("inputs."+part.Name, part)
		if f, ok := errors.AsType[*fault.Fault](err); ok {
			return Fitted{}, f
		}
		if err != nil {
			return Fitted{}, violation(part.Name, err)
		}
		if len(broken) > 0 {
			return Fitted{}, violationFault(fault.SchemaViolation, fmt.Sprintf("input %q", part.Name), broken)
		}
	}
	return fitted, nil
}

// Outputs calls the function Outputs and validates JSON against its schemas. It does
// not validate the final outputs of a chunked response again: Chunk has validated the
// chunks.
func (c *Contract) Outputs(parts []payload.Part, f Fitted) ([]payload.Part, error) {
	if c.spec.Stream {
		if err := last(c.spec, parts); err != nil {
			return nil, err
		}
		return parts, nil
	}
	if err := c.checkOutputs(parts); err != nil {
		return nil, err
	}
	return Outputs(c.spec, parts, f)
}

// Chunk validates a chunk of a response against the spec, and its JSON against its
// schemas.
func (c *Contract) Chunk(parts []payload.Part) error {
	if err := Travels(parts); err != nil {
		return err
	}
	for _, want := range c.spec.Outputs {
		if got, ok := payload.Find(parts, want.Name); ok {
			if err := checkOutputPart(want, got); err != nil {
				return err
			}
		}
	}
	return c.checkOutputs(parts)
}

func (c *Contract) checkOutputs(parts []payload.Part) error {
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

// last checks that the final outputs of a chunked response can be read.
func last(spec runner.Spec, parts []payload.Part) error {
	if err := Travels(parts); err != nil {
		return err
	}
	for _, want := range spec.Outputs {
		if got, ok := payload.Find(parts, want.Name); ok {
			if err := checkKind(want, got); err != nil {
				return err
			}
		}
	}
	return nil
}

// violationFault returns the fault of JSON that violates its schema.
func violationFault(reason fault.Reason, what string, broken []violated) *fault.Fault {
	first := broken[0]
	out := fault.Newf(reason, "%s breaks its schema: %s: %s", what, first.Field, first.Description)
	out.Violations = broken
	return out
}
