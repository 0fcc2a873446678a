// Package worker runs Go code as a worker process of a stage: what a stage's host
// starts, hands batches to and takes results from. It speaks the worker protocol,
// sdk/PROTOCOL.md, and needs the standard library only.
//
//	func main() {
//		os.Exit(worker.Main(worker.Settings{
//			Name:    "mean",
//			Spec:    worker.Spec{Inputs: ..., Outputs: ...},
//			Setup:   func(ctx context.Context, start *worker.Start) error { ... },
//			Predict: func(ctx context.Context, b *worker.Batch) (worker.Outputs, error) { ... },
//		}))
//	}
//
// Setup is called once, and loads what is needed; Start has the options of the
// stage's configuration, the devices and the place in a gang. Predict is called
// for each batch: Batch.Tensor is one input of all items, joined on axis 0, and
// Item.Tensor and Item.Blob are those of one item. It returns outputs in either
// way, see Outputs.
//
// # Streams
//
// Settings.Stream, in place of Predict, answers one item in chunks, such as the
// tokens of a model of language:
//
//	Stream: func(ctx context.Context, item *worker.Item, out *worker.Stream) error {
//		for word := range words(ctx, item) {
//			if err := out.Text("text", word); err != nil {
//				return err
//			}
//		}
//		return nil
//	}
//
// What is sent reaches the caller while the function goes on. The whole answer
// follows by itself when it returns, for callers that do not take chunks: text and
// other blobs joined, documents of JSON and of MessagePack as a list, tensors on axis
// 0; see Settings.ChunksOnly. Its context ends within milliseconds when the caller is gone,
// and Send fails then; what was sent until then is no whole answer, whatever the
// function returns. An error is the end of that item; a *Fault is told to the caller
// as it is.
//
// # What may go wrong
//
// One item's failure is its own: Item.Fail gives it a fault, and its row of the
// outputs does not matter. An error that Predict returns, or a panic, is one of
// the batch as a whole: the host runs its items again in halves until it knows
// which one it is. One that wraps ErrOutOfMemory blames nobody: the host runs
// smaller batches. A *Fault that Predict returns for a batch of one item is that
// item's.
//
// # Calling off
//
// The context of Predict ends when nobody waits for any of the items any more, or
// when the process has to end; Item.Context does when nobody waits for that item.
// Predict may look at neither.
//
// # Concurrency
//
// Predict, or Stream, is called by as many goroutines at a time as Settings.Slots
// says, one by default. The methods of a batch, its items and a stream may be called
// concurrently, until the function returns. Inputs are read-only, and may be kept.
//
// # Ending
//
// Main ends the process with 0 when it was asked to leave, by the host or by a
// signal, and finished what it had in time; ExitCode has the other codes. When the
// host is gone, whatever Predict does, it ends within a second, and takes its
// process group with it if it leads one.
//
// # Gangs
//
// Every rank of a gang gets every batch. What counts is what rank 0 answers; the
// outputs of the others are dropped.
package worker
