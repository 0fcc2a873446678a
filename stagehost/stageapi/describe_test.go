package stageapi_test

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/stageapi"
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

func TestWhatIsPublishedHasTheWordsThatThereIsRoomFor(t *testing.T) {
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
			spec, _ := stageapi.Description{Spec: row.spec}.Published()
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

func TestASpecThatIsTooLargeWithoutItsWordsIsNotPublished(t *testing.T) {
	t.Parallel()
	spec := text("a review", "good")
	spec.Inputs[0].ContentTypes = []string{strings.Repeat("x", 64<<10)}
	if got, limits := (stageapi.Description{Spec: spec}).Published(); got != nil || limits == nil {
		t.Errorf("got %v, %v", got, limits)
	}
}
