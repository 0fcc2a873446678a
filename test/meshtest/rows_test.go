package meshtest_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// doubling doubles tensors of rows of that shape, and tells of every batch.
func doubling(row []int64, seen func(in tensor.Tensor)) runner.Runner {
	shape := append([]int64{-1}, row...)
	spec := runner.Spec{
		Inputs:  []runner.PartSpec{{Name: "x", Datatype: tensor.FP32, Shape: shape}},
		Outputs: []runner.PartSpec{{Name: "y", Datatype: tensor.FP32, Shape: shape}},
	}
	return inproc.Rows(inproc.Settings{Spec: spec}, func(_ context.Context, in map[string]tensor.Tensor) (map[string]tensor.Tensor, error) {
		seen(in["x"])
		values, err := in["x"].FP32Values()
		if err != nil {
			return nil, err
		}
		doubled := make([]float32, len(values))
		for i, v := range values {
			doubled[i] = 2 * v
		}
		out, err := tensor.FromFP32(in["x"].Shape, doubled)
		return map[string]tensor.Tensor{"y": out}, err
	})
}

// numbered returns a tensor of the shape whose values tell it from others.
func numbered(t *testing.T, from int, shape ...int64) payload.Part {
	t.Helper()
	n, _ := tensor.Elements(shape)
	values := make([]float32, n)
	for i := range values {
		values[i] = float32(from + i)
	}
	made, err := tensor.FromFP32(shape, values)
	if err != nil {
		t.Fatal(err)
	}
	return payload.OfTensor("x", made)
}

// checkDoubled holds an answer against its input.
func checkDoubled(got []payload.Part, in payload.Part) error {
	if len(got) != 1 || got[0].Name != "y" || got[0].Tensor == nil {
		return fmt.Errorf("outputs %+v", got)
	}
	if !slices.Equal(got[0].Tensor.Shape, in.Tensor.Shape) {
		return fmt.Errorf("shape %v for an input of %v", got[0].Tensor.Shape, in.Tensor.Shape)
	}
	want, err := in.Tensor.FP32Values()
	if err != nil {
		return err
	}
	values, err := got[0].Tensor.FP32Values()
	if err != nil {
		return err
	}
	for i := range want {
		if values[i] != 2*want[i] {
			return fmt.Errorf("value %d is %g for %g", i, values[i], want[i])
		}
	}
	return nil
}

// Single rows and blocks of rows share a batch, and each caller gets its own
// rows in the rank that it sent.
func TestRowsShareABatchAndKeepTheirRank(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		const rows = 12
		bed.Host("double", doubling([]int64{4}, func(in tensor.Tensor) {
			if in.Rows() != rows {
				t.Errorf("a batch of shape %v, not of %d rows", in.Shape, rows)
			}
		}), meshtest.Batch(batch.Settings{Mode: batch.Window, MaxSize: rows, MaxWait: time.Hour}))
		g := bed.Gateway(nil)
		var calls sync.WaitGroup
		for i, shape := range [][]int64{{4}, {4}, {1, 4}, {2, 4}, {3, 4}, {4, 4}} {
			calls.Go(func() {
				in := numbered(t, 100*i, shape...)
				response, err := g.Service().Infer(t.Context(), &request.Request{Pipeline: "stage:double", Inputs: []payload.Part{in}})
				if err != nil {
					t.Errorf("%v: %v", shape, err)
					return
				}
				if err := checkDoubled(response.Outputs, in); err != nil {
					t.Errorf("%v: %v", shape, err)
				}
				if step := response.Timeline.Steps[0]; step.BatchRows != rows || step.BatchSize != 6 {
					t.Errorf("%v: a batch of %d items and %d rows", shape, step.BatchSize, step.BatchRows)
				}
			})
		}
		calls.Wait()
	})
}

func TestDifferentShapesNeverShareABatch(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	var mu sync.Mutex
	widths := map[int64]int{}
	bed.Host("double", doubling([]int64{-1}, func(in tensor.Tensor) {
		mu.Lock()
		defer mu.Unlock()
		widths[in.Shape[1]]++
	}), meshtest.Batch(batch.Settings{MaxSize: 8, MaxWait: 5 * time.Millisecond}))
	g := bed.Gateway(nil)
	const each = 60
	var calls sync.WaitGroup
	for i := range 3 * each {
		calls.Go(func() {
			width, rows := int64(1+i%3), int64(1+i%2)
			in := numbered(t, i, rows, width)
			response, err := g.Service().Infer(t.Context(), &request.Request{Pipeline: "stage:double", Inputs: []payload.Part{in}})
			if err != nil {
				t.Errorf("%d: %v", i, err)
				return
			}
			if err := checkDoubled(response.Outputs, in); err != nil {
				t.Errorf("%d: %v", i, err)
			}
		})
	}
	calls.Wait()
	if len(widths) != 3 {
		t.Errorf("batches by width: %v", widths)
	}
}

func TestItemLargerThanABatchIsRejected(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	bed.Host("double", doubling([]int64{4}, func(tensor.Tensor) {}), meshtest.Batch(batch.Settings{MaxSize: 8}))
	g := bed.Gateway(nil)
	for _, test := range []struct {
		name   string
		shape  []int64
		reason fault.Reason
	}{
		{"as large as may be", []int64{8, 4}, ""},
		{"one row more", []int64{9, 4}, fault.PayloadTooLarge},
		{"no rows", []int64{0, 4}, fault.InvalidInput},
		{"another row", []int64{1, 5}, fault.InvalidInput},
		{"rank too high", []int64{1, 1, 4}, fault.InvalidInput},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := numbered(t, 0, test.shape...)
			a := infer(t.Context(), g, &request.Request{Pipeline: "stage:double", Inputs: []payload.Part{in}})
			if test.reason != "" {
				a.checkFault(t, test.reason)
				return
			}
			if err := checkDoubled(a.checkOK(t).response.Outputs, in); err != nil {
				t.Error(err)
			}
		})
	}
}

// A pipeline hands tensors on from stage to stage.
func TestTensorsPassThroughStages(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		bed.Host("first", doubling([]int64{2}, func(tensor.Tensor) {}))
		bed.Host("second", doubling([]int64{2}, func(tensor.Tensor) {}))
		g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("both", "first", "second")})
		for _, shape := range [][]int64{{2}, {1, 2}, {5, 2}} {
			in := numbered(t, 1, shape...)
			a := infer(t.Context(), g, &request.Request{Pipeline: "both", Inputs: []payload.Part{in}}).checkOK(t)
			values, err := in.Tensor.FP32Values()
			if err != nil {
				t.Fatal(err)
			}
			for i := range values {
				values[i] *= 2
			}
			once, err := tensor.FromFP32(shape, values)
			if err != nil {
				t.Fatal(err)
			}
			if err := checkDoubled(a.response.Outputs, payload.OfTensor("x", once)); err != nil {
				t.Errorf("%v: %v", shape, err)
			}
		}
	})
}
