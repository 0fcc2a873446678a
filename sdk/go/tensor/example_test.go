package tensor_test

import (
	"fmt"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Axis 0 is rows: Concat makes one batch of several inputs, and Split takes it apart again.
func ExampleConcat() {
	one, err := tensor.FromFP32([]int64{1, 2}, []float32{1, 2})
	if err != nil {
		fmt.Println(err)
		return
	}
	two, err := tensor.FromFP32([]int64{2, 2}, []float32{3, 4, 5, 6})
	if err != nil {
		fmt.Println(err)
		return
	}
	batch, err := tensor.Concat([]tensor.Tensor{one, two})
	fmt.Println(batch.Datatype, batch.Shape, err)

	parts, err := tensor.Split(batch, []int64{1, 2})
	if err != nil {
		fmt.Println(err)
		return
	}
	values, err := parts[1].FP32Values()
	fmt.Println(values, err)
	// Output:
	// FP32 [3 2] <nil>
	// [3 4 5 6] <nil>
}
