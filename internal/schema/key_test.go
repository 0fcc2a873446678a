package schema_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// item has the inputs of a batch key.
type item struct {
	model      payload.ModelRef
	parts      []payload.Part
	parameters payload.Parameters
}

func (it item) key(t testing.TB, spec runner.Spec, batchBy ...string) string {
	t.Helper()
	f, err := contract(t, spec).Fit(it.parts, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return schema.Key(spec, it.model, f, it.parameters, batchBy)
}

func TestEquivalentItemsShareBatchKey(t *testing.T) {
	t.Parallel()
	rows := takes(runner.BatchRows, vector("x"))
	anyRows := runner.Spec{BatchAxis: runner.BatchRows}
	x := func(shape ...int64) item { return item{parts: []payload.Part{fp32("x", shape...)}} }
	typed := func(contentType string) item {
		return item{parts: []payload.Part{payload.OfBlob("b", contentType, []byte("data"))}}
	}
	with := func(p payload.Parameters) item { return item{parameters: p} }
	of := func(m payload.ModelRef) item { return item{model: m} }
	varies := func(shape ...int64) runner.Spec {
		return takes(runner.BatchRows, runner.PartSpec{Name: "x", Datatype: tensor.FP32, Shape: shape, Variable: true})
	}
	tests := map[string]struct {
		spec runner.Spec
		a, b item
		same bool
	}{
		"an extent that varies": {varies(-1, -1), x(1, 64), x(1, 63), true},
		"one that does not":     {varies(-1, -1, 4), x(1, 4, 4), x(1, 5, 4), true},
		"any, not to vary":      {takes(runner.BatchRows, runner.PartSpec{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, -1}}), x(1, 64), x(1, 63), false},
		"other rows":            {rows, x(1, 64), x(5, 64), true},
		"a row without axis 0":  {rows, x(64), x(5, 64), true},
		"another name":          {runner.Spec{}, x(64), item{parts: []payload.Part{fp32("y", 64)}}, false},
		"one and only name":     {rows, x(1, 64), item{parts: []payload.Part{fp32("", 1, 64)}}, true},
		"other trailing axes":   {anyRows, x(1, 64), x(1, 63), false},
		"another rank":          {anyRows, x(1, 64), x(1, 64, 1), false},
		"other lists":           {runner.Spec{}, x(1, 64), x(5, 64), false},
		"another datatype":      {anyRows, x(2, 4), item{parts: []payload.Part{filled("x", tensor.Int32, 0, 2, 4)}}, false},
		"other bytes":           {anyRows, x(2, 4), item{parts: []payload.Part{filled("x", tensor.FP32, 1, 2, 4)}}, true},
		"the same type":         {runner.Spec{}, typed("image/png"), typed("image/png"), true},
		"another type":          {runner.Spec{}, typed("image/png"), typed("image/jpeg"), false},
		"an optional one more":  {takes(runner.BatchRows, vector("x"), optional(vector("y"))), x(1, 64), item{parts: []payload.Part{fp32("x", 1, 64), fp32("y", 1, 64)}}, false},
		"another model":         {runner.Spec{}, of(payload.ModelRef{Model: "a"}), of(payload.ModelRef{Model: "b"}), false},
		"an alias of the name":  {runner.Spec{}, of(payload.ModelRef{Model: "a"}), of(payload.ModelRef{Alias: "a"}), false},
		"another version":       {runner.Spec{}, of(payload.ModelRef{Model: "a", Version: "1"}), of(payload.ModelRef{Model: "a", Version: "2"}), false},
		"model and version run": {runner.Spec{}, of(payload.ModelRef{Model: "a", Version: "bc"}), of(payload.ModelRef{Model: "ab", Version: "c"}), false},
		"a named parameter":     {runner.Spec{}, with(payload.Parameters{"p": payload.Int64(1)}), with(payload.Parameters{"p": payload.Int64(2)}), false},
		"of another kind":       {runner.Spec{}, with(payload.Parameters{"p": payload.Int64(1)}), with(payload.Parameters{"p": payload.String("1")}), false},
		"a parameter not named": {runner.Spec{}, with(payload.Parameters{"q": payload.Int64(1)}), with(payload.Parameters{"q": payload.Int64(2)}), true},
		"a name like a key":     {runner.Spec{}, item{parts: []payload.Part{text(`a"|"b`, "")}}, item{parts: []payload.Part{text("a", ""), text("b", "")}}, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, b := test.a.key(t, test.spec, "p"), test.b.key(t, test.spec, "p")
			if (a == b) != test.same {
				t.Errorf("keys %q and %q", a, b)
			}
		})
	}
}

