package payload_test

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

func samePart(a, b payload.Part) bool {
	if a.Name != b.Name || !maps.Equal(a.Parameters, b.Parameters) || (a.Tensor == nil) != (b.Tensor == nil) {
		return false
	}
	if a.Tensor == nil {
		return a.Blob.ContentType == b.Blob.ContentType && bytes.Equal(a.Blob.Data, b.Blob.Data)
	}
	return a.Tensor.Datatype == b.Tensor.Datatype && slices.Equal(a.Tensor.Shape, b.Tensor.Shape) && bytes.Equal(a.Tensor.Raw, b.Tensor.Raw)
}

func drawTensor(t *rapid.T) tensor.Tensor {
	shape := rapid.SliceOfN(rapid.Int64Range(0, 3), 0, 3).Draw(t, "shape")
	n, _ := tensor.Elements(shape)
	if rapid.Bool().Draw(t, "BYTES") {
		elements := rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 0, 4), int(n), int(n)).Draw(t, "elements")
		x, err := tensor.FromBytes(shape, elements)
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	datatype := rapid.SampledFrom([]tensor.Datatype{tensor.Bool, tensor.FP16, tensor.FP32, tensor.Int64}).Draw(t, "datatype")
	size := int(n) * datatype.Size()
	return tensor.Tensor{Datatype: datatype, Shape: shape, Raw: rapid.SliceOfN(rapid.Byte(), size, size).Draw(t, "raw")}
}

func drawPart(t *rapid.T, name string) payload.Part {
	out := payload.Part{Name: name, Parameters: drawParameters(t)}
	if rapid.Bool().Draw(t, "tensor") {
		x := drawTensor(t)
		out.Tensor = &x
		return out
	}
	out.Blob = payload.Blob{
		ContentType: rapid.SampledFrom([]string{"", "image/png", "text/plain; charset=utf-8"}).Draw(t, "type"),
		Data:        rapid.SliceOfN(rapid.Byte(), 0, 16).Draw(t, "data"),
	}
	return out
}

func TestPartsRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		names := rapid.SliceOfNDistinct(rapid.StringN(0, 8, payload.MaxName), 0, 4, rapid.ID).Draw(t, "names")
		want := make([]payload.Part, len(names))
		for i, name := range names {
			want[i] = drawPart(t, name)
		}
		if err := payload.Validate("inputs", want); err != nil {
			t.Fatal(err)
		}
		data, err := proto.Marshal(&meshv1.Output{Parts: payload.ToProto(want)})
		if err != nil {
			t.Fatal(err)
		}
		var wire meshv1.Output
		if err := proto.Unmarshal(data, &wire); err != nil {
			t.Fatal(err)
		}
		got, err := payload.FromProto("inputs", wire.GetParts())
		if err != nil || !slices.EqualFunc(got, want, samePart) {
			t.Fatalf("got %v, %v; want %v", got, err, want)
		}
	})
}

func TestMessagesAndPartsShareTheirBytes(t *testing.T) {
	t.Parallel()
	parts := []payload.Part{
		payload.OfBlob("b", "text/plain", []byte("hello")),
		payload.OfTensor("t", tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{1}, Raw: []byte{1}}),
	}
	wire := payload.ToProto(parts)
	back, err := payload.FromProto("inputs", wire)
	if err != nil {
		t.Fatal(err)
	}
	blob, raw := wire[0].GetBlob().GetData(), wire[1].GetTensor().GetRaw()
	if &blob[0] != &parts[0].Blob.Data[0] || &raw[0] != &parts[1].Tensor.Raw[0] {
		t.Error("messages hold copies")
	}
	if &back[0].Blob.Data[0] != &blob[0] || &back[1].Tensor.Raw[0] != &raw[0] {
		t.Error("parts hold copies")
	}
}

func blobPart(name, contentType string) *inferencev1.Part {
	return &inferencev1.Part{Name: name, Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: contentType}}}
}

func tensorPart(name string, x *inferencev1.Tensor) *inferencev1.Part {
	return &inferencev1.Part{Name: name, Body: &inferencev1.Part_Tensor{Tensor: x}}
}

func manyParts(n int) []*inferencev1.Part {
	out := make([]*inferencev1.Part, n)
	for i := range out {
		out[i] = blobPart(fmt.Sprint(i), "")
	}
	return out
}

func manyValues(n int) map[string]*inferencev1.Value {
	out := make(map[string]*inferencev1.Value, n)
	for i := range n {
		out[fmt.Sprint(i)] = &inferencev1.Value{Kind: &inferencev1.Value_BoolValue{}}
	}
	return out
}

