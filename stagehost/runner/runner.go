// Package runner is the interface between a stage host and the code of a stage: slots
// and a sink.
//
// A host calls Acquire on a Runner again and again. Acquire blocks until a slot is
// idle, so work goes to the slot that is idle first. The host then passes the slot one
// Batch by Do, exactly once. The slot gives each item its outcome through the Sink: first chunks,
// if the stage streams, then exactly one outcome, an output or a fault. One bad item is
// one fault; its neighbours have their own outcomes. When Do returns, the slot is
// spent, and the runner offers it again by a later Acquire.
//
// An error of Do is about the batch as a whole, and about the items that it leaves
// without an outcome. The runner does not know which of them failed, so the host runs them again
// in halves until the bad one fails alone. An error that wraps ErrNotStarted means that
// none of them ran, and one that wraps ErrCrashed that a process ended while it ran
// them. An item without an outcome and without an error is an error of the runner.
//
// A runner may implement HealthReporter, HostAware, WorkerReporter, EngineReporter and Killer
// too, and ModelLoader where it holds several models.
//
// The tests of every implementation are in runner/runnertest.
package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"syscall"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Errors of a Slot's Do, for the items of a batch without an outcome.
var (
	// ErrNotStarted means that the items never ran.
	ErrNotStarted = errors.New("the batch did not start")
	// ErrCrashed means that the process of the batch ended, or had to be ended, before
	// it answered for the items: it crashed, was killed, froze, took too long or broke
	// its protocol. Any of the items may be the cause, or none. The host runs each of
	// them alone, never together again. The runner replaces the process by itself.
	ErrCrashed = errors.New("the process that ran the batch ended")
	// ErrOutOfMemory means that the batch was too large for the free memory.
	ErrOutOfMemory = errors.New("out of memory")
	// ErrBadOutput means that the stage's code returned an invalid output. The stage is
	// at fault, not the item.
	ErrBadOutput = errors.New("invalid output")
)

// Exception is an error that the stage's code raised, and did not write for callers: they get
// it only where the stage exposes errors. The fault or the error of a runner wraps it.
type Exception struct {
	// Type is the error's in its language; Traceback may be empty.
	Type, Message, Traceback string
}

// Error implements error.
func (e *Exception) Error() string {
	if e.Type == "" || e.Message == "" {
		return e.Type + e.Message
	}
	return e.Type + ": " + e.Message
}

// ExitError is how a process ended. An error that wraps ErrCrashed may wrap it.
type ExitError struct {
	// Code is -1 for a process that a signal ended.
	Code   int
	Signal syscall.Signal
}

// Error implements error.
func (e *ExitError) Error() string {
	switch {
	case e.Signal != 0:
		return "signal: " + e.Signal.String()
	case e.Code == 0:
		return "it exited unexpectedly with code 0"
	}
	return fmt.Sprintf("exit code %d", e.Code)
}

// ExitOf returns how the process of a crash ended, in words; empty where it did not by itself.
func ExitOf(err error) string {
	if exit, ok := errors.AsType[*ExitError](err); ok {
		return exit.Error()
	}
	return ""
}

// ErrStartFailed is wrapped by the error of a HealthReporter whose last start failed: it
// tries again, and may fail again.
var ErrStartFailed = errors.New("the last start failed")

// Errors of a Sink.
var (
	ErrOutcomeSet = errors.New("the item has its outcome already")
	ErrNoSuchItem = errors.New("the batch has no such item")
	ErrCancelled  = errors.New("the item was cancelled")
)

// Runner runs batches for one stage. A host starts and stops it once; the other methods
// are safe for concurrent use.
type Runner interface {
	// Spec returns the inputs and outputs of the stage. It is constant once Start has
	// returned.
	Spec() Spec
	// Concurrency is the number of slots. It is constant once Start has returned.
	Concurrency() int
	// Start loads, compiles and warms up. It returns when the runner is ready, or with
	// the reason why it cannot be. The context bounds the start alone.
	Start(ctx context.Context) error
	// Acquire returns an idle slot. It blocks until there is one or the context ends.
	// An error other than the context's is final.
	Acquire(ctx context.Context) (Slot, error)
	// Stop ends the runner; Acquire fails from then on. The host calls it after the
	// last Do has returned. It is safe on a runner that never started, and more than
	// once.
	Stop(ctx context.Context) error
}

// Slot is the right to run one batch.
type Slot interface {
	// Do runs the batch and returns when it has given every outcome that it will give. The
	// context ends when nobody wants any of the answers, or when the host gives up; a
	// host reports a runner as broken whose Do does not return within seconds of that.
	// Do is called at most once. Its goroutine runs other batches later, so Do gives
	// back what belongs to the goroutine, such as a locked thread.
	Do(ctx context.Context, batch Batch, sink Sink) error
	// Release gives the slot back unused.
	Release()
}