func drawParts(t *rapid.T) []payload.Part {
	names := rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"x", "y", ""}), 0, 2, rapid.ID).Draw(t, "names")
	out := make([]payload.Part, len(names))
	rows := rapid.Int64Range(1, 2).Draw(t, "rows")
	for i, name := range names {
		if rapid.IntRange(0, 4).Draw(t, "kind") == 0 {
			out[i] = payload.OfBlob(name, rapid.SampledFrom([]string{"", "a/b", "a/c"}).Draw(t, "type"), nil)
			continue
		}
		shape := rapid.SliceOfN(rapid.Int64Range(0, 3), 0, 2).Draw(t, "trailing")
		if rapid.IntRange(0, 3).Draw(t, "axis 0") > 0 {
			shape = append([]int64{rows}, shape...)
		}
		out[i] = filled(name, rapid.SampledFrom([]tensor.Datatype{tensor.FP32, tensor.Int32}).Draw(t, "datatype"), 0, shape...)
	}
	return out
}

func TestItemsWithSameKeyCanBeJoined(t *testing.T) {
	t.Parallel()
	specs := []runner.Spec{
		{BatchAxis: runner.BatchRows},
		takes(runner.BatchRows, runner.PartSpec{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, -1}}),
		takes(runner.BatchRows, runner.PartSpec{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1}}),
		takes(runner.BatchRows, runner.PartSpec{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, 2}}, optional(runner.PartSpec{Name: "y", Datatype: tensor.FP32, Shape: []int64{-1, -1}})),
	}
	rapid.Check(t, func(t *rapid.T) {
		spec := rapid.SampledFrom(specs).Draw(t, "spec")
		a, errA := contract(t, spec).Fit(drawParts(t), nil, nil)
		b, errB := contract(t, spec).Fit(drawParts(t), nil, nil)
		if errA != nil || errB != nil {
			return
		}
		if schema.Key(spec, payload.ModelRef{}, a, nil, nil) != schema.Key(spec, payload.ModelRef{}, b, nil, nil) {
			return
		}
		if len(a.Inputs) != len(b.Inputs) {
			t.Fatalf("%d and %d inputs share a key", len(a.Inputs), len(b.Inputs))
		}
		for i := range a.Inputs {
			checkJoins(t, a, b, i)
		}
	})
}

func checkJoins(t *rapid.T, a, b schema.Fitted, i int) {
	x, y := a.Inputs[i], b.Inputs[i]
	if x.Name != y.Name || (x.Tensor == nil) != (y.Tensor == nil) || x.Blob.ContentType != y.Blob.ContentType {
		t.Fatalf("%v and %v share a key", x, y)
	}
	if x.Tensor == nil {
		return
	}
	whole, err := tensor.Concat([]tensor.Tensor{*x.Tensor, *y.Tensor})
	if err != nil || whole.Rows() != int64(a.Rows+b.Rows) {
		t.Fatalf("%v and %v share a key: %d rows, %v", x.Tensor.Shape, y.Tensor.Shape, whole.Rows(), err)
	}
	pieces, err := tensor.Split(whole, []int64{int64(a.Rows), int64(b.Rows)})
	if err != nil || len(pieces) != 2 {
		t.Fatalf("joined, and not split again: %v", err)
	}
}

func BenchmarkFitAndKey(b *testing.B) {
	spec := takes(runner.BatchRows, vector("x"))
	parts := []payload.Part{fp32("x", 64)}
	parameters := payload.Parameters{"threshold": payload.Double(0.5), "other": payload.Bool(true)}
	c := contract(b, spec)
	b.ReportAllocs()
	for b.Loop() {
		f, err := c.Fit(parts, nil, nil)
		if err != nil {
			b.Fatal(err)
		}
		schema.Key(spec, payload.ModelRef{Model: "m"}, f, parameters, []string{"threshold"})
	}
}
