package worker

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"mime"
	"slices"
	"strings"
	"sync"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

var (
	errNoOutputs  = errors.New("it has no outputs")
	errUndeclared = errors.New("it is not declared in Spec.Outputs")
	errEnded      = errors.New("the stream has ended: Settings.Stream has returned")
	errNoJoin     = errors.New("the chunks cannot be joined; send others, or set ChunksOnly")
)

// Stream sends the answer to one item in chunks. It is safe for concurrent use until
// Settings.Stream returns.
type Stream struct {
	session *session
	batch   *Batch

	mu sync.Mutex
	// err is why nothing more can be sent.
	err error
	// whole is the whole answer; nil where it is not sent.
	whole *whole
}

// Send sends a chunk, which has one or more of the declared outputs: each is one tensor,
// by Joined or Each, or one blob. It waits while the host does not read. An error means
// that the item is cancelled, or that the chunk is wrong. Then nothing more can be sent,
// and the item fails by that error unless the function returns another.
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

// Text sends a chunk of one text.
func (o *Stream) Text(name, text string) error { return o.Send(Outputs{name: Texts(text)}) }

func (o *Stream) send(chunk Outputs) error {
	m, body := &frame.Chunk{Batch: o.batch.number}, &frame.Body{}
	for _, name := range slices.Sorted(maps.Keys(chunk)) {
		part, err := o.encodePart(body, name, chunk[name])
		if err != nil {
			return fmt.Errorf("chunk: output %q: %w", name, err)
		}
		m.Parts = append(m.Parts, part)
	}
	switch {
	case len(m.Parts) == 0:
		return fmt.Errorf("chunk: %w: it has one or more", errNoOutputs)
	case body.Len() > o.session.maxBody:
		return fmt.Errorf("chunk of %d bytes, the host takes %d: send smaller ones", body.Len(), o.session.maxBody)
	}
	if o.whole != nil {
		for name, out := range chunk {
			if err := o.whole.add(name, out); err != nil {
				return err
			}
		}
	}
	if o.session.environment.Rank != 0 {
		return nil // only rank 0 answers
	}
	head, err := frame.Encode(m, body.Len())
	if err != nil {
		return fmt.Errorf("chunk: %w", err)
	}
	o.session.send(head, body)
	return nil
}