// Prefetcher is a Slot whose worker takes the batch that follows its own before that has
// ended.
type Prefetcher interface {
	Slot
	// Next returns the slot of the batch that follows. It is false where the worker takes
	// none, because it has one or the slot's batch has ended. Concurrency does not count it.
	Next() (PrefetchSlot, bool)
}

// PrefetchSlot is the right to hand over a batch before it can run. It runs when the one that
// it follows has ended, without a pause for the host between the two.
type PrefetchSlot interface {
	Prefetcher
	// DoNext is Do. It calls began when the batch begins, which does not block.
	DoNext(ctx context.Context, batch Batch, sink Sink, began func()) error
}

// Sink takes the chunks and outcomes of a batch's items. Its methods are safe for
// concurrent use and do not block on the network. What they are given does not change any
// more: the next stage or the caller may share its memory. It may share the inputs'.
type Sink interface {
	// Chunk sends part of item i's answer ahead of its outcome. An error means that it
	// was not sent, because nobody wants more of it or the parts cannot travel; the
	// runner should set the item's outcome.
	Chunk(i int, parts []payload.Part) error
	// SetOutcome gives item i its one outcome. It refuses a second one with ErrOutcomeSet, and
	// the host reports that as an error of the runner.
	SetOutcome(i int, o Outcome) error
}

// SpanSink is a Sink of a traced batch that takes the spans of the code that ran it.
type SpanSink interface {
	// AddSpans is called at most once, before the last outcome. Cut is the number of spans
	// that exceeded bounds: they were shortened or left out.
	AddSpans(spans []Span, cut int)
}

// Span is a timed part of a batch's run.
type Span struct {
	Name string
	// Parent is the index of an earlier span; -1 is the batch.
	Parent     int
	Start, End time.Time
	Attributes []attribute.KeyValue
	// Error is the type of the error that ended it; empty where none did.
	Error string
}

// Batch is a list of items that agree on model, datatypes, trailing shapes or content
// types, and on the parameters that the stage batches by.
type Batch struct {
	Items []Item
	// Rows is the sum of the items' rows.
	Rows int
	// Model is the same for all items.
	Model payload.ModelRef
	// Suspect is true for a batch of one item that may have crashed a process. A runner
	// whose processes run several batches at a time runs it alone, so that a crash
	// is not counted against another item.
	Suspect bool
	// Trace is the W3C traceparent of the batch's span; empty where no item is traced.
	Trace string
}

// Item is one request at one stage.
type Item struct {
	// RequestID is the ID by which the caller knows the request.
	RequestID string
	// Inputs fit the runner's Spec, in its order and with its ranks. A spec without
	// inputs gets the caller's parts as they came. All of an item is read-only: it shares
	// memory with the caller, or with other stages of the process, and the item may run
	// again.
	Inputs []payload.Part
	// Rows is the item's extent on the batch axis, 1 where there is none.
	Rows       int
	Parameters payload.Parameters
	Metadata   map[string]string
	Deadline   time.Time
	// Cancelled is closed when nobody waits for the item any more. It may be nil.
	Cancelled <-chan struct{}
}

// Input returns the input of that name.
func (it Item) Input(name string) (payload.Part, bool) { return payload.Find(it.Inputs, name) }

// Err returns nil while somebody waits for the item, and its fault otherwise: its batch or
// itself was cancelled, or its deadline has passed. Long work looks at it now and then.
func (it Item) Err(ctx context.Context) error {
	switch {
	case ctx.Err() != nil:
		return fault.From(ctx.Err())
	case !it.Deadline.IsZero() && !time.Now().Before(it.Deadline):
		return fault.From(context.DeadlineExceeded)
	}
	select {
	case <-it.Cancelled:
		return fault.New(fault.Cancelled, "the item was cancelled")
	default:
		return nil
	}
}

// Context returns a context that ends when the item is cancelled, too. The function ends the
// context and its goroutine.
func (it Item) Context(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-it.Cancelled:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		cancel()
		<-watched
	}
}

// Outcome is the result of one item: Fault, or else Parts.
type Outcome struct {
	Parts []payload.Part
	// Metadata goes to the caller beside the parts.
	Metadata map[string]string
	Fault    *fault.Fault
}

// Output returns the outcome of an item that succeeded.
func Output(parts ...payload.Part) Outcome { return Outcome{Parts: parts} }

// Failed returns the outcome of an item that failed.
func Failed(f *fault.Fault) Outcome { return Outcome{Fault: f} }

// FaultOf returns the fault that the caller of an item gets for a runner's error: the
// fault in it, or a fault of the reason that fits, with the error's text. The text of a
// crash is for the log only.
func FaultOf(err error) *fault.Fault {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	switch {
	case errors.Is(err, ErrCrashed):
		text := "the process that ran the item ended"
		if exit := ExitOf(err); exit != "" {
			text += ", " + exit
		}
		return fault.New(fault.RunnerCrashed, text).Caused(err)
	case errors.Is(err, ErrOutOfMemory):
		return fault.Newf(fault.RunnerOutOfMemory, "%w", err)
	case errors.Is(err, ErrBadOutput):
		return fault.Newf(fault.RunnerOutputInvalid, "%w", err)
	default:
		return fault.Newf(fault.RunnerFailed, "%w", err)
	}
}

