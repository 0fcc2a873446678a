package pipeline_test

import (
	"fmt"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// An error names the pipeline, the step and the key.
func ExamplePipeline_Validate() {
	p := pipeline.Pipeline{Name: "digits", Steps: []pipeline.Step{
		{Name: "decode", Stage: "decode"},
		{Name: "classify", Stage: "classify", Inputs: map[string]string{"x": "pixels"}},
	}}
	fmt.Println(p.Validate())

	p.Steps[1].Name = "decode"
	fmt.Println(p.Validate())
	// Output:
	// <nil>
	// pipeline digits: steps[1]: a step named decode is there already
}
