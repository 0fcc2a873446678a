// Package worker runs Go code as a worker process of a stage: the process that a
// stage's host starts, sends batches to and takes results from. It implements the worker
// protocol, sdk/PROTOCOL.md, and needs the standard library only.
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
// Setup is called once, and loads what Predict needs. Start has the options of the
// stage's configuration, the devices and the place in a gang. Predict is called for each
// batch: Batch.Tensor is one input of all items, joined on axis 0; Item.Tensor and
// Item.Blob are the input of one item. It returns outputs in either form, see Outputs.
//
// # Streams
//
// Settings.Stream, in place of Predict, answers one item in chunks, such as the tokens
// of a language model:
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
// A chunk reaches the caller while the function goes on. When it returns, the package
// sends the whole answer for callers that do not take chunks: text and other blobs
// joined, documents of JSON and of MessagePack as a list, tensors joined on axis 0; see
// Settings.ChunksOnly. Its context ends within milliseconds when the item is cancelled,
// and Send fails then; the item fails, whatever the function returns. An error ends the
// item; the caller gets a *Fault as it is.
//
// # Models
//
// Settings.Models makes a worker load and unload several models while batches run. Batch.Loaded
// is the model of a batch:
//
//	Models: &worker.Models{Load: func(ctx context.Context, m *worker.Model) (err error) {
//		path, err := worker.Below(root, m.Source)
//		if err == nil {
//			m.Value, err = read(path)
//		}
//		return err
//	}}
//
// # Failures
//
// Item.Fail gives one item a fault; its rows of the outputs do not matter. An error that
// Predict returns, or a panic, fails the batch: the host runs its items again in halves
// until it has found the bad one. An error that wraps ErrOutOfMemory counts against no item:
// the host runs smaller batches. A *Fault that Predict returns for a batch of one item is
// that item's.
//
// # Spans
//
// Where a request of the batch is traced, its trace shows how long Predict or Stream took,
// and the spans that these begin by Batch.Span and Item.Span. The host exports them.
//
// # Cancellation
//
// The context of Predict ends when all items are cancelled, or when the process has to
// end; Item.Context ends when that item is cancelled. Predict may ignore both.
//
// # Concurrency
//
// Predict, or Stream, is called by as many goroutines at a time as Settings.Slots,
// one by default. The methods of a batch, its items and a stream are safe for concurrent
// use until the function returns. Inputs are read-only, and may be kept.
//
// # Exit
//
// Main returns 0 when the host or a signal asked it to exit and it finished its batches
// in time; ExitCode has the other codes. When the host is gone, it returns within a
// second, whatever Predict does, and kills its process group if it leads one.
//
// # Gangs
//
// Every rank of a gang gets every batch. Rank 0 answers; the outputs of the others are
// dropped.
package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Limits of a worker.
const (
	// defaultGrace is the default of Settings.Grace.
	defaultGrace = 5 * time.Second
	// cancelGrace is how long batches have to end that were cancelled because the
	// worker exits. It keeps the promise of a second after the host is gone.
	cancelGrace = time.Second
	// errorGrace bounds the write of the error that ends the worker.
	errorGrace = time.Second / 2
	// maxTimeout bounds the timeouts of a host: about a hundred years, in milliseconds.
	maxTimeout = 100 * 366 * 24 * 3600 * 1000
	// maxText bounds a text in a message, in bytes, so that it fits a header.
	maxText = 64 << 10
	// readBuffer is the size of the read buffer; a batch of 32 KiB fits.
	readBuffer = 64 << 10
)

var (
	// ErrNoHost means that the process was not started by a stage's host.
	ErrNoHost = errors.New("STAGEMESH_SOCKET is not set: a worker is started by the host of a stage, see sdk/PROTOCOL.md")
	// ErrHostGone means that the connection or the lifeline ended although nobody had
	// asked the worker to exit.
	ErrHostGone = errors.New("the host is gone")
	// ErrUnfinished means that the worker was asked to exit and did not finish in time.
	ErrUnfinished = errors.New("it did not finish in time")
	// ErrRefused means that the host refuses this worker, and has its reason.
	ErrRefused = errors.New("the host refuses")

	errEnvironment = errors.New("environment")
	errMisused     = errors.New("worker: Settings")
	errNoModels    = errors.New("the stage has one model, and the worker loads several: give the stage a section models")
	errNoChunks    = errors.New("the host does not accept chunks, and the worker streams: set Predict")
	// errAsked ends the life of a session because the worker was asked to exit.
	errAsked = errors.New("the worker was asked to leave")
)

