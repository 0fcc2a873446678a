package oipjson_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"

	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// FuzzDecode checks four promises: nothing panics; every rejection is a fault; every
// accepted body is JSON with valid tensors; and a tensor that is written and read
// again is unchanged.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		string(one("FP32", "[2,2]", "[[0.1,-2e-3],[3,4]]")),
		string(one("INT64", "[1]", "[9007199254740993]")),
		string(one("BYTES", "[2]", `["a","\ud83d\ude00"]`)),
		string(one("BOOL", "[0]", "[]")),
		`{"id":"7","parameters":{"a":1,"b":"x","c":true,"d":0.5},"inputs":[{"data":[1],"shape":[1],"datatype":"UINT8","name":"x"}],"outputs":[{"name":"y"}]}`,
		`{"inputs":[{"name":"x","datatype":"FP16","shape":[2]}]}`,
		`{"inputs":[[[[[[`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		oipjson.Detect(body)
		request, err := oipjson.Decode(body, nil)
		if err != nil {
			isFault(t, err)
			return
		}
		if !json.Valid(body) {
			t.Fatalf("accepted invalid JSON: %q", body)
		}
		parts, err := request.Parts()
		if err != nil {
			isFault(t, err)
			return
		}
		for _, p := range parts {
			if err := p.Tensor.Validate(); err != nil {
				t.Fatalf("input %q: %v", p.Name, err)
			}
			object, err := oipjson.AppendTensor(nil, p)
			if err != nil {
				t.Fatalf("input %q cannot be written: %v", p.Name, err)
			}
			again, err := oipjson.Decode([]byte(`{"inputs":[`+string(object)+`]}`), nil)
			if err != nil || !bytes.Equal(again.Inputs[0].Tensor.Raw, p.Tensor.Raw) {
				t.Fatalf("%s came back as %+v: %v", object, again, err)
			}
		}
	})
}

func isFault(t *testing.T, err error) {
	t.Helper()
	if f, ok := errors.AsType[*fault.Fault](err); !ok || (f.Reason != fault.InvalidInput && f.Reason != fault.InvalidRequest) {
		t.Fatalf("rejected by %v", err)
	}
}
