package item

import (
	"math"
	"reflect"
	"testing"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

func TestPaddedExtentsAreThoseOfOneRow(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		axis  runner.BatchAxis
		want  runner.PartSpec
		shape []int64
		out   []batch.Padded
	}{
		"rows":             {runner.BatchRows, runner.PartSpec{Shape: []int64{-1, -1, 3}, PadTo: 1}, []int64{2, 5, 3}, []batch.Padded{{Name: "x", Shape: []int64{5, 3}, ElementSize: 4}}},
		"no rows":          {runner.BatchNone, runner.PartSpec{Shape: []int64{-1, -1}, PadTo: 1}, []int64{2, 5}, []batch.Padded{{Name: "x", Shape: []int64{2, 5}, ElementSize: 4}}},
		"rounded up":       {runner.BatchRows, runner.PartSpec{Shape: []int64{-1, -1, 3}, PadTo: 8}, []int64{2, 9, 3}, []batch.Padded{{Name: "x", Shape: []int64{16, 3}, ElementSize: 4}}},
		"a multiple":       {runner.BatchRows, runner.PartSpec{Shape: []int64{-1, -1}, PadTo: 8}, []int64{2, 16}, []batch.Padded{{Name: "x", Shape: []int64{16}, ElementSize: 4}}},
		"the highest":      {runner.BatchNone, runner.PartSpec{Shape: []int64{-1, -1}, PadTo: 1}, []int64{math.MaxInt64, 0}, []batch.Padded{{Name: "x", Shape: []int64{math.MaxInt64 - 1, 0}, ElementSize: 4}}},
		"a list":           {runner.BatchRows, runner.PartSpec{Shape: []int64{-1, -1}, Variable: true}, []int64{2, 9}, nil},
		"one that is left": {runner.BatchRows, runner.PartSpec{Shape: []int64{-1, -1}, PadTo: 1, Optional: true}, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			row.want.Name, row.want.Datatype = "x", tensor.FP32
			var inputs []payload.Part
			if row.shape != nil {
				inputs = append(inputs, payload.OfTensor("x", tensor.Tensor{Datatype: tensor.FP32, Shape: row.shape}))
			}
			got := paddedOf(runner.Spec{BatchAxis: row.axis, Inputs: []runner.PartSpec{row.want}}, inputs)
			if !reflect.DeepEqual(got, row.out) {
				t.Errorf("got %v, want %v", got, row.out)
			}
		})
	}
}
