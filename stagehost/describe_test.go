package stagehost_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// text is a spec of one input of text, with that description and those examples.
func text(description string, examples ...string) runner.Spec {
	out := runner.Spec{Inputs: []runner.PartSpec{{Name: "text", ContentTypes: []string{"text/plain"}, Description: description}}}
	for i, example := range examples {
		out.Examples = append(out.Examples, runner.Example{
			Name: fmt.Sprint(i), Inputs: []payload.Part{payload.OfBlob("text", "text/plain", []byte(example))},
		})
	}
	return out
}

func TestPublishedSpecKeepsTextsThatFit(t *testing.T) {
	t.Parallel()
	large := strings.Repeat("x", 4<<10)
	for name, row := range map[string]struct {
		spec        runner.Spec
		description string
		examples    string
	}{
		"all":                   {text("a review", "good", "bad"), "a review", "01"},
		"none":                  {text(""), "", ""},
		"a large example":       {text("a review", large, "bad"), "a review", "1"},
		"a large description":   {text(large+"x", "good"), "", "0"},
		"descriptions go first": {text(large, "good"), large, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			spec, _ := stagehost.Description{Spec: row.spec}.Published()
			var examples string
			for _, example := range spec.GetExamples() {
				examples += example.GetName()
			}
			if got := spec.GetInputs()[0]; got.GetDescription() != row.description || examples != row.examples {
				t.Errorf("got %d bytes of description and the examples %q", len(got.GetDescription()), examples)
			}
			if size := proto.Size(spec); size > 5<<10 {
				t.Errorf("it has %d bytes", size)
			}
		})
	}
}

func described(schema string, content ...string) stagehost.Description {
	return stagehost.Description{Spec: runner.Spec{Inputs: []runner.PartSpec{
		{Name: "order", ContentTypes: content, Schema: json.RawMessage(schema), Description: "an order"},
	}}}
}

func TestLargeSpecIsPublishedWithoutSchemas(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 64<<10)
	small, _ := described(`{"type":"object"}`, "application/json").Published()
	if part := small.GetInputs()[0]; part.GetSchema() != `{"type":"object"}` {
		t.Errorf("a small one is %v", part)
	}
	large, _ := described(`{"title":"`+long+`"}`, "application/json").Published()
	if len(large.GetInputs()) != 1 || large.GetInputs()[0].GetSchema() != "" || large.GetInputs()[0].GetBlob().GetContentTypes()[0] != "application/json" {
		t.Error("a large schema takes its spec along")
	}
	if huge, limits := described("{}", "application/"+long).Published(); huge != nil || limits == nil {
		t.Error("a spec that is too large by itself is published")
	}
}
