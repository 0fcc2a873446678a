package stagehost_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// priceSchema is what an order looks like.
const priceSchema = `{"type":"object","required":["price"],"properties":{"price":{"type":"number"}}}`

func order(contentType, text string) []payload.Part {
	return []payload.Part{payload.OfBlob("order", contentType, []byte(text))}
}

func orderSpec(text string) runner.PartSpec {
	return runner.PartSpec{Name: "order", ContentTypes: []string{"application/json"}, Schema: json.RawMessage(text)}
}

// echoOf answers with what came, and counts it.
func echoOf(spec runner.Spec, ran *atomic.Int32) runner.Runner {
	return inproc.Each(inproc.Settings{Spec: spec}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
		ran.Add(1)
		return item.Inputs, nil
	})
}

func saying(inputs, outputs []runner.PartSpec) func(*stagehost.Settings) {
	return func(s *stagehost.Settings) { s.Inputs, s.Outputs = inputs, outputs }
}

func TestInputAgainstItsSchemaFailsAlone(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		var ran atomic.Int32
		b.host(echoOf(runner.Spec{Inputs: []runner.PartSpec{orderSpec(priceSchema)}}, &ran), together(2))
		good := b.askParts(order("application/json", `{"price":1}`))
		bad := b.askParts(order("application/json", `{"price":"1"}`))
		none := b.askParts(order("application/json", `{`))
		other := b.askParts(order("application/json", `{"price":2}`))
		if f := bad.fault(fault.SchemaViolation); f.Stage != string(stage) || len(f.Violations) != 1 || f.Violations[0].Field != "inputs.order.price" {
			t.Errorf("got %+v", f)
		}
		if f := none.fault(fault.InvalidInput); len(f.Violations) != 1 || f.Violations[0].Field != "inputs.order" {
			t.Errorf("got %+v", f)
		}
		if got := first(good.output().Parts) + first(other.output().Parts); got != `{"price":1}{"price":2}` {
			t.Errorf("the others are %s", got)
		}
		if n := ran.Load(); n != 2 {
			t.Errorf("%d items ran", n)
		}
		b.emptied()
	})
}

func TestOutputAgainstItsSchemaFailsAlone(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		var ran atomic.Int32
		b.host(echoOf(runner.Spec{Outputs: []runner.PartSpec{orderSpec(priceSchema)}}, &ran), together(2))
		bad, good := b.askParts(order("application/json", `{"price":[]}`)), b.askParts(order("application/json", `{"price":1}`))
		if f := bad.fault(fault.RunnerOutputInvalid); len(f.Violations) != 1 || f.Violations[0].Field != "outputs.order.price" {
			t.Errorf("got %+v", f)
		}
		good.output()
		b.emptied()
	})
}

func TestMessagePackReachesARunnerOfJSONAsJSON(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		var ran atomic.Int32
		b.host(echoOf(runner.Spec{Inputs: []runner.PartSpec{orderSpec(priceSchema)}}, &ran))
		packed, err := msgpack.AppendJSON(nil, []byte(`{"price":1.5}`))
		if err != nil {
			t.Fatal(err)
		}
		got := b.askParts(order("application/msgpack", string(packed))).output().Parts[0].Blob
		if string(got.Data) != `{"price":1.5}` || got.ContentType != "application/json" {
			t.Errorf("it got %q of %s", got.Data, got.ContentType)
		}
		b.emptied()
	})
}

func TestChunkAgainstItsSchemaEndsTheReply(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		spec := runner.Spec{Stream: true, Outputs: []runner.PartSpec{orderSpec(priceSchema)}}
		b.host(inproc.New(inproc.Settings{Spec: spec}, func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
			text := string(batch.Items[0].Inputs[0].Blob.Data)
			if err := sink.Chunk(0, order("application/json", text)); err != nil {
				return err
			}
			// What ends the answer is all of it, in a form of its own.
			return sink.SetOutcome(0, runner.Output(order("application/json", "["+text+"]")...))
		}))
		b.askParts(order("application/json", `{"price":""}`)).fails(fault.RunnerOutputInvalid)
		c := b.askParts(order("application/json", `{"price":1}`))
		if chunk := c.next(); chunk.Terminal() || first(chunk.Parts) != `{"price":1}` {
			t.Errorf("the chunk is %+v", chunk)
		}
		if end := c.output(); first(end.Parts) != `[{"price":1}]` {
			t.Errorf("the end is %+v", end)
		}
		b.emptied()
	})
}

func TestStageSpecIsCheckedAndDescribed(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	var ran atomic.Int32
	h := b.host(echoOf(runner.Spec{}, &ran), saying([]runner.PartSpec{orderSpec(priceSchema)}, nil))
	if got := h.Describe().Spec.Inputs; len(got) != 1 || string(got[0].Schema) != priceSchema {
		t.Errorf("it is described as %+v", got)
	}
	b.askParts(order("application/json", `[]`)).fails(fault.SchemaViolation)
	b.askParts(order("image/png", `[]`)).fails(fault.UnsupportedMedia)
	b.emptied()
}

func TestRunnerAgainstTheStageSpecIsStopped(t *testing.T) {
	t.Parallel()
	x := runner.PartSpec{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1}}
	for name, test := range map[string]struct {
		spec runner.Spec
		said []runner.PartSpec
		want string
	}{
		"a contradiction":          {runner.Spec{Inputs: []runner.PartSpec{x}}, []runner.PartSpec{orderSpec("")}, `inputs[0].name: the runner has no "order"; it has x`},
		"a schema of the runner's": {runner.Spec{Outputs: []runner.PartSpec{orderSpec(`{"type":"money"}`)}}, nil, `outputs[0].schema: of "order": it is not a JSON Schema: schema.type`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			stopped := make(chan struct{})
			h := b.start(inproc.New(inproc.Settings{Spec: test.spec, Teardown: func() error { close(stopped); return nil }}, nil), saying(test.said, nil))
			if err := h.fails(); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("stage %s: %s", stage, test.want)) {
				t.Errorf("got %v; want %s", err, test.want)
			}
			select {
			case <-stopped:
			default:
				t.Error("the runner was not stopped")
			}
		})
	}
}

func TestStageSpecIsCheckedBeforeTheStart(t *testing.T) {
	t.Parallel()
	var ran atomic.Int32
	s := stagehost.Settings{Mesh: mesh, Stage: stage, Host: "h", Runner: echoOf(runner.Spec{}, &ran)}
	s.Batch.MaxSize = 1
	s.Inputs = []runner.PartSpec{orderSpec(`{"type":1}`)}
	s.Outputs = []runner.PartSpec{{Name: "y", Datatype: "FLOAT"}}
	err := s.Validate()
	for _, want := range []string{`inputs[0].schema: of "order"`, "outputs[0].datatype: "} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v; want %s", err, want)
		}
	}
}
