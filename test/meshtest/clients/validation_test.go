package clients

import (
	"context"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

func TestWorkersValidateWithPydantic(t *testing.T) {
	t.Parallel()
	m, err := stagemesh.New(stagemesh.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	add(t, m, "person", python3(t, "person.py"))
	ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
	defer cancel()
	if err := m.Start(ctx); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Stop(); err != nil {
			t.Error(err)
		}
	}()
	greet := func(person string) (*request.Response, error) {
		return m.Infer(ctx, &request.Request{Pipeline: "person", Inputs: []payload.Part{payload.OfBlob("person", "application/json", []byte(person))}})
	}
	if got, err := greet(`{"name": "Ada", "age": 36}`); err != nil || string(got.Outputs[0].Blob.Data) != `"Hello Ada, 36"` {
		t.Errorf("%v, %v", got, err)
	}
	_, err = greet(`{"name": "Ada", "age": "old"}`)
	if f := fault.From(err); f.Reason != fault.SchemaViolation || !strings.HasPrefix(f.Message, "age: Input should be a valid integer") {
		t.Errorf("the fault is %v", err)
	}
}