// HealthReporter is a Runner that may be unable to serve for a while.
type HealthReporter interface {
	// Health returns nil as long as some slot becomes idle sooner or later, and
	// otherwise why none does. The channel is closed when the answer may have changed.
	Health() (changed <-chan struct{}, err error)
}

// HostAware is a Runner that uses what it knows about its host. SetHost is called once,
// before Start.
type HostAware interface{ SetHost(h HostInfo) }

// HostInfo describes the host of a runner.
type HostInfo struct {
	Stage, Host string
	// MaxSize is the rows of the largest batch.
	MaxSize int
	// Models is set for a stage that loads many models: the memory that they may take.
	Models *model.Size
	// ModelRoot is the folder of the models' files; empty where the stage has none.
	ModelRoot string
	// StartTimeout bounds the start of the runner.
	StartTimeout time.Duration
	// Complete, where set, returns the stage's full spec for the one that the runner
	// found, which the runner warms up by. It is a pure function; it returns a full spec
	// unchanged.
	Complete func(Spec) (Spec, error)
	Logger   *slog.Logger
	Meter    metric.Meter
}

// WorkerReporter is a Runner of processes that reports their states.
type WorkerReporter interface {
	Workers() []WorkerStatus
}

// WorkerStatus is the state of one of a runner's processes, or of a gang of them.
type WorkerStatus struct {
	// State is STARTUP, READY, ERROR, SHUTDOWN or DEAD.
	State string
	// Incarnation counts the starts of the worker.
	Incarnation uint64
	// Cause is why the worker is not ready, or what is wrong although it is.
	Cause string
}

// EngineReporter is a Runner that may run the same stage by different engines.
type EngineReporter interface {
	// Engine names what runs the batches, such as "onnxruntime 1.23.2, CPU, 2 threads", in
	// at most 200 bytes. Any goroutine may call it at any time; before Start has returned it may be
	// empty. Hosts of a stage should agree on the first word.
	Engine() string
}

// Killer is a Runner that can end its batches from outside.
type Killer interface {
	// Kill ends every running batch at once: Do returns an error that wraps ErrCrashed.
	// After it the host only stops the runner.
	Kill()
}

// Spec describes the inputs and outputs of a runner.
type Spec struct {
	// Inputs is empty where the runner takes anything.
	Inputs  []PartSpec
	Outputs []PartSpec
	// Parameters are those that the runner reads. It takes any where they are nil, and
	// none where they are empty.
	Parameters []ParameterSpec
	// BatchAxis is how items share a batch.
	BatchAxis BatchAxis
	// Stream is true for a runner that answers in chunks before its outcome. It gets
	// items one by one, and its stage is the last of a pipeline.
	Stream bool
	// OneByOne is true for a runner that runs the items of a batch one after the other, so
	// that a batch saves no more than messages.
	OneByOne bool
	// Examples are inputs that the runner can answer.
	Examples []Example
}

// BatchAxis is how items share a batch.
type BatchAxis uint8

const (
	// BatchNone keeps items apart: a batch is a list, and one item is one row.
	BatchNone BatchAxis = iota
	// BatchRows makes axis 0 of every tensor rows; items are concatenated on it.
	BatchRows
)

// String returns the word used in configuration: "none" or "rows".
func (a BatchAxis) String() string {
	if a == BatchRows {
		return "rows"
	}
	return "none"
}

// PartSpec describes one input or output: a tensor where Datatype is set, else a blob.
type PartSpec struct {
	Name string `yaml:"name"`
	// Datatype is empty for a blob.
	Datatype tensor.Datatype `yaml:"datatype"`
	// Shape of a tensor; -1 is any extent. With BatchRows axis 0 is rows.
	Shape []int64 `yaml:"shape"`
	// ContentTypes that a blob may have, e.g. "image/png" or "image/*"; empty means
	// any.
	ContentTypes []string `yaml:"content_types"`
	// Schema is a JSON Schema (2020-12) for a blob of JSON; empty means anything.
	Schema json.RawMessage
	// Variable lets extents of -1 differ within a batch. The runner gets the items'
	// tensors as they are, and joins them itself.
	Variable bool
	// PadTo is set where the runner joins such tensors by padding them to the longest extents
	// of the batch: a multiple to which it rounds these up. 0 means that it pads nothing.
	PadTo int64
	// Optional inputs may be missing.
	Optional    bool   `yaml:"optional"`
	Description string `yaml:"description"`
}

// IsTensor reports whether the spec is a tensor's.
func (s PartSpec) IsTensor() bool { return s.Datatype != "" }

// ParameterSpec describes one parameter that a runner reads.
type ParameterSpec struct {
	Name string
	// Type is the values that it may have.
	Type        payload.Type
	Description string
}

// Example is a set of inputs that the stage can answer.
type Example struct {
	Name   string
	Inputs []payload.Part
}
