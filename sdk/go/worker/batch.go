package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

var (
	// ErrOutOfMemory means that a batch is too large for the free memory. It counts
	// against no item: the host runs the batch again in halves. Wrap it, or return it.
	ErrOutOfMemory = errors.New("out of memory")
	// ErrNoInput means that a batch or an item does not have an input.
	ErrNoInput = errors.New("there is none")

	errTwice     = errors.New("the input is there twice")
	errIsBlob    = errors.New("it is a blob, and not a tensor")
	errIsTensor  = errors.New("it is a tensor, and not a blob")
	errCancelled = errors.New("the item was cancelled")
)

// Fault is the outcome of one item that has no outputs. The caller gets it.
type Fault struct {
	// Reason is one of the protocol's, Message a sentence.
	Reason, Message string
	// Field is the input that caused the fault, if one did, or "parameters." and the name
	// of the parameter that did.
	Field string
}

// Error implements error.
func (f *Fault) Error() string {
	if f.Field != "" {
		return f.Reason + ": " + f.Field + ": " + f.Message
	}
	return f.Reason + ": " + f.Message
}

// InvalidInput is the fault of an input that cannot be used.
func InvalidInput(field, message string) *Fault {
	return &Fault{Reason: "INVALID_INPUT", Message: message, Field: field}
}

// SchemaViolation is the fault of an input that can be read, but does not fit the stage.
func SchemaViolation(field, message string) *Fault {
	return &Fault{Reason: "SCHEMA_VIOLATION", Message: message, Field: field}
}

// TooLarge is the fault of an item that needs more memory than there is, even alone.
func TooLarge(message string) *Fault {
	return &Fault{Reason: "RUNNER_OUT_OF_MEMORY", Message: message}
}

// Failed is the fault of an item that failed for another reason.
func Failed(message string) *Fault {
	return &Fault{Reason: "RUNNER_FAILED", Message: message}
}

// Batch is a list of items that run together.
type Batch struct {
	Items []*Item
	// Rows is the sum of the items' rows.
	Rows int
	// Model is the reference to a model in the request, if it has one. Loaded is the model that
	// it names, of a worker with Settings.Models.
	Model  *frame.Model
	Loaded *Model
	// Warmup is true where nobody waits for the answer.
	Warmup bool
	// Trace is the W3C traceparent of the batch's own span; empty where no item is traced.
	Trace string

	number uint64
	ctx    context.Context
	cancel context.CancelFunc
	inputs []*input

	mu sync.Mutex
	// wanted counts the items that are not cancelled.
	wanted   int
	faults   []*Fault
	metadata []map[string]string
	spans    []frame.Span
}

// Item is one request of a batch.
type Item struct {
	// ID is the request's, Rows the item's extent on axis 0.
	ID   string
	Rows int
	// Parameters are bool, int64, uint64 beyond that, float64 and string.
	Parameters map[string]any
	// InputParameters are those that the caller gave single inputs, by the input's name.
	InputParameters map[string]frame.Parameters
	Metadata        map[string]string
	// Deadline is until when somebody waits; zero is for ever.
	Deadline time.Time

	batch *Batch
	index int
	// The batch's mu guards these. The context is nil until somebody asks for it.
	cancelled bool
	ctx       context.Context
	cancel    context.CancelFunc
}

// newBatch returns a batch whose context ends with ctx.
func newBatch(ctx context.Context, m *frame.Predict, body []byte, axis string) (*Batch, error) {
	b := &Batch{
		Items: make([]*Item, len(m.Items)), Model: m.Model, Warmup: m.Warmup, Trace: m.Trace,
		number: m.Batch, wanted: len(m.Items),
	}
	now := time.Time{}
	items := make([]Item, len(m.Items))
	for i := range m.Items {
		from := &m.Items[i]
		items[i] = Item{
			ID: from.ID, Rows: max(1, from.Rows), Parameters: from.Parameters, InputParameters: from.InputParameters,
			Metadata: from.Metadata, batch: b, index: i,
		}
		if from.Timeout > 0 {
			if now.IsZero() {
				now = time.Now()
			}
			items[i].Deadline = now.Add(time.Duration(min(from.Timeout, maxTimeout)) * time.Millisecond)
		}
		b.Items[i] = &items[i]
		b.Rows += items[i].Rows
	}
	for i := range m.Parts {
		if err := b.addInput(&m.Parts[i], body, axis); err != nil {
			return nil, fmt.Errorf("%w: predict: parts[%d]: %w", frame.ErrViolation, i, err)
		}
	}
	b.ctx, b.cancel = context.WithCancel(ctx)
	return b, nil
}

