// Package onnx runs ONNX models in the host's own process, in Go alone: there
// is no library to install and nothing to link. It suits small networks; large
// ones belong in a worker with a runtime made for the hardware.
//
//	classify:
//	  runner:
//	    onnx:
//	      model: digits.onnx
//	      max_rows: 64
//
// The keys are those of Settings. New takes them, Start reads the model,
// compiles it and runs it once for every batch size that it will use, so that
// no request pays for that. Names, datatypes and shapes are the model's own and
// are the runner's Spec once Start has returned.
//
// # What a model must be
//
// Axis 0 of every input and output is rows and must be dynamic; rows must not
// influence one another. A model that was exported with a fixed batch is
// refused, and so is one with an output that has no rows. Other dynamic axes
// are given their extents by the key axes. Weights lie in the file itself.
// Datatypes are FP32, FP64, BOOL and the integers.
//
// Operators that the Go implementation lacks are refused by Start, all of them
// at once, each with the node that needs it:
//
//	digits.onnx: 2 nodes need operators that are not supported here:
//	  node "grid": GridSample
//	  node "fused": com.microsoft.FusedGemm
//
// Models of operator set 13 and later are what this is tested with; compare an
// older one's answers with its framework's once.
//
// # How a batch runs
//
// The batch is cut into slices of at most max_rows, and each is padded, with
// copies of its last row, to the next power of two. A tensor that does not fit
// the model is refused as INVALID_INPUT, and a panic beneath is an error of the
// batch. Batches may run at the same time, as many as concurrency says; each
// also uses several cores by itself where the network is large enough. Dense
// layers run fastest as Gemm with transB=1, as PyTorch exports them: all other
// weights are transposed anew for every batch.
package onnx
