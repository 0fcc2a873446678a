package tensor_test

import (
	"bytes"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// numbered returns a UINT8 tensor of the shape whose elements count up.
func numbered(t testing.TB, shape ...int64) tensor.Tensor {
	t.Helper()
	n, ok := tensor.Elements(shape)
	if !ok {
		t.Fatalf("shape %v", shape)
	}
	raw := make([]byte, n)
	for i := range raw {
		raw[i] = byte(i)
	}
	return tensor.Tensor{Datatype: tensor.Uint8, Shape: shape, Raw: raw}
}

func texts(t testing.TB, elements ...string) tensor.Tensor {
	t.Helper()
	list := make([][]byte, len(elements))
	for i, e := range elements {
		list[i] = []byte(e)
	}
	x, err := tensor.FromBytes([]int64{int64(len(list))}, list)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func same(a, b tensor.Tensor) bool {
	return a.Datatype == b.Datatype && slices.Equal(a.Shape, b.Shape) && bytes.Equal(a.Raw, b.Raw)
}

func TestElementsMultipliesTheAxes(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		shape []int64
		want  int64
		ok    bool
	}{
		"a scalar is one":               {nil, 1, true},
		"a matrix":                      {[]int64{2, 3}, 6, true},
		"an empty axis":                 {[]int64{2, 0, 3}, 0, true},
		"as many as can be counted":     {[]int64{math.MaxInt64, 1}, math.MaxInt64, true},
		"negative":                      {[]int64{2, -1}, 0, false},
		"two negatives are no positive": {[]int64{-2, -3}, 0, false},
		"the smallest integer":          {[]int64{math.MinInt64}, 0, false},
		"one more than can be counted":  {[]int64{1 << 32, 1 << 31}, 0, false},
		"a product that wraps to 0":     {[]int64{1 << 32, 1 << 32}, 0, false},
		"overflow before an empty axis": {[]int64{1 << 32, 1 << 32, 0}, 0, false},
		"overflow after an empty axis":  {[]int64{0, 1 << 32, 1 << 32}, 0, false},
		"negative after an empty axis":  {[]int64{0, -1}, 0, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if n, ok := tensor.Elements(test.shape); n != test.want || ok != test.ok {
				t.Errorf("Elements(%v) = %d, %t; want %d, %t", test.shape, n, ok, test.want, test.ok)
			}
		})
	}
}

func TestInvalidShapesAreRefused(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		x        tensor.Tensor
		wantText string
	}{
		"negative":                  {tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{-1}}, "negative"},
		"elements overflow":         {tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{math.MaxInt64, 2}}, "too large"},
		"bytes overflow":            {tensor.Tensor{Datatype: tensor.FP64, Shape: []int64{math.MaxInt64}}, "too large"},
		"bytes wrap to 0":           {tensor.Tensor{Datatype: tensor.FP64, Shape: []int64{1 << 61}}, "too large"},
		"empty, and bytes overflow": {tensor.Tensor{Datatype: tensor.FP64, Shape: []int64{0, 1 << 61}}, "too large"},
		"empty, and many":           {tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{1 << 30, 0, 1 << 30}}, "too large"},
		"BYTES overflow":            {tensor.Tensor{Datatype: tensor.Bytes, Shape: []int64{math.MaxInt64, 2}}, "too large"},
		"too many axes":             {tensor.Tensor{Datatype: tensor.Uint8, Shape: make([]int64, tensor.MaxRank+1)}, "17 axes"},
		"bytes of no element":       {tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{0}, Raw: []byte{1}}, "takes 0 bytes, got 1"},
		"scalar without byte":       {tensor.Tensor{Datatype: tensor.Uint8}, "takes 1 bytes, got 0"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := test.x.Validate(); err == nil || !strings.Contains(err.Error(), test.wantText) {
				t.Errorf("got %v, want something about %q", err, test.wantText)
			}
		})
	}
}

func TestErrorsClipLongDatatypes(t *testing.T) {
	t.Parallel()
	x := tensor.Tensor{Datatype: tensor.Datatype(strings.Repeat("\x00", 1<<20))}
	if err := x.Validate(); err == nil || len(err.Error()) > 1<<10 {
		t.Fatalf("the message has %d bytes", len(err.Error()))
	}
}

func TestRowsAreAxis0OrOne(t *testing.T) {
	t.Parallel()
	if got := numbered(t, 3, 2).Rows(); got != 3 {
		t.Errorf("[3, 2] has %d rows", got)
	}
	if got := numbered(t).Rows(); got != 1 {
		t.Errorf("a scalar has %d rows", got)
	}
	if got := numbered(t, 0, 2).Rows(); got != 0 {
		t.Errorf("[0, 2] has %d rows", got)
	}
}

