package worker

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// ErrNoInput says that a batch or an item does not have an input.
var ErrNoInput = errors.New("there is none")

// input is one input of all items.
type input struct {
	name  string
	batch *Batch
	axis  string
	body  []byte
	// joined is the part of all items; nil where they come one by one.
	joined *tensor.Tensor
	// each is by item; nil where it has none.
	each []*frame.Part

	// split cuts joined into the items', once.
	split func() ([]tensor.Tensor, error)
}

// inputsOf sorts parts by their names. An error is a violation of the protocol.
func inputsOf(b *Batch, parts []frame.Part, body []byte, axis string) ([]*input, error) {
	var out []*input
	for i := range parts {
		p := &parts[i]
		at := slices.IndexFunc(out, func(in *input) bool { return in.name == p.Name })
		if at < 0 {
			at = len(out)
			out = append(out, &input{name: p.Name, batch: b, axis: axis, body: body})
		}
		if err := out[at].add(p); err != nil {
			return nil, fmt.Errorf("%w: predict: parts[%d]: %w", frame.ErrViolation, i, err)
		}
	}
	return out, nil
}

var (
	errTwice = errors.New("the input is there twice")
	errBlob  = errors.New("it is a blob, and not a tensor")
	errNoOne = errors.New("it is a tensor, and not a blob")
)

func (in *input) add(p *frame.Part) error {
	if in.joined != nil || p.Item == nil && in.each != nil {
		return errTwice
	}
	var t tensor.Tensor
	if p.IsTensor() {
		var err error
		if t, err = p.Tensor(in.body); err != nil {
			return err
		}
	}
	if p.Item == nil {
		in.joined = &t
		in.split = sync.OnceValues(in.cut)
		return nil
	}
	if in.each == nil {
		in.each = make([]*frame.Part, len(in.batch.Items))
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

func (in *input) fails(format string, args ...any) error {
	return fmt.Errorf("input %q: %w", in.name, fmt.Errorf(format, args...))
}

func (in *input) has(item int) bool { return in.joined != nil || in.each[item] != nil }

// part returns the part of an item, where they come one by one.
func (in *input) part(item int) (*frame.Part, error) {
	if in.joined != nil || in.each[item] == nil {
		return nil, in.fails("item %d: %w", item, ErrNoInput)
	}
	return in.each[item], nil
}

func (in *input) blob(item int) (Blob, error) {
	if in.joined != nil {
		return Blob{}, in.fails("%w", errNoOne)
	}
	p, err := in.part(item)
	if err != nil {
		return Blob{}, err
	}
	if p.IsTensor() {
		return Blob{}, in.fails("%w", errNoOne)
	}
	data, err := p.Bytes(in.body)
	return Blob{ContentType: p.ContentType, Data: data}, err
}

func (in *input) tensor(item int) (tensor.Tensor, error) {
	if in.joined != nil {
		all, err := in.split()
		if err != nil {
			return tensor.Tensor{}, in.fails("%w", err)
		}
		return all[item], nil
	}
	p, err := in.part(item)
	if err != nil {
		return tensor.Tensor{}, err
	}
	if !p.IsTensor() {
		return tensor.Tensor{}, in.fails("%w", errBlob)
	}
	return p.Tensor(in.body)
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
			// One of N is [1, ...], so that they stack on a new axis.
			if !slices.Equal(t.Shape, in.each[0].Shape) {
				return tensor.Tensor{}, in.fails("item %d has shape %v, and item 0 %v", i, t.Shape, in.each[0].Shape)
			}
			t.Shape = append([]int64{1}, t.Shape...)
		}
		tensors[i] = t
	}
	if t, ok := in.inOneRow(tensors); ok {
		return t, nil
	}
	t, err := tensor.Concat(tensors)
	if err != nil {
		return tensor.Tensor{}, in.fails("%w", err)
	}
	return t, nil
}

// inOneRow joins tensors whose bytes follow each other in the body, without a copy.
func (in *input) inOneRow(tensors []tensor.Tensor) (tensor.Tensor, bool) {
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