// Tensor returns one input of all items: joined on axis 0 or, where the spec has no
// batch axis, stacked on a new one. It shares the bytes that came where those of the
// items follow each other, which is the rule. It fails for an item that lacks the input,
// or has one of another shape.
func (b *Batch) Tensor(name string) (tensor.Tensor, error) {
	in, err := b.input(name)
	if err != nil {
		return tensor.Tensor{}, err
	}
	return in.all()
}

func (b *Batch) input(name string) (*input, error) {
	for _, in := range b.inputs {
		if in.name == name {
			return in, nil
		}
	}
	return nil, fmt.Errorf("input %q: %w", name, ErrNoInput)
}

// cancelItems cancels items; nil is all.
func (b *Batch) cancelItems(indices []int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if indices == nil {
		for i := range b.Items {
			b.cancelItem(i)
		}
	}
	for _, i := range indices {
		b.cancelItem(i)
	}
	if b.wanted == 0 {
		b.cancel()
	}
}

func (b *Batch) cancelItem(index int) {
	if index >= len(b.Items) || b.Items[index].cancelled {
		return
	}
	item := b.Items[index]
	item.cancelled = true
	b.wanted--
	if item.cancel != nil {
		item.cancel()
	}
}

// failItems turns an error that is about items into their faults, and returns any other.
func (b *Batch) failItems(err error) error {
	b.mu.Lock()
	unwanted := b.wanted == 0
	b.mu.Unlock()
	fault, ok := errors.AsType[*Fault](err)
	switch {
	case ok && len(b.Items) == 1:
		b.Items[0].Fail(fault)
	case unwanted:
		for _, item := range b.Items {
			item.Fail(errCancelled)
		}
	default:
		return err
	}
	return nil
}

// Has reports whether the item has the input.
func (i *Item) Has(name string) bool {
	in, err := i.batch.input(name)
	return err == nil && (in.joined != nil || in.each[i.index] != nil)
}

// Tensor returns one input of the item.
func (i *Item) Tensor(name string) (tensor.Tensor, error) {
	in, err := i.batch.input(name)
	if err != nil {
		return tensor.Tensor{}, err
	}
	return in.tensor(i.index)
}

// Blob returns one input of the item.
func (i *Item) Blob(name string) (Blob, error) {
	in, err := i.batch.input(name)
	if err != nil {
		return Blob{}, err
	}
	return in.blob(i.index)
}

// Fail gives the item a fault in place of outputs: a *Fault, which the caller gets, or
// Failed with the text of another error. The first counts.
func (i *Item) Fail(err error) {
	fault, ok := errors.AsType[*Fault](err)
	if !ok || fault.Reason == "" {
		fault = Failed(err.Error())
	}
	b := i.batch
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.faults == nil {
		b.faults = make([]*Fault, len(b.Items))
	}
	if b.faults[i.index] == nil {
		b.faults[i.index] = fault
	}
}

// SetMetadata gives the caller a text beside the item's outputs.
func (i *Item) SetMetadata(name, value string) {
	b := i.batch
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.metadata == nil {
		b.metadata = make([]map[string]string, len(b.Items))
	}
	if b.metadata[i.index] == nil {
		b.metadata[i.index] = map[string]string{}
	}
	b.metadata[i.index][name] = value
}

// Context ends when the item is cancelled, or the batch ends.
func (i *Item) Context() context.Context {
	b := i.batch
	b.mu.Lock()
	defer b.mu.Unlock()
	if i.ctx == nil {
		i.ctx, i.cancel = context.WithCancel(b.ctx)
		if i.cancelled {
			i.cancel()
		}
	}
	return i.ctx
}

// Cancelled reports whether nobody waits for the item any more.
func (i *Item) Cancelled() bool {
	i.batch.mu.Lock()
	defer i.batch.mu.Unlock()
	return i.cancelled
}

// input is one input of all items.
type input struct {
	name  string
	batch *Batch
	axis  string
	body  []byte
	// joined is the tensor of all items; nil where they come one by one.
	joined *tensor.Tensor
	// split cuts joined into the items', once.
	split func() ([]tensor.Tensor, error)
	// each is the part of each item; nil for an item without one.
	each []*frame.Part
}

