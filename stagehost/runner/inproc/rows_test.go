package inproc_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

func column(name string, optional bool) runner.PartSpec {
	return runner.PartSpec{Name: name, Datatype: tensor.Int64, Shape: []int64{-1}, Optional: optional}
}

func numbers(t testing.TB, values ...int64) tensor.Tensor {
	t.Helper()
	x, err := tensor.FromInt64([]int64{int64(len(values))}, values)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func rowItem(t testing.TB, columns map[string][]int64) runner.Item {
	t.Helper()
	out := runner.Item{}
	for _, name := range slices.Sorted(maps.Keys(columns)) {
		out.Inputs = append(out.Inputs, payload.OfTensor(name, numbers(t, columns[name]...)))
		out.Rows = len(columns[name])
	}
	return out
}

type tensors = map[string]tensor.Tensor

func TestRowsCallsOncePerBatch(t *testing.T) {
	t.Parallel()
	calls := 0
	r := inproc.Rows(inproc.Settings{Spec: runner.Spec{
		Inputs:  []runner.PartSpec{column("a", false), column("b", false)},
		Outputs: []runner.PartSpec{column("sum", false), column("a", false)},
	}}, func(_ context.Context, in tensors) (tensors, error) {
		calls++
		a, errA := in["a"].Int64Values()
		b, errB := in["b"].Int64Values()
		if err := errors.Join(errA, errB); err != nil {
			return nil, err
		}
		sums := make([]int64, len(a))
		for i := range a {
			sums[i] = a[i] + b[i]
		}
		return tensors{"sum": numbers(t, sums...), "a": in["a"], "beside": numbers(t)}, nil
	})
	if r.Spec().BatchAxis != runner.BatchRows {
		t.Errorf("the batch axis is %s", r.Spec().BatchAxis)
	}
	outcomes, err := do(t, r,
		rowItem(t, map[string][]int64{"a": {1, 2}, "b": {10, 20}}),
		rowItem(t, map[string][]int64{"a": {3}, "b": {30}}),
	)
	if err != nil || calls != 1 || len(outcomes) != 2 {
		t.Fatalf("%d calls, %d outcomes, %v", calls, len(outcomes), err)
	}
	for i, want := range []map[string][]int64{{"sum": {11, 22}, "a": {1, 2}}, {"sum": {33}, "a": {3}}} {
		if got := describe(t, outcomes[i].Parts); got != fmt.Sprint(want) {
			t.Errorf("item %d got %s, want %v", i, got, want)
		}
	}
}

func describe(t *testing.T, parts []payload.Part) string {
	t.Helper()
	out := map[string][]int64{}
	for _, p := range parts {
		values, err := p.Tensor.Int64Values()
		if err != nil {
			t.Fatal(err)
		}
		out[p.Name] = values
	}
	return fmt.Sprint(out)
}

func TestOptionalInputMayBeMissing(t *testing.T) {
	t.Parallel()
	spec := runner.Spec{
		Inputs:  []runner.PartSpec{column("a", false), column("b", true)},
		Outputs: []runner.PartSpec{column("a", false), column("b", true)},
	}
	r := inproc.Rows(inproc.Settings{Spec: spec}, func(_ context.Context, in tensors) (tensors, error) { return in, nil })
	outcomes, err := do(t, r, rowItem(t, map[string][]int64{"a": {1}}), rowItem(t, map[string][]int64{"a": {2}}))
	if err != nil || describe(t, outcomes[1].Parts) != "map[a:[2]]" {
		t.Errorf("got %v, %v", outcomes, err)
	}
}

func TestUnstackableBatchIsNotComputed(t *testing.T) {
	t.Parallel()
	spec := runner.Spec{Inputs: []runner.PartSpec{column("a", false), column("b", true)}, Outputs: []runner.PartSpec{column("a", false)}}
	whole := rowItem(t, map[string][]int64{"a": {1}, "b": {1}})
	tests := map[string]struct {
		items    []runner.Item
		wantText string
	}{
		"one without a needed input":   {[]runner.Item{whole, rowItem(t, map[string][]int64{"b": {1}})}, "input a: 1 of 2 items have it"},
		"one without an optional one":  {[]runner.Item{whole, rowItem(t, map[string][]int64{"a": {1}})}, "input b: 1 of 2 items have it"},
		"one whose shape is different": {[]runner.Item{whole, {Rows: 1, Inputs: []payload.Part{payload.OfTensor("a", tensor.Tensor{Datatype: tensor.Int64, Shape: []int64{1, 0}}), whole.Inputs[1]}}}, "input a: tensor 1"},
		"one that is a blob":           {[]runner.Item{{Rows: 1, Inputs: []payload.Part{payload.OfBlob("a", "", nil)}}}, "input a: 0 of 1"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := inproc.Rows(inproc.Settings{Spec: spec}, func(context.Context, tensors) (tensors, error) {
				t.Error("it is computed")
				return nil, nil
			})
			outcomes, err := do(t, r, test.items...)
			if err == nil || len(outcomes) != 0 || !strings.Contains(err.Error(), test.wantText) {
				t.Errorf("got %v, %v; want %q", outcomes, err, test.wantText)
			}
		})
	}
}

// What comes out wrong is wrong for every item: running the items again in
// halves would not help.
func TestUnsplittableResultIsBadOutput(t *testing.T) {
	t.Parallel()
	spec := runner.Spec{Inputs: []runner.PartSpec{column("x", false)}, Outputs: []runner.PartSpec{column("y", false)}}
	tests := map[string]struct {
		out      tensors
		wantText string
	}{
		"nothing":              {nil, "output y"},
		"under another name":   {tensors{"x": numbers(t, 1, 2, 3)}, "output y"},
		"fewer rows":           {tensors{"y": numbers(t, 1, 2)}, "3 rows"},
		"more rows":            {tensors{"y": numbers(t, 1, 2, 3, 4)}, "output y"},
		"a scalar":             {tensors{"y": {Datatype: tensor.Bool, Raw: []byte{1}}}, "output y"},
		"fewer bytes than due": {tensors{"y": {Datatype: tensor.Int64, Shape: []int64{3}}}, "output y"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := inproc.Rows(inproc.Settings{Spec: spec}, func(context.Context, tensors) (tensors, error) { return test.out, nil })
			outcomes, err := do(t, r, rowItem(t, map[string][]int64{"x": {1, 2}}), rowItem(t, map[string][]int64{"x": {3}}))
			if !errors.Is(err, runner.ErrBadOutput) || len(outcomes) != 0 || !strings.Contains(err.Error(), test.wantText) {
				t.Errorf("got %v, %v; want %q", outcomes, err, test.wantText)
			}
		})
	}
}

func BenchmarkRows32Items(b *testing.B) {
	spec := runner.Spec{
		Inputs:  []runner.PartSpec{{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, 1024}}},
		Outputs: []runner.PartSpec{{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, 1024}}},
	}
	r := inproc.Rows(inproc.Settings{Spec: spec}, func(_ context.Context, in tensors) (tensors, error) { return in, nil })
	items := make([]runner.Item, 32)
	for i := range items {
		x := tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{1, 1024}, Raw: make([]byte, 4096)}
		items[i] = runner.Item{Rows: 1, Inputs: []payload.Part{payload.OfTensor("x", x)}}
	}
	b.SetBytes(32 * 4096)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := do(b, r, items...); err != nil {
			b.Fatal(err)
		}
	}
}