func TestConcatJoinsRowsInOrder(t *testing.T) {
	t.Parallel()
	a, b, empty := numbered(t, 2, 2), numbered(t, 1, 2), numbered(t, 0, 2)
	got, err := tensor.Concat([]tensor.Tensor{b, empty, a})
	want := tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{3, 2}, Raw: []byte{0, 1, 0, 1, 2, 3}}
	if err != nil || !same(got, want) || got.Validate() != nil {
		t.Fatalf("got %v, %v", got, err)
	}
	got.Raw[0], got.Shape[1] = 9, 9
	if b.Raw[0] != 0 || b.Shape[1] != 2 {
		t.Error("the joined tensor shares memory with its parts")
	}
}

func TestConcatReturnsSingleTensor(t *testing.T) {
	t.Parallel()
	for name, x := range map[string]tensor.Tensor{"matrix": numbered(t, 2, 2), "scalar": numbered(t)} {
		got, err := tensor.Concat([]tensor.Tensor{x})
		if err != nil || !same(got, x) || &got.Raw[0] != &x.Raw[0] {
			t.Errorf("%s: got %v, %v", name, got, err)
		}
	}
}

func TestConcatRefusesUnstackableTensors(t *testing.T) {
	t.Parallel()
	rows := tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{1 << 62, 0}}
	wide := tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{1 << 31, 1 << 31, 0}}
	tests := map[string][]tensor.Tensor{
		"nothing":                {},
		"scalars":                {numbered(t), numbered(t)},
		"another trailing axis":  {numbered(t, 1, 2), numbered(t, 1, 3)},
		"another rank":           {numbered(t, 1, 2), numbered(t, 2)},
		"another datatype":       {numbered(t, 1), {Datatype: tensor.Int8, Shape: []int64{1}, Raw: []byte{1}}},
		"a scalar after a row":   {numbered(t, 1), numbered(t)},
		"rows beyond counting":   {rows, rows},
		"rows that wrap to 0":    {rows, rows, rows, rows},
		"extents that overflow":  {wide, wide, wide, wide},
		"the third does not fit": {numbered(t, 1, 2), numbered(t, 1, 2), numbered(t, 1, 1)},
	}
	for name, parts := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got, err := tensor.Concat(parts); err == nil {
				t.Errorf("got %s%v", got.Datatype, got.Shape)
			}
		})
	}
}

func TestStackableTensorsAgreeOnAllButRows(t *testing.T) {
	t.Parallel()
	of := func(d tensor.Datatype, shape ...int64) tensor.Tensor { return tensor.Tensor{Datatype: d, Shape: shape} }
	tests := map[string]struct {
		a, b tensor.Tensor
		want bool
	}{
		"other rows":       {of(tensor.FP32, 1, 64), of(tensor.FP32, 7, 64), true},
		"no rows":          {of(tensor.FP32, 0, 64), of(tensor.FP32, 7, 64), true},
		"vectors":          {of(tensor.FP32, 1), of(tensor.FP32, 7), true},
		"other width":      {of(tensor.FP32, 1, 64), of(tensor.FP32, 1, 63), false},
		"other rank":       {of(tensor.FP32, 1, 64), of(tensor.FP32, 1, 64, 1), false},
		"other datatype":   {of(tensor.FP32, 1, 64), of(tensor.Int32, 1, 64), false},
		"scalars":          {of(tensor.FP32), of(tensor.FP32), false},
		"scalar to vector": {of(tensor.FP32), of(tensor.FP32, 1), false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got, back := tensor.Stackable(test.a, test.b), tensor.Stackable(test.b, test.a); got != test.want || back != test.want {
				t.Errorf("Stackable = %t and %t, want %t", got, back, test.want)
			}
		})
	}
}

func TestSplitCutsRowsInOrder(t *testing.T) {
	t.Parallel()
	whole := numbered(t, 4, 2)
	got, err := tensor.Split(whole, []int64{1, 0, 3})
	want := []tensor.Tensor{
		{Datatype: tensor.Uint8, Shape: []int64{1, 2}, Raw: []byte{0, 1}},
		{Datatype: tensor.Uint8, Shape: []int64{0, 2}},
		{Datatype: tensor.Uint8, Shape: []int64{3, 2}, Raw: []byte{2, 3, 4, 5, 6, 7}},
	}
	if err != nil || !slices.EqualFunc(got, want, same) {
		t.Fatalf("got %v, %v", got, err)
	}
	if &got[2].Raw[0] != &whole.Raw[2] {
		t.Error("the pieces are copies")
	}
}

