package payload_test

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/wire"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// readParts reads the parts of an encoded Output.
func readParts(data []byte) ([]payload.Part, error) {
	parts := []payload.Part{}
	c := wire.Reader(data)
	for c.Next() {
		payload.Code(&c, 1, "inputs", &parts)
	}
	err := c.Err()
	if err == nil {
		err = payload.Validate("inputs", parts)
	}
	if err != nil {
		return nil, err
	}
	return parts, nil
}

// convertParts is readParts by way of the generated message.
func convertParts(data []byte) ([]payload.Part, error) {
	var in meshv1.Output
	if err := proto.Unmarshal(data, &in); err != nil {
		return nil, err
	}
	return payload.FromProto("inputs", in.GetParts())
}

func drawParts(t *rapid.T) []payload.Part {
	names := rapid.SliceOfNDistinct(rapid.StringN(0, 8, payload.MaxName), 0, 4, rapid.ID).Draw(t, "names")
	out := make([]payload.Part, len(names))
	for i, name := range names {
		out[i] = drawPart(t, name)
	}
	return out
}

func TestWirePartsMatchGeneratedMessages(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		parts := drawParts(t)
		w := wire.Writer(payload.WireSize(parts))
		payload.Code(&w, 1, "inputs", &parts)
		data, err := w.Done()
		if err != nil {
			t.Fatal(err)
		}
		got, want := new(meshv1.Output), &meshv1.Output{Parts: payload.ToProto(parts)}
		if err := proto.Unmarshal(data, got); err != nil || !proto.Equal(got, want) {
			t.Fatalf("wrote %v, %v; want %v", got, err, want)
		}
		if back, err := readParts(data); err != nil || !slices.EqualFunc(back, parts, samePart) {
			t.Fatalf("read %v, %v; want %v", back, err, parts)
		}
	})
}

func TestWireRejectsTheSameInvalidParts(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("\x00", 1<<20)
	with := func(parameters map[string]*inferencev1.Value) *inferencev1.Part {
		return &inferencev1.Part{Name: "a", Body: &inferencev1.Part_Blob{}, Parameters: parameters}
	}
	yes := &inferencev1.Value{Kind: &inferencev1.Value_BoolValue{BoolValue: true}}
	tests := map[string][]*inferencev1.Part{
		"too many":                 manyParts(payload.MaxParts + 1),
		"two of a name":            {blobPart("a", ""), blobPart("b", ""), blobPart("a", "")},
		"two without a name":       {blobPart("", ""), blobPart("", "")},
		"no body":                  {{Name: "a"}},
		"no part at all":           {blobPart("a", ""), {}},
		"an empty tensor":          {blobPart("x", ""), tensorPart("", &inferencev1.Tensor{})},
		"shape and bytes disagree": {tensorPart("px", &inferencev1.Tensor{Datatype: "FP32", Shape: []int64{2}, Raw: []byte{1}})},
		"a shape that overflows":   {tensorPart("px", &inferencev1.Tensor{Datatype: "FP32", Shape: []int64{1 << 40, 1 << 40}})},
		"a shape of many axes":     {tensorPart("px", &inferencev1.Tensor{Datatype: "FP32", Shape: make([]int64, 17)})},
		"a name that is too long":  {blobPart(long, "")},
		"a content type too long":  {blobPart("a", long)},
		"a datatype too long":      {tensorPart("a", &inferencev1.Tensor{Datatype: long})},
		"a parameter's name":       {with(map[string]*inferencev1.Value{long: yes})},
		"a parameter's value":      {with(map[string]*inferencev1.Value{"p": {}})},
		"too many parameters":      {with(manyValues(payload.MaxParameters + 1))},
		"by reference":             {{Name: "a", Body: &inferencev1.Part_Ref{Ref: &inferencev1.Ref{Claim: "c"}}}},
	}
	for name, parts := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			data, err := proto.Marshal(&meshv1.Output{Parts: parts})
			if err != nil {
				t.Fatal(err)
			}
			got, err := readParts(data)
			_, want := convertParts(data)
			if got != nil || err == nil || want == nil {
				t.Fatalf("got %v, %v; converting says %v", got, err, want)
			}
			if f, g := fault.From(err), fault.From(want); f.Reason != g.Reason || f.Message != g.Message || !reflect.DeepEqual(f.Violations, g.Violations) {
				t.Errorf("got %v, want %v", f, g)
			}
		})
	}
}

func TestWireAcceptsPartsAtTheBounds(t *testing.T) {
	t.Parallel()
	parts := manyParts(payload.MaxParts)
	parts[0].Parameters = manyValues(payload.MaxParameters)
	data, err := proto.Marshal(&meshv1.Output{Parts: parts})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := readParts(data); err != nil || len(got) != payload.MaxParts || len(got[0].Parameters) != payload.MaxParameters {
		t.Fatalf("%d parts, %v", len(got), err)
	}
}