// addInput adds a part to the input of its name. An error is a violation of the
// protocol.
func (b *Batch) addInput(p *frame.Part, body []byte, axis string) error {
	at := slices.IndexFunc(b.inputs, func(in *input) bool { return in.name == p.Name })
	if at < 0 {
		at = len(b.inputs)
		b.inputs = append(b.inputs, &input{name: p.Name, batch: b, axis: axis, body: body})
	}
	in := b.inputs[at]
	if in.joined != nil || p.Item == nil && in.each != nil {
		return errTwice
	}
	var t tensor.Tensor
	if p.IsTensor() {
		var err error
		if t, err = p.Tensor(body); err != nil {
			return err
		}
	}
	if p.Item == nil {
		in.joined, in.split = &t, sync.OnceValues(in.cut)
		return nil
	}
	if in.each == nil {
		in.each = make([]*frame.Part, len(b.Items))
	}
	if in.each[*p.Item] != nil {
		return errTwice
	}
	in.each[*p.Item] = p
	return nil
}

func (in *input) cut() ([]tensor.Tensor, error) {
	rows := make([]int64, len(in.batch.Items))
	for i, item := range in.batch.Items {
		rows[i] = int64(item.Rows)
	}
	return tensor.Split(*in.joined, rows)
}

func (in *input) errorf(format string, args ...any) error {
	return fmt.Errorf("input %q: %w", in.name, fmt.Errorf(format, args...))
}

func (in *input) blob(item int) (Blob, error) {
	switch {
	case in.joined != nil:
		return Blob{}, in.errorf("%w", errIsTensor)
	case in.each[item] == nil:
		return Blob{}, in.errorf("item %d: %w", item, ErrNoInput)
	case in.each[item].IsTensor():
		return Blob{}, in.errorf("%w", errIsTensor)
	}
	data, err := in.each[item].Bytes(in.body)
	return Blob{ContentType: in.each[item].ContentType, Data: data}, err
}

func (in *input) tensor(item int) (tensor.Tensor, error) {
	switch {
	case in.joined != nil:
		all, err := in.split()
		if err != nil {
			return tensor.Tensor{}, in.errorf("%w", err)
		}
		return all[item], nil
	case in.each[item] == nil:
		return tensor.Tensor{}, in.errorf("item %d: %w", item, ErrNoInput)
	case !in.each[item].IsTensor():
		return tensor.Tensor{}, in.errorf("%w", errIsBlob)
	}
	return in.each[item].Tensor(in.body)
}

// all returns the tensor of all items.
func (in *input) all() (tensor.Tensor, error) {
	if in.joined != nil {
		return *in.joined, nil
	}
	tensors := make([]tensor.Tensor, len(in.each))
	for i := range in.each {
		t, err := in.tensor(i)
		if err != nil {
			return tensor.Tensor{}, err
		}
		if in.axis == None {
			// Each of N becomes [1, ...], so that they stack on a new axis.
			if !slices.Equal(t.Shape, in.each[0].Shape) {
				return tensor.Tensor{}, in.errorf("item %d has shape %v, and item 0 %v", i, t.Shape, in.each[0].Shape)
			}
			t.Shape = append([]int64{1}, t.Shape...)
		}
		tensors[i] = t
	}
	if t, ok := in.joinInPlace(tensors); ok {
		return t, nil
	}
	t, err := tensor.Concat(tensors)
	if err != nil {
		return tensor.Tensor{}, in.errorf("%w", err)
	}
	return t, nil
}

// joinInPlace joins tensors whose bytes follow each other in the body, without a copy.
func (in *input) joinInPlace(tensors []tensor.Tensor) (tensor.Tensor, bool) {
	at := in.each[0].At
	shape := slices.Clone(tensors[0].Shape)
	if len(shape) == 0 {
		return tensor.Tensor{}, false
	}
	shape[0] = 0
	end := at
	for i, t := range tensors {
		if !tensor.Stackable(tensors[0], t) || in.each[i].At != end {
			return tensor.Tensor{}, false
		}
		shape[0] += t.Shape[0]
		end += in.each[i].Size
	}
	return tensor.Tensor{Datatype: tensors[0].Datatype, Shape: shape, Raw: in.body[at:end:end]}, true
}