// Settings describe a worker.
type Settings struct {
	// Name is the worker's name in the host's log.
	Name string
	// Spec describes its inputs and outputs. Setup may change it.
	Spec Spec
	// Slots is how many batches Predict runs at a time, or how many streams run at the
	// same time, each on a goroutine; 0 means 1. The stage's configuration may allow
	// fewer.
	Slots int
	// Setup loads what Predict or Stream needs; it may be nil. Its context ends when the
	// worker is asked to exit. A worker whose Setup fails exits.
	Setup func(context.Context, *Start) error
	// Predict runs a batch.
	Predict func(context.Context, *Batch) (Outputs, error)
	// Stream, in place of Predict, answers one item in chunks. Its context ends when the
	// item is cancelled. Items are never joined then: Spec.BatchAxis is None, whatever is
	// set.
	Stream func(context.Context, *Item, *Stream) error
	// Models, where set, load and unload the models of the batches.
	Models *Models
	// ChunksOnly leaves out the whole answer of a stream: callers that do not take chunks
	// get nothing.
	ChunksOnly bool
	// Grace is how long batches may take to finish after a signal; 0 means 5 s. A host
	// sends its own limit.
	Grace time.Duration
	// Getenv returns the variables that the host starts the process with; nil means
	// os.Getenv.
	Getenv func(string) string
}

func (s Settings) withDefaults() (Settings, error) {
	switch {
	case s.Predict == nil && s.Stream == nil:
		return s, fmt.Errorf("%w.Predict is nil, and Stream too", errMisused)
	case s.Predict != nil && s.Stream != nil:
		return s, fmt.Errorf("%w: Predict and Stream are both set", errMisused)
	case s.ChunksOnly && s.Stream == nil:
		return s, fmt.Errorf("%w.ChunksOnly goes with Stream", errMisused)
	case s.Models != nil && s.Models.Load == nil:
		return s, fmt.Errorf("%w.Models.Load is nil", errMisused)
	case s.Slots < 0 || s.Slots > frame.MaxSlots:
		return s, fmt.Errorf("%w.Slots: %d is not between 1 and %d", errMisused, s.Slots, frame.MaxSlots)
	}
	s.Slots = max(1, s.Slots)
	if s.Setup == nil {
		s.Setup = func(context.Context, *Start) error { return nil }
	}
	if s.Grace <= 0 {
		s.Grace = defaultGrace
	}
	if s.Getenv == nil {
		s.Getenv = os.Getenv
	}
	return s, nil
}

// Start is what Setup gets.
type Start struct {
	Environment
	// Options are the stage's options in its configuration: a JSON object. See Decode.
	Options json.RawMessage
	// Devices are the worker's, as its configuration names them.
	Devices []string
	// Slots is how many batches Predict gets at a time, MaxSize the rows of the largest
	// batch.
	Slots, MaxSize int
	// Memory is what the models may take; 0 is as much as there is.
	Memory Memory
	// Spec may be changed until Setup returns.
	Spec *Spec

	progress func(string)
}

// Decode reads the options into a struct, and refuses keys that it does not have.
func (s *Start) Decode(into any) error {
	d := json.NewDecoder(bytes.NewReader(s.Options))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("options: %w", err)
	}
	return nil
}

// Progress sends the host a progress message, for a person who waits.
func (s *Start) Progress(message string) { s.progress(message) }

// Environment is what the host passes in the environment of the process.
type Environment struct {
	// Stage is the stage's name, Worker the index of the worker in it, from 0, and
	// Incarnation the number of its start, from 1. For logs.
	Stage               string
	Worker, Incarnation int
	// Rank, LocalRank and WorldSize are the place in a gang: 0, 0 and 1 for a process
	// that is alone, which has no master.
	Rank, LocalRank, WorldSize int
	MasterAddr, MasterPort     string

	socket string
	// lifeline is a file descriptor; -1 is none.
	lifeline int
}