func TestAppendToPieceLeavesNeighbours(t *testing.T) {
	t.Parallel()
	whole := numbered(t, 2)
	pieces, err := tensor.Split(whole, []int64{1, 1})
	if err != nil {
		t.Fatal(err)
	}
	_ = append(pieces[0].Raw, 9)
	elements, err := texts(t, "a", "b").BytesElements()
	if err != nil {
		t.Fatal(err)
	}
	_ = append(elements[0], 9, 9, 9, 9, 9)
	if pieces[1].Raw[0] != 1 || string(elements[1]) != "b" {
		t.Errorf("the neighbours are %v and %q", pieces[1].Raw, elements[1])
	}
}

func TestSplitRefusesWrongRows(t *testing.T) {
	t.Parallel()
	empty := tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{0, 4}}
	tests := map[string]struct {
		x    tensor.Tensor
		rows []int64
	}{
		"too few":                     {numbered(t, 3), []int64{1, 1}},
		"none of three":               {numbered(t, 3), nil},
		"too many":                    {numbered(t, 3), []int64{2, 2}},
		"negative":                    {numbered(t, 3), []int64{4, -1}},
		"a sum that wraps to the end": {empty, []int64{math.MaxInt64, math.MaxInt64, 2}},
		"a scalar":                    {numbered(t), []int64{1}},
		"fewer bytes than rows":       {tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{2}, Raw: make([]byte, 4)}, []int64{1, 1}},
		"a cut-off element":           {tensor.Tensor{Datatype: tensor.Bytes, Shape: []int64{2}, Raw: []byte{0, 0, 0, 0, 1}}, []int64{1, 1}},
		"a negative shape":            {tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{-1}}, []int64{0}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got, err := tensor.Split(test.x, test.rows); err == nil {
				t.Errorf("got %v", got)
			}
		})
	}
}

// random returns a valid tensor of the datatype and trailing shape with up to
// four rows.
func random(r *rand.Rand, datatype tensor.Datatype, trailing []int64) tensor.Tensor {
	shape := append([]int64{r.Int64N(5)}, trailing...)
	n, _ := tensor.Elements(shape)
	if datatype == tensor.Bytes {
		elements := make([][]byte, n)
		for i := range elements {
			elements[i] = junk(r, r.IntN(6))
		}
		x, err := tensor.FromBytes(shape, elements)
		if err != nil {
			panic(err)
		}
		return x
	}
	return tensor.Tensor{Datatype: datatype, Shape: shape, Raw: junk(r, int(n)*datatype.Size())}
}

func junk(r *rand.Rand, n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(r.Uint32())
	}
	return out
}

func TestSplitInvertsConcat(t *testing.T) {
	t.Parallel()
	datatypes := []tensor.Datatype{tensor.Bytes}
	for d := range sizes() {
		datatypes = append(datatypes, d)
	}
	for _, datatype := range datatypes {
		t.Run(string(datatype), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(1, 2))
			for range 200 {
				trailing := make([]int64, r.IntN(3))
				for i := range trailing {
					trailing[i] = r.Int64N(4)
				}
				parts := make([]tensor.Tensor, 1+r.IntN(5))
				rows := make([]int64, len(parts))
				for i := range parts {
					parts[i] = random(r, datatype, trailing)
					rows[i] = parts[i].Rows()
				}
				whole, err := tensor.Concat(parts)
				if err != nil || whole.Validate() != nil {
					t.Fatalf("join of %v: %v, %v", parts, err, whole.Validate())
				}
				got, err := tensor.Split(whole, rows)
				if err != nil || !slices.EqualFunc(got, parts, same) {
					t.Fatalf("%v became %v, %v", parts, got, err)
				}
			}
		})
	}
}

func TestFloatsRoundTripExactly(t *testing.T) {
	t.Parallel()
	want := []float32{0, float32(math.Copysign(0, -1)), 1.5, math.MaxFloat32, math.SmallestNonzeroFloat32, float32(math.Inf(-1)), math.Float32frombits(0x7fc00001)}
	x, err := tensor.FromFP32([]int64{7, 1}, want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := x.FP32Values()
	if err != nil || len(got) != len(want) {
		t.Fatalf("got %v, %v", got, err)
	}
	for i := range want {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			t.Errorf("%v came back as %v", want[i], got[i])
		}
	}
	if !bytes.Equal(x.Raw[8:12], []byte{0, 0, 0xc0, 0x3f}) {
		t.Errorf("1.5 is % x, want little-endian 3fc00000", x.Raw[8:12])
	}
}