// encodePart adds one output of a chunk to its body.
func (o *Stream) encodePart(body *frame.Body, name string, out Output) (frame.Part, error) {
	declared := o.session.outputs
	if len(declared) > 0 && !slices.ContainsFunc(declared, func(spec PartSpec) bool { return spec.Name == name }) {
		return frame.Part{}, errUndeclared
	}
	t, blob, err := out.single()
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

// single returns the only tensor, or else the only blob, of an output.
func (o Output) single() (*tensor.Tensor, Blob, error) {
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

// end ends the stream, and returns the outputs of the batch.
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

// stream calls Stream. Once its context has ended the answer is incomplete, even if
// Stream returns nil.
func (s *session) stream(b *Batch) (Outputs, error) {
	out := &Stream{session: s, batch: b}
	if !s.settings.ChunksOnly && s.environment.Rank == 0 {
		out.whole = &whole{limit: s.maxBody, outputs: map[string]*wholeOutput{}}
	}
	defer out.end() //nolint:errcheck // after a panic too
	if err := s.settings.Stream(b.ctx, b.Items[0], out); err != nil {
		return nil, err
	}
	if err := b.ctx.Err(); err != nil {
		return nil, err
	}
	return out.end()
}

// whole is a whole answer that is joined from its chunks.
type whole struct {
	// limit bounds size, in bytes.
	limit, size int64
	outputs     map[string]*wholeOutput
}

// wholeOutput is one output of a whole answer.
type wholeOutput struct {
	// tensor is the join of all tensors so far; nil for a blob.
	tensor *tensor.Tensor
	// blob is the join of all blobs so far, documents how many documents it has.
	blob      Blob
	documents int
}

// add adds a copy of a chunk's output. Text and other blobs are joined, documents of JSON
// and of MessagePack become a list, tensors are joined on axis 0, and the last scalar is
// taken.
func (w *whole) add(name string, out Output) error {
	t, blob, err := out.single()
	if err != nil {
		return err
	}
	o := w.outputs[name]
	if o == nil {
		o = emptyOutput(t, blob)
		w.outputs[name] = o
	}
	before := o.size()
	if t == nil {
		err = o.addBlob(blob)
	} else {
		err = o.addTensor(*t)
	}
	if err != nil {
		return fmt.Errorf("output %q: %w", name, err)
	}
	if w.size += o.size() - before; w.size > w.limit {
		return Failed(fmt.Sprintf("the whole answer takes more than the %d bytes that the host takes at once", w.limit))
	}
	return nil
}

// emptyOutput returns an empty output of the kind of a chunk's.
func emptyOutput(t *tensor.Tensor, blob Blob) *wholeOutput {
	if t == nil {
		return &wholeOutput{blob: Blob{ContentType: blob.ContentType}}
	}
	empty := tensor.Tensor{Datatype: t.Datatype, Shape: slices.Clone(t.Shape)}
	if len(empty.Shape) > 0 {
		empty.Shape[0] = 0
	}
	return &wholeOutput{tensor: &empty}
}

func (o *wholeOutput) size() int64 {
	if o.tensor != nil {
		return int64(len(o.tensor.Raw))
	}
	return int64(len(o.blob.Data))
}

func (o *wholeOutput) addBlob(blob Blob) error {
	if o.tensor != nil || blob.ContentType != o.blob.ContentType {
		return fmt.Errorf("%w: %q, and another before", errNoJoin, blob.ContentType)
	}
	if len(blob.Data) == 0 {
		return nil // no document, or nothing to join
	}
	if isJSON(blob.ContentType) && o.documents > 0 {
		o.blob.Data = append(o.blob.Data, ',')
	}
	o.documents++
	o.blob.Data = append(o.blob.Data, blob.Data...)
	return nil
}

func (o *wholeOutput) addTensor(t tensor.Tensor) error {
	to := o.tensor
	switch {
	case to != nil && to.Datatype == t.Datatype && len(to.Shape)+len(t.Shape) == 0:
		to.Raw = append(to.Raw[:0], t.Raw...)
		return nil
	case to == nil || !tensor.Stackable(*to, t):
		return fmt.Errorf("%w: %s%v, and another before", errNoJoin, t.Datatype, t.Shape)
	case t.Shape[0] > math.MaxInt64-to.Shape[0]:
		return fmt.Errorf("%w: more rows than can be counted", errNoJoin)
	}
	to.Shape[0] += t.Shape[0]
	to.Raw = append(to.Raw, t.Raw...)
	return nil
}

// answer returns the outputs of the whole. A declared blob that was in no chunk is empty.
func (w *whole) answer(declared []PartSpec) (Outputs, error) {
	out := Outputs{}
	for name, o := range w.outputs {
		out[name] = o.output()
	}
	for _, spec := range declared {
		if o := w.outputs[spec.Name]; o != nil {
			if err := o.check(spec); err != nil {
				return nil, fmt.Errorf("output %q: %w", spec.Name, err)
			}
			continue
		}
		if spec.Optional {
			continue
		}
		if spec.Datatype != "" {
			return nil, fmt.Errorf("output %q: %w", spec.Name, errNoOutputs)
		}
		out[spec.Name] = (&wholeOutput{blob: Blob{ContentType: contentTypeOf(spec)}}).output()
	}
	return out, nil
}

// check checks the shape of all chunks together. The host checks each chunk.
func (o *wholeOutput) check(spec PartSpec) error {
	if o.tensor == nil || len(o.tensor.Shape) == 0 || len(spec.Shape) == 0 {
		return nil
	}
	if want := spec.Shape[0]; want >= 0 && o.tensor.Shape[0] != want {
		return fmt.Errorf("shape %v of all chunks together, %v is declared: declare -1 for axis 0, or set ChunksOnly", o.tensor.Shape, spec.Shape)
	}
	return nil
}

func (o *wholeOutput) output() Output {
	if o.tensor != nil {
		return Each(*o.tensor)
	}
	blob := o.blob
	switch {
	case isJSON(blob.ContentType):
		blob.Data = slices.Concat([]byte("["), blob.Data, []byte("]"))
	case isMessagePack(blob.ContentType):
		blob.Data = append(packedArray(o.documents), blob.Data...)
	}
	return Blobs(blob)
}

// contentTypeOf returns the content type of an output that was in no chunk.
func contentTypeOf(spec PartSpec) string {
	for _, t := range spec.ContentTypes {
		if !strings.Contains(t, "*") {
			return t
		}
	}
	return "application/octet-stream"
}

func isJSON(contentType string) bool {
	media, _, err := mime.ParseMediaType(contentType)
	return err == nil && (media == "application/json" || strings.HasSuffix(media, "+json"))
}

func isMessagePack(contentType string) bool {
	media, _, err := mime.ParseMediaType(contentType)
	return err == nil && (media == "application/msgpack" || media == "application/x-msgpack" || media == "application/vnd.msgpack")
}

// packedArray returns the first bytes of an array of n documents in MessagePack.
func packedArray(n int) []byte {
	switch {
	case n < 1<<4:
		return []byte{0x90 | byte(n)}
	case n < 1<<16:
		return binary.BigEndian.AppendUint16([]byte{0xdc}, uint16(n))
	default:
		return binary.BigEndian.AppendUint32([]byte{0xdd}, uint32(n)) // each takes a byte, and the whole is bounded
	}
}
