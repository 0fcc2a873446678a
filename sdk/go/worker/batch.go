package worker

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Batch is a list of items that run together.
type Batch struct {
	Items []*Item
	// Rows is how many the items have together.
	Rows int
	// Model is the one to use, of a stage that serves several; nil elsewhere.
	Model *frame.Model
	// Warmup says that nobody waits for the answer.
	Warmup bool

	number uint64
	ctx    context.Context
	cancel context.CancelFunc
	inputs []*input

	mu sync.Mutex
	// waiting is how many items somebody waits for.
	waiting  int
	faults   []*Fault
	metadata []map[string]string
}

// Item is one request of a batch.
type Item struct {
	// ID is the request's, and Rows the item's extent on axis 0.
	ID   string
	Rows int
	// Parameters are bool, int64, uint64 above that, float64 and string.
	Parameters map[string]any
	Metadata   map[string]string
	// Deadline is until when somebody waits; zero is for ever.
	Deadline time.Time

	batch *Batch
	index int
	// calledOff and ctx are the batch's mu's; ctx is nil until somebody asks.
	calledOff bool
	ctx       context.Context
	cancel    context.CancelFunc
}

// newBatch returns a batch that ends with ctx.
func newBatch(ctx context.Context, m *frame.Predict, body []byte, axis string) (*Batch, error) {
	b := &Batch{
		Items: make([]*Item, len(m.Items)), Model: m.Model, Warmup: m.Warmup,
		number: m.Batch, waiting: len(m.Items),
	}
	now := time.Time{}
	items := make([]Item, len(m.Items))
	for i := range m.Items {
		from := &m.Items[i]
		items[i] = Item{
			ID: from.ID, Rows: max(1, from.Rows), Parameters: from.Parameters, Metadata: from.Metadata,
			batch: b, index: i,
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
	var err error
	if b.inputs, err = inputsOf(b, m.Parts, body, axis); err != nil {
		return nil, err
	}
	b.ctx, b.cancel = context.WithCancel(ctx)
	return b, nil
}

// maxTimeout is about a hundred years, in milliseconds.
const maxTimeout = 100 * 366 * 24 * 3600 * 1000

// Tensor returns one input of all items: joined on axis 0, or, where the spec has
// no batch axis, stacked on a new one. Its bytes are those that came where the
// items' followed each other, which the host sees to. An item that lacks the
// input, or has one of another shape, is an error.
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

// Has reports whether the item has the input.
func (i *Item) Has(name string) bool {
	in, err := i.batch.input(name)
	return err == nil && in.has(i.index)
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

// Fail says that the item has no outputs, and why: a *Fault, which the caller
// sees, or another error, of which the caller sees the words. The first counts.
func (i *Item) Fail(err error) {
	b := i.batch
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.faults == nil {
		b.faults = make([]*Fault, len(b.Items))
	}
	if b.faults[i.index] == nil {
		b.faults[i.index] = faultOf(err)
	}
}

// SetMetadata hands a text to the caller beside the item's outputs.
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

// Context ends when nobody waits for the item any more, or the batch ends.
func (i *Item) Context() context.Context {
	b := i.batch
	b.mu.Lock()
	defer b.mu.Unlock()
	if i.ctx == nil {
		i.ctx, i.cancel = context.WithCancel(b.ctx)
		if i.calledOff {
			i.cancel()
		}
	}
	return i.ctx
}

// Cancelled reports whether nobody waits for the item any more.
func (i *Item) Cancelled() bool {
	i.batch.mu.Lock()
	defer i.batch.mu.Unlock()
	return i.calledOff
}

// callOff says that nobody waits for these items any more; nil is all.
func (b *Batch) callOff(indices []int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if indices == nil {
		for i := range b.Items {
			b.callOffOne(i)
		}
	}
	for _, i := range indices {
		b.callOffOne(i)
	}
	if b.waiting == 0 {
		b.cancel()
	}
}

func (b *Batch) callOffOne(index int) {
	if index >= len(b.Items) || b.Items[index].calledOff {
		return
	}
	item := b.Items[index]
	item.calledOff = true
	b.waiting--
	if item.cancel != nil {
		item.cancel()
	}
}

// abandoned reports whether nobody waits for any item.
func (b *Batch) abandoned() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.waiting == 0
}
