package payload_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/payload"
)

// drawName prefers names that would break a key without quotes.
func drawName(t *rapid.T) string {
	return rapid.OneOf(
		rapid.SampledFrom([]string{"a", "b", "", `a"`, `"`, "=", ";", `a"=0:0:"";"b`, "\x00"}),
		rapid.StringN(0, 3, 12),
	).Draw(t, "name")
}

func drawValue(t *rapid.T) payload.Value {
	switch rapid.IntRange(0, 4).Draw(t, "kind") {
	case 0:
		return payload.Bool(rapid.Bool().Draw(t, "bool"))
	case 1:
		return payload.Int64(rapid.OneOf(rapid.Int64Range(-1, 1), rapid.Int64()).Draw(t, "int64"))
	case 2:
		return payload.Uint64(rapid.OneOf(rapid.Uint64Range(0, 1), rapid.Uint64()).Draw(t, "uint64"))
	case 3:
		bits := rapid.OneOf(
			rapid.SampledFrom([]uint64{0, 1, 1 << 63, math.Float64bits(1), 0x7ff8000000000001, 0x7ff8000000000002}),
			rapid.Uint64(),
		).Draw(t, "double")
		return payload.Double(math.Float64frombits(bits))
	default:
		return payload.String(rapid.OneOf(rapid.SampledFrom([]string{"", "0", "1", "true", "NaN", `";`}), rapid.StringN(0, 3, 12)).Draw(t, "text"))
	}
}

func drawParameters(t *rapid.T) payload.Parameters {
	var out payload.Parameters
	for range rapid.IntRange(0, 3).Draw(t, "parameters") {
		out = payload.Merge(out, payload.Parameters{drawName(t): drawValue(t)})
	}
	return out
}

// agree reports whether both have the same values, or none, under the names.
func agree(a, b payload.Parameters, names []string) bool {
	return !slices.ContainsFunc(names, func(name string) bool {
		x, inA := a[name]
		y, inB := b[name]
		return inA != inB || x != y
	})
}

func TestKeysAreEqualForEqualParameters(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		a := drawParameters(t)
		b := payload.Merge(a, drawParameters(t))
		if rapid.Bool().Draw(t, "unrelated") {
			b = drawParameters(t)
		}
		names := slices.Collect(maps.Keys(payload.Merge(a, b)))
		names = rapid.SliceOf(rapid.SampledFrom(append(names, "a", "b"))).Draw(t, "names")
		if equal, want := a.Key(names) == b.Key(names), agree(a, b, names); equal != want {
			t.Fatalf("keys of %v and %v by %q: %q and %q", a, b, names, a.Key(names), b.Key(names))
		}
	})
}

func TestKeysOfDifferentParametersDiffer(t *testing.T) {
	t.Parallel()
	empty := payload.String("")
	tests := map[string]struct{ a, b payload.Parameters }{
		"a name like two": {payload.Parameters{"a": empty, "b": empty}, payload.Parameters{`a=0:0:"";b`: empty}},
		"a quoted name":   {payload.Parameters{"a": empty, "b": empty}, payload.Parameters{`a"=0:0:"";"b`: empty}},
		"a value like two": {
			payload.Parameters{"a": payload.String(`";"b"=0:0:"`)}, payload.Parameters{"a": empty, "b": empty},
		},
		"a number and its text":   {payload.Parameters{"a": payload.Int64(1)}, payload.Parameters{"a": payload.String("1")}},
		"signed and unsigned":     {payload.Parameters{"a": payload.Int64(1)}, payload.Parameters{"a": payload.Uint64(1)}},
		"whole and floating":      {payload.Parameters{"a": payload.Int64(1)}, payload.Parameters{"a": payload.Double(1)}},
		"true and its text":       {payload.Parameters{"a": payload.Bool(true)}, payload.Parameters{"a": payload.String("true")}},
		"two that are no numbers": {payload.Parameters{"a": payload.Double(math.Float64frombits(0x7ff8000000000001))}, payload.Parameters{"a": payload.Double(math.Float64frombits(0x7ff8000000000002))}},
		"zeros":                   {payload.Parameters{"a": payload.Double(0)}, payload.Parameters{"a": payload.Double(math.Copysign(0, -1))}},
		"empty and absent":        {payload.Parameters{"a": empty}, payload.Parameters{"z": empty}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			names := []string{"a", "b", `a=0:0:"";b`, `a"=0:0:"";"b`}
			if a, b := test.a.Key(names), test.b.Key(names); a == b {
				t.Errorf("both are %s", a)
			}
		})
	}
}

func TestKeysDoNotDependOnTheOrderOfNames(t *testing.T) {
	t.Parallel()
	p := payload.Parameters{"a": payload.Int64(1), "b": payload.Int64(2)}
	if x, y := p.Key([]string{"a", "b"}), p.Key([]string{"b", "a"}); x != y || x == "" {
		t.Errorf("%q and %q", x, y)
	}
	names := []string{"b", "a"}
	p.Key(names)
	if names[0] != "b" {
		t.Error("Key sorted the caller's names")
	}
}

func TestParseValueReadsHandwrittenValues(t *testing.T) {
	t.Parallel()
	tests := map[string]any{
		"true": true, "false": false, "True": "True", "t": "t", "yes": "yes",
		"0": int64(0), "1": int64(1), "-3": int64(-3), "007": int64(7),
		"9223372036854775807":  int64(math.MaxInt64),
		"9223372036854775808":  uint64(1) << 63,
		"18446744073709551615": uint64(math.MaxUint64),
		"18446744073709551616": 18446744073709551616.0,
		"0.5":                  0.5, "-1e3": -1000.0, ".5": 0.5,
		"1e400": "1e400", "nan": "nan", "NaN": "NaN", "inf": "inf", "-Infinity": "-Infinity",
		"": "", " 1": " 1", "0x10": "0x10", "0x1p4": "0x1p4", "1_000": "1_000", "1.2.3": "1.2.3", "cat": "cat",
		`"007"`: "007", `"true"`: "true", `"a \"b\" é"`: `a "b" é`, `""`: "", `"`: `"`, `"a" b`: `"a" b`, `"a`: `"a`,
	}
	for text, want := range tests {
		t.Run(fmt.Sprintf("%q", text), func(t *testing.T) {
			t.Parallel()
			if got := payload.ParseValue(text).Any(); got != want {
				t.Errorf("got %T %v, want %T %v", got, got, want, want)
			}
		})
	}
}