func TestInvalidPartsAreRejectedByName(t *testing.T) {
	t.Parallel()
	with := func(p *inferencev1.Part, parameters map[string]*inferencev1.Value) *inferencev1.Part {
		p.Parameters = parameters
		return p
	}
	tests := map[string]struct {
		parts  []*inferencev1.Part
		reason fault.Reason
		field  string
		says   string
	}{
		"too many": {
			manyParts(payload.MaxParts + 1), fault.InvalidRequest, "", "257 inputs, at most 256",
		},
		"two of a name": {
			[]*inferencev1.Part{blobPart("a", ""), blobPart("b", ""), blobPart("a", "")}, fault.InvalidInput, "inputs", `two inputs are named "a"`,
		},
		"two without a name": {
			[]*inferencev1.Part{blobPart("", ""), blobPart("", "")}, fault.InvalidInput, "inputs", `named ""`,
		},
		"no body": {
			[]*inferencev1.Part{{Name: "a"}}, fault.InvalidInput, "inputs.a", "neither blob nor tensor",
		},
		"no part at all": {
			[]*inferencev1.Part{nil}, fault.InvalidInput, "inputs[0]", "neither blob nor tensor",
		},
		"an empty tensor message": {
			[]*inferencev1.Part{blobPart("x", ""), tensorPart("", nil)}, fault.InvalidInput, "inputs[1]", "unknown datatype",
		},
		"shape and bytes disagree": {
			[]*inferencev1.Part{tensorPart("px", &inferencev1.Tensor{Datatype: "FP32", Shape: []int64{2}, Raw: []byte{1}})},
			fault.InvalidInput, "inputs.px", "takes 8 bytes, got 1",
		},
		"a shape that overflows": {
			[]*inferencev1.Part{tensorPart("px", &inferencev1.Tensor{Datatype: "FP32", Shape: []int64{1 << 40, 1 << 40}})},
			fault.InvalidInput, "inputs.px", "too large",
		},
		"a name that is too long": {
			[]*inferencev1.Part{blobPart(strings.Repeat("n", payload.MaxName+1), "")}, fault.InvalidInput, "inputs[0]", "at most 256 bytes",
		},
		"a name that is not UTF-8": {
			[]*inferencev1.Part{blobPart("\xff", "")}, fault.InvalidInput, "inputs[0]", "valid UTF-8",
		},
		"a content type that is too long": {
			[]*inferencev1.Part{blobPart("a", strings.Repeat("t", payload.MaxContentType+1))}, fault.InvalidInput, "inputs.a", "content type",
		},
		"a content type that is not UTF-8": {
			[]*inferencev1.Part{blobPart("a", "\xff")}, fault.InvalidInput, "inputs.a", "content type",
		},
		"a parameter without value": {
			[]*inferencev1.Part{with(blobPart("a", ""), map[string]*inferencev1.Value{"p": nil})}, fault.InvalidInput, "inputs.a", `parameter "p": has no value`,
		},
		"too many parameters": {
			[]*inferencev1.Part{with(blobPart("a", ""), manyValues(payload.MaxParameters+1))}, fault.InvalidInput, "inputs.a", "257 parameters",
		},
		"by reference": {
			[]*inferencev1.Part{{Name: "a", Body: &inferencev1.Part_Ref{Ref: &inferencev1.Ref{}}}}, fault.NotSupported, "inputs.a", "by reference",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := payload.FromProto("inputs", test.parts)
			if err == nil || got != nil {
				t.Fatalf("got %v, %v", got, err)
			}
			f := fault.From(err)
			if f.Reason != test.reason || !strings.Contains(f.Message, test.says) {
				t.Errorf("got %v, want %s with %q", f, test.reason, test.says)
			}
			if test.field != "" && (len(f.Violations) != 1 || f.Violations[0].Field != test.field) {
				t.Errorf("violations %v, want %q", f.Violations, test.field)
			}
		})
	}
}

func TestPartsAtTheBoundsAreAccepted(t *testing.T) {
	t.Parallel()
	parts := manyParts(payload.MaxParts)
	parts[0].Parameters = manyValues(payload.MaxParameters)
	parts[1] = blobPart(strings.Repeat("ü", payload.MaxName/2), strings.Repeat("t", payload.MaxContentType))
	if got, err := payload.FromProto("inputs", parts); err != nil || len(got) != payload.MaxParts {
		t.Fatalf("%d parts, %v", len(got), err)
	}
}

