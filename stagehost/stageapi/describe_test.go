package stageapi_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/stageapi"
)

func described(schema string, content ...string) stageapi.Description {
	return stageapi.Description{Spec: runner.Spec{Inputs: []runner.PartSpec{
		{Name: "order", ContentTypes: content, Schema: json.RawMessage(schema), Description: "an order"},
	}}}
}

func TestASpecThatIsLargeIsPublishedWithoutItsSchemas(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 64<<10)
	small, _ := described(`{"type":"object"}`, "application/json").Published()
	if part := small.GetInputs()[0]; part.GetSchema() != `{"type":"object"}` || part.GetDescription() != "" {
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
