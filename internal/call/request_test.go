package call_test

import (
	"maps"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// The stage has no host: requests are rejected for what they are.
func TestInvalidRequestIsRejected(t *testing.T) {
	t.Parallel()
	const limit = 1 << 10
	b := newBed(t, func(s *call.Settings) { s.MaxPayload = limit })
	long := strings.Repeat("\u00e4\"", 100_000)
	one, two := payload.OfBlob("x", "text/plain", nil), payload.OfBlob("y", "text/plain", nil)
	numbers := make([]string, payload.MaxParts+1)
	for i := range numbers {
		numbers[i] = strconv.Itoa(i)
	}
	for name, test := range map[string]struct {
		request request.Request
		reason  fault.Reason
		want    string
	}{
		"no such pipeline":       {request.Request{Pipeline: long, Inputs: blob(nil)}, fault.UnknownPipeline, "there is no pipeline"},
		"no inputs":              {request.Request{}, fault.InvalidRequest, "inputs: at least one is required"},
		"inputs over the limit":  {request.Request{Inputs: blob(make([]byte, limit+1))}, fault.PayloadTooLarge, "gateway.max_payload is 1024"},
		"two inputs of one name": {request.Request{Inputs: []payload.Part{one, two, one}}, fault.InvalidInput, `named "x"`},
		"a tensor short of bytes": {
			request.Request{Inputs: []payload.Part{payload.OfTensor("x", tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{2}, Raw: make([]byte, 4)})}},
			fault.InvalidInput, "inputs.x",
		},
		"a number beyond FP64":   {request.Request{Inputs: []payload.Part{payload.OfBlob("x", "application/geo+json", []byte(`{"a": [1, -1e400]}`))}}, fault.InvalidInput, "inputs.x: the number -1e400 at byte 10"},
		"a number of 310 digits": {request.Request{Inputs: []payload.Part{payload.OfBlob("", "application/json", []byte(strings.Repeat("9", 310)))}}, fault.InvalidInput, "inputs[0]: the number 9999"},
		"a long name":            {request.Request{Inputs: []payload.Part{payload.OfBlob(long, "", nil)}}, fault.InvalidInput, "inputs[0]"},
		"an output twice":        {request.Request{Inputs: blob(nil), Outputs: []string{"a", long, long}}, fault.InvalidRequest, "is named twice"},
		"many outputs":           {request.Request{Inputs: blob(nil), Outputs: numbers}, fault.InvalidRequest, "outputs: 257 names"},
		"a long key":             {request.Request{Inputs: blob(nil), IdempotencyKey: strings.Repeat("k", request.MaxIdempotencyKey+1)}, fault.InvalidRequest, "at most 256"},
		"a model by two names":   {ofModel(payload.ModelRef{Model: long, Alias: "latest"}), fault.InvalidRequest, `the alias "latest"; name one`},
		"metadata not allowed":   {request.Request{Inputs: blob(nil), Metadata: map[string]string{long: ""}}, fault.InvalidRequest, "is not in gateway.metadata"},
		"an unknown step":        {request.Request{Inputs: blob(nil), Steps: map[pipeline.StepName]pipeline.StepOptions{pipeline.StepName(long): {}}}, fault.InvalidRequest, "no such step"},
		"a negative timeout":     {request.Request{Inputs: blob(nil), Timeout: -1}, fault.InvalidRequest, "negative"},
		"durability":             {request.Request{Inputs: blob(nil), Durability: pipeline.Durability(long)}, fault.NotSupported, "use memory"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if test.request.Pipeline == "" {
				test.request.Pipeline = whole
			}
			begin := time.Now()
			response, err := b.service.Infer(t.Context(), &test.request)
			f := wantFault(t, response, err, test.reason)
			if !strings.Contains(f.Message, test.want) || time.Since(begin) > atOnce {
				t.Errorf("%q after %s, want %q", f.Message, time.Since(begin), test.want)
			}
			const most = 1500
			texts := []string{f.Message}
			for _, v := range f.Violations {
				texts = append(texts, v.Field, v.Description)
			}
			for _, text := range texts {
				if len(text) > most {
					t.Errorf("%d bytes: %.100s", len(text), text)
				}
			}
		})
	}
}

func ofModel(ref payload.ModelRef) request.Request {
	return request.Request{Inputs: blob(nil), Steps: map[pipeline.StepName]pipeline.StepOptions{pipeline.StepName(stage): {Model: ref}}}
}

func TestTextThatIsNotUTF8IsInvalid(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.serves(b.echo)
	for name, edit := range map[string]func(*request.Request){
		"metadata":        func(r *request.Request) { r.Metadata = map[string]string{"known": "\xff"} },
		"idempotency key": func(r *request.Request) { r.IdempotencyKey = "\xff" },
		"model":           func(r *request.Request) { maps.Copy(r.Steps, ofModel(payload.ModelRef{Model: "\xff"}).Steps) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := ask("x")
			r.Steps = map[pipeline.StepName]pipeline.StepOptions{}
			edit(r)
			response, err := b.service.Infer(t.Context(), r)
			_ = wantFault(t, response, err, fault.InvalidRequest)
		})
	}
}