func TestLastValueOfParameterWins(t *testing.T) {
	t.Parallel()
	field := func(number protowire.Number, value ...byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), value)
	}
	entry := func(value ...byte) []byte { return field(5, append(field(1, 'p'), value...)...) }
	yes, text, empty := field(2, 1<<3, 1), field(2, field(4, 'x')...), field(2)
	tests := map[string]struct {
		entries [][]byte
		want    any // nil: it is refused
	}{
		"one":                          {[][]byte{entry(yes...)}, true},
		"another entry":                {[][]byte{entry(yes...), entry(text...)}, "x"},
		"another value":                {[][]byte{entry(slices.Concat(yes, text)...)}, "x"},
		"a value, then nothing to add": {[][]byte{entry(slices.Concat(yes, empty)...)}, true},
		"no value":                     {[][]byte{entry()}, nil},
		"an empty one":                 {[][]byte{entry(empty...)}, nil},
		"an entry, then an empty one":  {[][]byte{entry(yes...), entry(empty...)}, nil},
		"an empty one, then an entry":  {[][]byte{entry(empty...), entry(yes...)}, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			data := field(1, slices.Concat(field(2), slices.Concat(test.entries...))...)
			got, err := readParts(data)
			want, refused := convertParts(data)
			if (err == nil) != (refused == nil) || (err == nil) != (test.want != nil) || !slices.EqualFunc(got, want, samePart) {
				t.Fatalf("got %v, %v; converting says %v, %v", got, err, want, refused)
			}
			if err == nil && got[0].Parameters["p"].Any() != test.want {
				t.Errorf("got %v, want %v", got[0].Parameters["p"], test.want)
			}
		})
	}
}

func TestWirePartsShareMessageBytes(t *testing.T) {
	t.Parallel()
	data, err := proto.Marshal(&meshv1.Output{Parts: []*inferencev1.Part{
		{Name: "b", Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{Data: []byte("hello")}}},
		tensorPart("t", &inferencev1.Tensor{Datatype: "UINT8", Shape: []int64{5}, Raw: []byte("world")}),
	}})
	if err != nil {
		t.Fatal(err)
	}
	got, err := readParts(data)
	if err != nil {
		t.Fatal(err)
	}
	blob, raw := got[0].Blob.Data, got[1].Tensor.Raw
	if &blob[0] != &data[strings.Index(string(data), "hello")] || &raw[0] != &data[strings.Index(string(data), "world")] {
		t.Error("parts hold copies")
	}
	// Who appends to one must not write into the next.
	if cap(blob) != len(blob) || cap(raw) != len(raw) || cap(got[1].Tensor.Shape) != 1 {
		t.Errorf("room for %d, %d and %d", cap(blob), cap(raw), cap(got[1].Tensor.Shape))
	}
}

func TestWireModelReferencesMatchGeneratedMessages(t *testing.T) {
	t.Parallel()
	names := [][]byte{{1<<3 | 2, 1, 'm'}, {2<<3 | 2, 1, 'a'}, {3<<3 | 2, 1, 'v'}, {1<<3 | 2, 0}, {2<<3 | 2, 0}}
	rapid.Check(t, func(t *rapid.T) {
		fields := slices.Concat(rapid.SliceOfN(rapid.SampledFrom(names), 0, 4).Draw(t, "fields")...)
		var in inferencev1.ModelRef
		if err := proto.Unmarshal(fields, &in); err != nil {
			t.Fatal(err)
		}
		var got payload.ModelRef
		c := wire.Reader(protowire.AppendBytes([]byte{1<<3 | 2}, fields))
		for c.Next() {
			payload.CodeModel(&c, 1, &got)
		}
		if want := payload.ModelFromProto(&in); c.Err() != nil || got != want {
			t.Fatalf("got %v, %v; want %v", got, c.Err(), want)
		}
		w := wire.Writer(0)
		payload.CodeModel(&w, 1, &got)
		data, err := w.Done()
		if err != nil || (len(data) == 0) != (got == payload.ModelRef{}) {
			t.Fatalf("wrote %x, %v of %v", data, err, got)
		}
	})
}

func FuzzWireParts(f *testing.F) {
	draw := rapid.Custom(drawParts)
	for seed := range 20 {
		data, err := proto.Marshal(&meshv1.Output{Parts: payload.ToProto(draw.Example(seed))})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		// Output's other field is not the parts'.
		c := wire.Reader(data)
		for c.Next() {
			if c.IsMessage(2) {
				return
			}
		}
		got, err := readParts(data)
		want, refused := convertParts(data)
		if (err == nil) != (refused == nil) || !slices.EqualFunc(got, want, samePart) {
			t.Fatalf("%x: got %v, %v; converting says %v, %v", data, got, err, want, refused)
		}
	})
}