func FuzzParseValue(f *testing.F) {
	for _, text := range []string{"true", "1", "-0.0", "1e309", "infinity", "0x1p-2", "\xff", `"1"`} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		value := payload.ParseValue(text)
		if n, ok := value.Float(); ok && (math.IsNaN(n) || math.IsInf(n, 0)) {
			t.Fatalf("%q is %v", text, n)
		}
		if got, ok := value.Any().(string); ok && got != text && !json.Valid([]byte(text)) {
			t.Fatalf("%q became %q", text, got)
		}
	})
}

func TestIntegerConversionLosesNothing(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		value payload.Value
		want  int64
		ok    bool
	}{
		"signed":            {payload.Int64(math.MinInt64), math.MinInt64, true},
		"unsigned":          {payload.Uint64(math.MaxInt64), math.MaxInt64, true},
		"unsigned, too big": {payload.Uint64(1 << 63), 0, false},
		"whole":             {payload.Double(-7), -7, true},
		"the last sure one": {payload.Double(1<<53 - 1), 1<<53 - 1, true},
		"no longer sure":    {payload.Double(1 << 53), 0, false},
		"negative zero":     {payload.Double(math.Copysign(0, -1)), 0, true},
		"a fraction":        {payload.Double(0.5), 0, false},
		"not a number":      {payload.Double(math.NaN()), 0, false},
		"infinite":          {payload.Double(math.Inf(1)), 0, false},
		"text":              {payload.String("1"), 0, false},
		"true":              {payload.Bool(true), 0, false},
		"nothing":           {payload.Value{}, 0, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, ok := test.value.Int()
			if ok != test.ok || ok && got != test.want {
				t.Errorf("got %d, %t; want %d, %t", got, ok, test.want, test.ok)
			}
		})
	}
}

func TestValuesConvertToFloats(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		value payload.Value
		want  float64
		ok    bool
	}{
		"signed":   {payload.Int64(-3), -3, true},
		"unsigned": {payload.Uint64(math.MaxUint64), 1 << 64, true},
		"double":   {payload.Double(0.25), 0.25, true},
		"text":     {payload.String("0.25"), 0, false},
		"true":     {payload.Bool(true), 0, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got, ok := test.value.Float(); got != test.want || ok != test.ok {
				t.Errorf("got %v, %t; want %v, %t", got, ok, test.want, test.ok)
			}
		})
	}
}

func TestValuesFormatAsText(t *testing.T) {
	t.Parallel()
	for want, value := range map[string]payload.Value{
		"true": payload.Bool(true), "false": payload.Bool(false), "-1": payload.Int64(-1),
		"18446744073709551615": payload.Uint64(math.MaxUint64), "0.1": payload.Double(0.1),
		"cat": payload.String("cat"), "": {},
	} {
		if got := value.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestValueOfAcceptsConfigurationTypes(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ in, want any }{
		"bool":          {true, true},
		"int":           {-1, int64(-1)},
		"int64":         {int64(2), int64(2)},
		"small uint64":  {uint64(3), int64(3)},
		"large uint64":  {uint64(math.MaxUint64), uint64(math.MaxUint64)},
		"float64":       {0.5, 0.5},
		"string":        {"x", "x"},
		"a list":        {[]any{1}, nil},
		"a map":         {map[string]any{}, nil},
		"nothing":       {nil, nil},
		"another width": {int8(1), nil},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := payload.ValueOf(test.in)
			if (err == nil) != (test.want != nil) {
				t.Fatalf("got %v, %v", got, err)
			}
			if err == nil && got.Any() != test.want {
				t.Errorf("got %v, want %v", got.Any(), test.want)
			}
		})
	}
}

func TestParametersRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := drawParameters(t)
		got, err := payload.ParametersFromProto(want.ToProto())
		if err != nil || !maps.Equal(got, want) {
			t.Fatalf("%v came back as %v, %v", want, got, err)
		}
	})
}

func TestParametersWithoutValueAreRejected(t *testing.T) {
	t.Parallel()
	for name, in := range map[string]map[string]*inferencev1.Value{
		"no kind":  {"p": {}},
		"nil":      {"p": nil},
		"too many": manyValues(payload.MaxParameters + 1),
	} {
		if got, err := payload.ParametersFromProto(in); err == nil {
			t.Errorf("%s: got %v", name, got)
		}
	}
}

func TestLaterLayersWin(t *testing.T) {
	t.Parallel()
	first := payload.Parameters{"a": payload.Int64(1), "b": payload.Int64(1)}
	second := payload.Parameters{"b": payload.Int64(2), "c": payload.Int64(2)}
	got := payload.Merge(nil, first, nil, second)
	want := payload.Parameters{"a": payload.Int64(1), "b": payload.Int64(2), "c": payload.Int64(2)}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	got["a"] = payload.String("changed")
	if first["a"] != payload.Int64(1) || second["b"] != payload.Int64(2) {
		t.Error("the layers share memory with what they were merged into")
	}
	if payload.Merge(nil, payload.Parameters{}) != nil {
		t.Error("no parameters are not nil")
	}
}