func TestFaultsOfLongNamesStayShort(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("\x00", 1<<20)
	tests := map[string]*inferencev1.Part{
		"a name":           {Name: long},
		"a content type":   blobPart("a", long),
		"a datatype":       tensorPart("a", &inferencev1.Tensor{Datatype: long}),
		"a shape":          tensorPart("a", &inferencev1.Tensor{Datatype: "FP32", Shape: make([]int64, 1<<17)}),
		"a parameter":      {Name: "a", Parameters: map[string]*inferencev1.Value{long: {Kind: &inferencev1.Value_BoolValue{}}}},
		"an empty value":   {Name: "a", Parameters: map[string]*inferencev1.Value{long: nil}},
		"a parameter text": {Name: "a", Parameters: map[string]*inferencev1.Value{"p": {Kind: &inferencev1.Value_StringValue{StringValue: long + "\xff"}}}},
	}
	for name, part := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := payload.FromProto("inputs", []*inferencev1.Part{part})
			if err == nil {
				t.Fatal("it is accepted")
			}
			if size := proto.Size(fault.From(err).ToProto()); size > 8<<10 {
				t.Errorf("the fault has %d bytes", size)
			}
		})
	}
}

func TestValidateAppliesTheSameBounds(t *testing.T) {
	t.Parallel()
	good := payload.OfBlob("a", "text/plain", nil)
	tests := map[string][]payload.Part{
		"a name that is not UTF-8":         {payload.OfBlob("\xff", "", nil)},
		"a content type that is not UTF-8": {payload.OfBlob("b", "\xff", nil)},
		"a parameter that is not UTF-8":    {{Name: "b", Parameters: payload.Parameters{"p": payload.String("\xff")}}},
		"a parameter's name":               {{Name: "b", Parameters: payload.Parameters{"\xff": payload.Bool(true)}}},
		"two of a name":                    {good, good},
		"too many":                         make([]payload.Part, payload.MaxParts+1),
		"a tensor without its bytes":       {payload.OfTensor("b", tensor.Tensor{Datatype: tensor.FP32})},
	}
	if err := payload.Validate("outputs", []payload.Part{good}); err != nil {
		t.Error(err)
	}
	for name, parts := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := payload.Validate("outputs", parts); err == nil || fault.From(err).Reason == fault.Internal {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestSizeCountsPayloadBytes(t *testing.T) {
	t.Parallel()
	parts := []payload.Part{
		payload.OfBlob("blob", "text/plain", make([]byte, 5)),
		payload.OfTensor("tensor", tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{2}, Raw: make([]byte, 8)}),
		{},
	}
	if got := payload.Size(parts); got != 13 {
		t.Errorf("Size = %d, want 13", got)
	}
}

func TestFindReturnsPartByName(t *testing.T) {
	t.Parallel()
	parts := []payload.Part{payload.OfBlob("a", "1", nil), payload.OfBlob("", "2", nil)}
	if p, ok := payload.Find(parts, ""); !ok || p.Blob.ContentType != "2" {
		t.Errorf("got %v, %t", p, ok)
	}
	if p, ok := payload.Find(parts, "b"); ok {
		t.Errorf("got %v", p)
	}
}

func TestModelReferencesRoundTrip(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]payload.ModelRef{
		"default":      {},
		"model":        {Model: "m/1 ü"},
		"alias":        {Alias: "prod"},
		"version only": {Version: "2"},
		"of a version": {Model: "m", Version: "2"},
	} {
		wire := want.ToProto()
		if got := payload.ModelFromProto(wire); got != want || (wire == nil) != (name == "default") {
			t.Errorf("%s: %v came back as %v", name, want, got)
		}
	}
}

func TestModelIsNamedInOneWay(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 1<<20)
	for name, test := range map[string]struct {
		ref payload.ModelRef
		ok  bool
	}{
		"default":         {payload.ModelRef{}, true},
		"model":           {payload.ModelRef{Model: "resnet", Version: "2"}, true},
		"alias":           {payload.ModelRef{Alias: "prod"}, true},
		"version":         {payload.ModelRef{Version: "2"}, true},
		"both":            {payload.ModelRef{Model: "resnet", Alias: "prod"}, false},
		"both, at length": {payload.ModelRef{Model: long, Alias: long}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := test.ref.Validate()
			if (err == nil) != test.ok || err != nil && len(err.Error()) > 1<<10 {
				t.Errorf("got %.100v", err)
			}
		})
	}
}