func readEnvironment(getenv func(string) string) (Environment, error) {
	e := Environment{
		Stage: getenv("STAGEMESH_STAGE"), MasterAddr: getenv("MASTER_ADDR"), MasterPort: getenv("MASTER_PORT"),
		socket: getenv("STAGEMESH_SOCKET"),
	}
	if e.socket == "" {
		return e, ErrNoHost
	}
	for _, v := range []struct {
		name     string
		to       *int
		fallback int
	}{
		{"STAGEMESH_WORKER", &e.Worker, 0},
		{"STAGEMESH_INCARNATION", &e.Incarnation, 1},
		{"STAGEMESH_LIFELINE", &e.lifeline, -1},
		{"RANK", &e.Rank, 0},
		{"LOCAL_RANK", &e.LocalRank, 0},
		{"WORLD_SIZE", &e.WorldSize, 1},
	} {
		*v.to = v.fallback
		text := getenv(v.name)
		if text == "" {
			continue
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 {
			return e, fmt.Errorf("%w: %s is %q, and not a number", errEnvironment, v.name, text)
		}
		*v.to = n
	}
	if e.Rank >= e.WorldSize {
		return e, fmt.Errorf("%w: RANK is %d in a gang of %d", errEnvironment, e.Rank, e.WorldSize)
	}
	return e, nil
}

// PartSpec describes one input or output: a tensor where it has a datatype, else a blob.
type PartSpec = frame.PartSpec

// ParameterSpec describes one parameter that a worker reads.
type ParameterSpec = frame.ParameterSpec

// Spec describes the inputs and outputs of a worker. An empty list means anything.
type Spec struct {
	// BatchAxis is Rows, the default, where axis 0 of every tensor is rows and items are
	// joined on it, or None.
	BatchAxis       string
	Inputs, Outputs []PartSpec
	// Parameters are those that the worker reads. It takes any where they are nil, and
	// none where they are empty.
	Parameters []ParameterSpec
	// Examples are inputs that the worker can answer. The host warms the worker up with
	// them.
	Examples []Example
}

// Values of Spec.BatchAxis, and of the Variable of a PartSpec.
const (
	Rows  = frame.Rows
	None  = frame.None
	Exact = frame.Exact
	List  = frame.List
	Pad   = frame.Pad
)

// Example is the inputs of one item.
type Example struct {
	Name    string
	Tensors map[string]tensor.Tensor
	Blobs   map[string]Blob
}

// Blob is bytes of some type, such as image/png.
type Blob struct {
	ContentType string
	Data        []byte
}

// encode returns the spec as it is sent, and the bytes of its examples.
func (s *Spec) encode() (*frame.Spec, *frame.Body) {
	out := &frame.Spec{BatchAxis: s.BatchAxis, Inputs: s.Inputs, Outputs: s.Outputs, Parameters: s.Parameters}
	body := &frame.Body{}
	for _, e := range s.Examples {
		example := frame.Example{Name: e.Name}
		for _, name := range slices.Sorted(maps.Keys(e.Tensors)) {
			example.Inputs = append(example.Inputs, body.Tensor(name, -1, e.Tensors[name]))
		}
		for _, name := range slices.Sorted(maps.Keys(e.Blobs)) {
			blob := e.Blobs[name]
			example.Inputs = append(example.Inputs, body.Blob(name, -1, blob.ContentType, blob.Data))
		}
		out.Examples = append(out.Examples, example)
	}
	return out, body
}

// Exit codes of a worker. Workers in Python have the same.
const (
	// ExitAsked is the code of a worker that was asked to exit, and finished.
	ExitAsked = 0
	// ExitFailed is the code of a worker that could not start.
	ExitFailed = 1
	// ExitMisused is the code of a process that no host started, or with invalid
	// settings.
	ExitMisused = 2
	// ExitHostGone is the code of a worker whose host is gone.
	ExitHostGone = 3
	// ExitViolation is the code of a worker whose host breaks the protocol.
	ExitViolation = 4
	// ExitUnfinished is the code of a worker that was asked to exit, and did not finish.
	ExitUnfinished = 5
)

// ExitCode is the code of a process whose Serve returned err.
func ExitCode(err error) int {
	switch {
	case err == nil:
		return ExitAsked
	case errors.Is(err, ErrNoHost), errors.Is(err, errEnvironment), errors.Is(err, errMisused):
		return ExitMisused
	case errors.Is(err, ErrHostGone):
		return ExitHostGone
	case errors.Is(err, ErrUnfinished):
		return ExitUnfinished
	case errors.Is(err, frame.ErrViolation), errors.Is(err, ErrRefused):
		return ExitViolation
	}
	return ExitFailed
}

// Main runs a worker's process. It serves until the host, SIGTERM or SIGINT asks it to
// exit, prints an error on standard error, and returns the exit code.
//
//	func main() { os.Exit(worker.Main(settings)) }
func Main(settings Settings) int {
	// A second signal is caught too, and changes nothing.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	// The host reads what the worker prints; without a host, writing fails.
	signal.Ignore(syscall.SIGPIPE)
	err := Serve(ctx, settings)
	if err != nil {
		fmt.Fprintf(os.Stderr, "worker %s: %v\n", settings.Name, err)
	}
	if errors.Is(err, ErrHostGone) {
		endGroup()
	}
	return ExitCode(err)
}
