package payload_test

import (
	"fmt"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// A request has several named parts, each a blob or a tensor.
func ExampleFind() {
	scores, err := tensor.FromFP32([]int64{1, 2}, []float32{0.25, 0.75})
	if err != nil {
		fmt.Println(err)
		return
	}
	parts := []payload.Part{
		payload.OfBlob("text", "text/plain", []byte("hello")),
		payload.OfTensor("scores", scores),
	}
	part, ok := payload.Find(parts, "scores")
	fmt.Println(ok, part.Tensor.Datatype, part.Tensor.Shape)
	fmt.Println(payload.Size(parts), "bytes")
	// Output:
	// true FP32 [1 2]
	// 13 bytes
}

// Text from a flag or a query becomes a typed parameter.
func ExampleParseValue() {
	for _, text := range []string{"true", "3", "0.5", "fast"} {
		fmt.Printf("%T ", payload.ParseValue(text).Any())
	}
	// Output: bool int64 float64 string
}
