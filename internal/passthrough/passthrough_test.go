package passthrough_test

import (
	"bytes"
	"reflect"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/internal/passthrough"
)

// field returns a field of bytes, whose length has a byte more than it needs.
func field(number protowire.Number, value []byte) []byte {
	out := protowire.AppendTag(nil, number, protowire.BytesType)
	return append(append(out, 0x80|byte(len(value)), 0), value...)
}

func TestFieldIsReplacedAndOthersStay(t *testing.T) {
	t.Parallel()
	rest := protowire.AppendVarint(protowire.AppendTag(nil, 9, protowire.VarintType), 7)
	inner := append(field(1, []byte("x")), field(2, []byte("old"))...)
	message := append(append(bytes.Clone(rest), field(5, inner)...), rest...)
	path := passthrough.Path{5, 2}
	if id, err := path.Get(message); err != nil || id != "old" {
		t.Errorf("got %q, %v", id, err)
	}
	out, err := path.Set(message, "newer")
	if err != nil {
		t.Fatal(err)
	}
	value := append(field(1, []byte("x")), protowire.AppendString(protowire.AppendTag(nil, 2, protowire.BytesType), "newer")...)
	want := append(protowire.AppendBytes(protowire.AppendTag(bytes.Clone(rest), 5, protowire.BytesType), value), rest...)
	if !bytes.Equal(out, want) {
		t.Errorf("got  %x\nwant %x", out, want)
	}
}

func TestMissingFieldIsAdded(t *testing.T) {
	t.Parallel()
	rest := protowire.AppendVarint(protowire.AppendTag(nil, 9, protowire.VarintType), 7)
	path := passthrough.Path{5, 2}
	if id, err := path.Get(rest); err != nil || id != "" {
		t.Errorf("got %q, %v", id, err)
	}
	out, err := path.Set(rest, "a")
	if want := append(bytes.Clone(rest), 5<<3|2, 3, 2<<3|2, 1, 'a'); err != nil || !bytes.Equal(out, want) {
		t.Errorf("got %x, %v; want %x", out, err, want)
	}
}

func TestOtherTypesAndBrokenMessagesAreErrors(t *testing.T) {
	t.Parallel()
	for _, message := range [][]byte{{1 << 3, 1}, {1<<3 | 2, 200}, {0xff}} {
		if _, err := (passthrough.Path{1}).Get(message); err == nil {
			t.Errorf("%x has an ID", message)
		}
		if _, err := (passthrough.Path{1}).Set(message, "a"); err == nil {
			t.Errorf("%x takes an ID", message)
		}
	}
}

// The name of a model, and the name of a parameter within a map, which is a message.
func FuzzFieldPath(f *testing.F) {
	whole, err := proto.Marshal(&oipv2.ModelInferRequest{ModelName: "m", Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{Name: "x", Contents: &oipv2.InferTensorContents{}}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole, "new")
	f.Add([]byte{}, "")
	f.Fuzz(func(t *testing.T, message []byte, id string) {
		for _, path := range []passthrough.Path{{1}, {5, 1}, {5, 5, 8}} {
			before, err := path.Get(message)
			out, setErr := path.Set(message, id)
			if err != nil {
				continue
			}
			if setErr != nil {
				t.Fatalf("Get %q, but Set: %v", before, setErr)
			}
			if after, err := path.Get(out); err != nil || id != "" && after != id {
				t.Fatalf("set %q and got %q, %v in %x", id, after, err, out)
			}
			if len(path) > 1 {
				continue
			}
			// A decoder sees that field change, and no other.
			var was, is oipv2.ModelInferRequest
			if proto.Unmarshal(message, &was) != nil || proto.Unmarshal(out, &is) != nil {
				continue
			}
			was.ModelName = id
			if !proto.Equal(&was, &is) {
				t.Fatalf("%v became %v", &was, &is)
			}
		}
	})
}

func TestHeadersTravelWithoutInternalOnes(t *testing.T) {
	t.Parallel()
	text := passthrough.EncodeHeaders(map[string][]string{
		"x-user": {"a", "b", "no\nnewline"}, "x-raw-bin": {"\x00\xff"},
		":path": {"/a"}, "grpc-timeout": {"1S"}, "content-type": {"a"}, "authorization": {"Bearer t"}, "te": {"trailers"},
		"mm-model-id": {"m"}, "mm-balanced": {"true"}, "proxy-authorization": {"a"}, "stagemesh-priority": {"1"},
	})
	want := map[string][]string{"x-user": {"a", "b"}, "x-raw-bin": {"\x00\xff"}}
	if got := passthrough.DecodeHeaders(text); !reflect.DeepEqual(got, want) {
		t.Errorf("got %q", got)
	}
	if got := passthrough.DecodeHeaders("grpc-status=0"); len(got) != 0 {
		t.Errorf("got %q", got)
	}
}

func TestManagementIsNotPassedOn(t *testing.T) {
	t.Parallel()
	for name, may := range map[string]bool{
		"predict.Predictor/Predict": true, "tensorflow.serving.PredictionService/Predict": true,
		"mmesh.ModelRuntime/unloadModel": false, "inference.GRPCInferenceService/RepositoryModelUnload": false,
		"grpc.health.v1.Health/Check": false, "predict.Predictor": false, "/Predict": false, "a/b/c": false, "": false,
	} {
		if err := passthrough.CheckMethod(name); (err == nil) != may {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestPathsHaveAForm(t *testing.T) {
	t.Parallel()
	for s, ok := range map[string]bool{"": true, "1": true, "1.2.536870911": true, "0": false, "1.": false, "a": false, "-1": false, "536870912": false, "1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1": false} {
		p, err := passthrough.ParsePath(s)
		if (err == nil) != ok {
			t.Errorf("%q is %v, %v", s, p, err)
		}
	}
}