func TestIntegersRoundTrip(t *testing.T) {
	t.Parallel()
	want := []int64{0, -1, math.MinInt64, math.MaxInt64, 0x0102030405060708}
	x, err := tensor.FromInt64([]int64{5}, want)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := x.Int64Values(); err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v", got, err)
	}
	if !bytes.Equal(x.Raw[32:], []byte{8, 7, 6, 5, 4, 3, 2, 1}) {
		t.Errorf("the last is % x, want little-endian", x.Raw[32:])
	}
}

func TestConstructorsRefuseWrongShapes(t *testing.T) {
	t.Parallel()
	for name, shape := range map[string][]int64{
		"too few": {1}, "too many": {3}, "negative": {-2, -1}, "overflow": {1 << 32, 1 << 32}, "scalar": nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err32 := tensor.FromFP32(shape, []float32{1, 2})
			_, err64 := tensor.FromInt64(shape, []int64{1, 2})
			_, errBytes := tensor.FromBytes(shape, [][]byte{{1}, {2}})
			if err32 == nil || err64 == nil || errBytes == nil {
				t.Errorf("shape %v of two values: %v, %v, %v", shape, err32, err64, errBytes)
			}
		})
	}
}

func TestValuesOfAnotherDatatypeAreRefused(t *testing.T) {
	t.Parallel()
	x := numbered(t, 8)
	_, err32 := x.FP32Values()
	_, err64 := x.Int64Values()
	_, errBytes := x.BytesElements()
	if err32 == nil || err64 == nil || errBytes == nil {
		t.Errorf("got %v, %v, %v", err32, err64, errBytes)
	}
	for _, d := range []tensor.Datatype{tensor.FP32, tensor.Int64, tensor.Bytes} {
		short := tensor.Tensor{Datatype: d, Shape: []int64{2}, Raw: make([]byte, 5)}
		_, err32 := short.FP32Values()
		_, err64 := short.Int64Values()
		_, errBytes := short.BytesElements()
		if err32 == nil || err64 == nil || errBytes == nil {
			t.Errorf("five bytes of %s are unpacked", d)
		}
	}
}

func TestBytesElementsHaveLengthPrefixes(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		shape []int64
		raw   []byte
		want  [][]byte // nil: refused
	}{
		"one":                      {[]int64{1}, []byte{2, 0, 0, 0, 'h', 'i'}, [][]byte{[]byte("hi")}},
		"a scalar":                 {nil, []byte{1, 0, 0, 0, 'x'}, [][]byte{[]byte("x")}},
		"empty elements":           {[]int64{2}, make([]byte, 8), [][]byte{{}, {}}},
		"row-major":                {[]int64{2, 1}, []byte{1, 0, 0, 0, 'a', 1, 0, 0, 0, 'b'}, [][]byte{[]byte("a"), []byte("b")}},
		"none":                     {[]int64{0, 3}, nil, [][]byte{}},
		"a cut-off length":         {[]int64{1}, []byte{0, 0, 0}, nil},
		"a cut-off element":        {[]int64{1}, []byte{2, 0, 0, 0, 'h'}, nil},
		"big-endian length":        {[]int64{1}, []byte{0, 0, 0, 2, 'h', 'i'}, nil},
		"the longest length":       {[]int64{1}, []byte{0xff, 0xff, 0xff, 0xff}, nil},
		"a length that wraps to 0": {[]int64{1}, []byte{0xfc, 0xff, 0xff, 0xff}, nil},
		"bytes left over":          {[]int64{1}, []byte{0, 0, 0, 0, 0}, nil},
		"one element too few":      {[]int64{2}, []byte{0, 0, 0, 0}, nil},
		"one element too many":     {[]int64{1}, make([]byte, 8), nil},
		"bytes of no element":      {[]int64{0}, make([]byte, 4), nil},
		"more than can be":         {[]int64{math.MaxInt64}, make([]byte, 64), nil},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := tensor.Tensor{Datatype: tensor.Bytes, Shape: test.shape, Raw: test.raw}
			got, err := x.BytesElements()
			if (err == nil) != (test.want != nil) || (x.Validate() == nil) != (err == nil) {
				t.Fatalf("got %q, %v; Validate returns %v", got, err, x.Validate())
			}
			if err == nil && !reflect.DeepEqual(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
