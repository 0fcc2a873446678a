package call

import (
	"math"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// full is a request that says everything.
func full() *Request {
	return &Request{
		Pipeline: "p", IdempotencyKey: "k", Timeout: time.Second, Priority: 1, Durability: pipeline.File,
		Inputs: []payload.Part{
			{Name: "a", Blob: payload.Blob{ContentType: "text/plain", Data: []byte("xy")}, Parameters: payload.Parameters{"p": payload.Int64(1)}},
			payload.OfTensor("b", tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{2, 1}, Raw: []byte("xy")}),
		},
		Parameters: payload.Parameters{"a": payload.Bool(true), "b": payload.Double(0.5), "c": payload.String("x")},
		Steps: map[string]StepOptions{
			"one": {Model: payload.ModelRef{Model: "m", Version: "1"}, Parameters: payload.Parameters{"d": payload.Uint64(math.MaxUint64)}},
			"two": {Model: payload.ModelRef{Alias: "x"}},
		},
		Metadata: map[string]string{"user": "u", "group": "g"},
		Outputs:  []string{"out"},
		Trace:    map[string]string{"traceparent": "x"},
	}
}

func TestTheDigestIsOfWhatDecidesTheAnswer(t *testing.T) {
	t.Parallel()
	same := digest(full())
	for range 100 { // maps have no order
		if digest(full()) != same {
			t.Fatal("one request has two digests")
		}
	}
	for name, edit := range map[string]func(*Request){
		"outputs":    func(r *Request) { r.Outputs = nil },
		"timeout":    func(r *Request) { r.Timeout = 0 },
		"priority":   func(r *Request) { r.Priority = 0 },
		"durability": func(r *Request) { r.Durability = pipeline.Memory },
		"trace":      func(r *Request) { r.Trace = nil },
	} {
		r := full()
		edit(r)
		if digest(r) != same {
			t.Errorf("%s: another digest", name)
		}
	}
	seen := map[[32]byte]string{same: "the whole"}
	for name, edit := range map[string]func(*Request){
		"no input":              func(r *Request) { r.Inputs = nil },
		"one input":             func(r *Request) { r.Inputs = r.Inputs[:1] },
		"inputs the other way":  func(r *Request) { r.Inputs[0], r.Inputs[1] = r.Inputs[1], r.Inputs[0] },
		"another name":          func(r *Request) { r.Inputs[0].Name = "b" },
		"other bytes":           func(r *Request) { r.Inputs[0].Blob.Data = []byte("xz") },
		"text cut elsewhere":    func(r *Request) { r.Inputs[0].Blob = payload.Blob{ContentType: "text/plainx", Data: []byte("y")} },
		"another type":          func(r *Request) { r.Inputs[0].Blob.ContentType = "" },
		"a part's parameter":    func(r *Request) { r.Inputs[0].Parameters = nil },
		"its value's type":      func(r *Request) { r.Inputs[0].Parameters = payload.Parameters{"p": payload.Uint64(1)} },
		"another shape":         func(r *Request) { r.Inputs[1].Tensor.Shape = []int64{1, 2} },
		"fewer axes":            func(r *Request) { r.Inputs[1].Tensor.Shape = []int64{2} },
		"another datatype":      func(r *Request) { r.Inputs[1].Tensor.Datatype = tensor.Int8 },
		"a tensor's bytes":      func(r *Request) { r.Inputs[1].Tensor.Raw = []byte("yx") },
		"no parameters":         func(r *Request) { r.Parameters = nil },
		"a parameter":           func(r *Request) { r.Parameters["a"] = payload.Bool(false) },
		"a parameter more":      func(r *Request) { r.Parameters["e"] = payload.String("") },
		"no steps":              func(r *Request) { r.Steps = nil },
		"a step's model":        func(r *Request) { r.Steps["two"] = StepOptions{Model: payload.ModelRef{Model: "x"}} },
		"a step's parameter":    func(r *Request) { r.Steps["two"] = StepOptions{Parameters: payload.Parameters{"d": payload.Int64(1)}} },
		"no metadata":           func(r *Request) { r.Metadata = nil },
		"whom it is for":        func(r *Request) { r.Metadata["user"] = "v" },
		"metadata cut elsewise": func(r *Request) { r.Metadata = map[string]string{"use": "ru", "group": "g"} },
	} {
		r := full()
		edit(r)
		d := digest(r)
		if as, ok := seen[d]; ok {
			t.Errorf("%s: the digest of %s", name, as)
		}
		seen[d] = name
	}
}
