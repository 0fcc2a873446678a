package worker

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Stream takes the answer to one item in chunks. It may be used by several
// goroutines, until Settings.Stream returns.
type Stream struct {
	session *session
	batch   *Batch

	mu sync.Mutex
	// err is why nothing more can be sent.
	err error
	// whole is the whole answer; nil where nobody wants it.
	whole *whole
}

func (s *session) newStream(b *Batch) *Stream {
	out := &Stream{session: s, batch: b}
	if !s.settings.ChunksOnly && s.environment.Rank == 0 {
		out.whole = &whole{limit: s.limit, outputs: map[string]*joint{}}
	}
	return out
}

// Send sends a chunk, which has one output or more of those that are declared:
// each of one tensor, by Joined or Each, or of one blob. It waits while the host does
// not read. An error says that nobody waits for the item any more, or what is wrong
// with the chunk; nothing more can be sent then, and the item fails by it, if by
// nothing else.
func (o *Stream) Send(chunk Outputs) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err == nil {
		o.err = o.batch.ctx.Err()
	}
	if o.err == nil {
		o.err = o.send(chunk)
	}
	return o.err
}

// Text sends a chunk that is a text.
func (o *Stream) Text(name, text string) error { return o.Send(Outputs{name: Texts(text)}) }

func (o *Stream) send(chunk Outputs) error {
	m, body := &frame.Chunk{Batch: o.batch.number}, &frame.Body{}
	for _, name := range slices.Sorted(maps.Keys(chunk)) {
		part, err := o.part(body, name, chunk[name])
		if err != nil {
			return fmt.Errorf("chunk: output %q: %w", name, err)
		}
		m.Parts = append(m.Parts, part)
	}
	switch {
	case len(m.Parts) == 0:
		return fmt.Errorf("chunk: %w: it has one or more", errNoOutputs)
	case body.Len() > o.session.limit:
		return fmt.Errorf("chunk of %d bytes, the host takes %d: send smaller ones", body.Len(), o.session.limit)
	}
	if err := o.collect(chunk); err != nil {
		return err
	}
	if o.session.environment.Rank != 0 {
		return nil // what counts is what rank 0 says
	}
	head, err := frame.Encode(m, body.Len())
	if err != nil {
		return fmt.Errorf("chunk: %w", err)
	}
	o.session.send(head, body)
	return nil
}

// part lays one output of a chunk out.
func (o *Stream) part(body *frame.Body, name string, out Output) (frame.Part, error) {
	declared := o.session.outputs
	if len(declared) > 0 && !slices.ContainsFunc(declared, func(spec PartSpec) bool { return spec.Name == name }) {
		return frame.Part{}, errUndeclared
	}
	t, blob, err := out.one()
	switch {
	case err != nil:
		return frame.Part{}, err
	case t == nil:
		return body.Blob(name, -1, blob.ContentType, blob.Data), nil
	}
	if err := t.Validate(); err != nil {
		return frame.Part{}, err
	}
	return body.Tensor(name, -1, *t), nil
}

// one returns the only tensor, or else the only blob, of an output.
func (o Output) one() (*tensor.Tensor, Blob, error) {
	switch {
	case o.joined != nil:
		return o.joined, Blob{}, nil
	case len(o.tensors) == 1:
		return &o.tensors[0], Blob{}, nil
	case len(o.blobs) == 1:
		return nil, o.blobs[0], nil
	}
	return nil, Blob{}, fmt.Errorf("%d of a chunk of one item", max(len(o.tensors), len(o.blobs)))
}

// collect adds a chunk to the whole answer.
func (o *Stream) collect(chunk Outputs) error {
	if o.whole == nil {
		return nil
	}
	for name, out := range chunk {
		if err := o.whole.add(name, out); err != nil {
			return err
		}
	}
	return nil
}

// end says that no more is sent, and returns the outputs that the batch ends with.
func (o *Stream) end() (Outputs, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	err := o.err
	if o.err == nil {
		o.err = errEnded
	}
	if err != nil || o.whole == nil {
		return nil, err
	}
	return o.whole.answer(o.session.outputs)
}

// stream calls Stream. What it made until its context ended is a part of the answer,
// also where it returns nil.
func (s *session) stream(b *Batch) (Outputs, error) {
	out := s.newStream(b)
	defer out.end() //nolint:errcheck // after a panic too
	if err := s.settings.Stream(b.ctx, b.Items[0], out); err != nil {
		return nil, err
	}
	if err := b.ctx.Err(); err != nil {
		return nil, err
	}
	return out.end()
}
