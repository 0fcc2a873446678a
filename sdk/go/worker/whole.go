package worker

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"mime"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

var (
	errNoOutputs  = errors.New("it has no outputs")
	errUndeclared = errors.New("it is not declared in Spec.Outputs")
	errEnded      = errors.New("the stream has ended: Settings.Stream has returned")
	errApart      = errors.New("the chunks cannot be joined; send such that can be, or set ChunksOnly")
)

// whole is an answer that is put together from its chunks.
type whole struct {
	// limit is what it may take, in bytes, and size what it takes.
	limit, size int64
	outputs     map[string]*joint
}

// joint is one output of a whole answer.
type joint struct {
	// tensor is what all chunks have in common; nil of a blob. Its axis 0 and its bytes
	// are those of all so far.
	tensor *tensor.Tensor
	// blob has the bytes of all so far; documents is how many they are, where they are
	// such.
	blob      Blob
	documents int
}

// add adds an output of a chunk, by a copy. Text and other blobs are joined,
// documents of JSON and of MessagePack become a list, tensors are joined on axis 0, and of those
// without axes the last is taken.
func (w *whole) add(name string, out Output) error {
	t, blob, err := out.one()
	if err != nil {
		return err
	}
	j := w.outputs[name]
	if j == nil {
		j = startOf(t, blob)
		w.outputs[name] = j
	}
	before := j.size()
	if t == nil {
		err = j.addBlob(blob)
	} else {
		err = j.addTensor(*t)
	}
	if err != nil {
		return fmt.Errorf("output %q: %w", name, err)
	}
	if w.size += j.size() - before; w.size > w.limit {
		return Failed(fmt.Sprintf("the whole answer takes more than the %d bytes that the host takes at once", w.limit))
	}
	return nil
}

// startOf returns an output like that of a chunk, with nothing in it.
func startOf(t *tensor.Tensor, blob Blob) *joint {
	if t == nil {
		return &joint{blob: Blob{ContentType: blob.ContentType}}
	}
	empty := tensor.Tensor{Datatype: t.Datatype, Shape: slices.Clone(t.Shape)}
	if len(empty.Shape) > 0 {
		empty.Shape[0] = 0
	}
	return &joint{tensor: &empty}
}

func (j *joint) size() int64 {
	if j.tensor != nil {
		return int64(len(j.tensor.Raw))
	}
	return int64(len(j.blob.Data))
}

func (j *joint) addBlob(blob Blob) error {
	if j.tensor != nil || blob.ContentType != j.blob.ContentType {
		return fmt.Errorf("%w: %q, and another before", errApart, blob.ContentType)
	}
	if len(blob.Data) == 0 {
		return nil // no document, or nothing to join
	}
	if isJSON(blob.ContentType) && j.documents > 0 {
		j.blob.Data = append(j.blob.Data, ',')
	}
	j.documents++
	j.blob.Data = append(j.blob.Data, blob.Data...)
	return nil
}

func (j *joint) addTensor(t tensor.Tensor) error {
	to := j.tensor
	switch {
	case to != nil && to.Datatype == t.Datatype && len(to.Shape)+len(t.Shape) == 0:
		to.Raw = append(to.Raw[:0], t.Raw...)
		return nil
	case to == nil || !tensor.Stackable(*to, t):
		return fmt.Errorf("%w: %s%v, and another before", errApart, t.Datatype, t.Shape)
	case t.Shape[0] > math.MaxInt64-to.Shape[0]:
		return fmt.Errorf("%w: more rows than can be counted", errApart)
	}
	to.Shape[0] += t.Shape[0]
	to.Raw = append(to.Raw, t.Raw...)
	return nil
}

// answer returns the outputs of the whole. A blob that is declared and was in no
// chunk is empty.
func (w *whole) answer(declared []PartSpec) (Outputs, error) {
	out := Outputs{}
	for name, j := range w.outputs {
		out[name] = j.output()
	}
	for _, spec := range declared {
		if j := w.outputs[spec.Name]; j != nil {
			if err := j.fits(spec); err != nil {
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
		out[spec.Name] = (&joint{blob: Blob{ContentType: contentTypeOf(spec)}}).output()
	}
	return out, nil
}

// fits says what is wrong with the chunks of an output together: each fits by
// itself, or the host says what does not.
func (j *joint) fits(spec PartSpec) error {
	if j.tensor == nil || len(j.tensor.Shape) == 0 || len(spec.Shape) == 0 {
		return nil
	}
	if want := spec.Shape[0]; want >= 0 && j.tensor.Shape[0] != want {
		return fmt.Errorf("shape %v of all chunks together, %v is declared: declare -1 for axis 0, or set ChunksOnly", j.tensor.Shape, spec.Shape)
	}
	return nil
}

func (j *joint) output() Output {
	if j.tensor != nil {
		return Each(*j.tensor)
	}
	blob := j.blob
	switch {
	case isJSON(blob.ContentType):
		blob.Data = slices.Concat([]byte("["), blob.Data, []byte("]"))
	case isPacked(blob.ContentType):
		blob.Data = append(packedArray(j.documents), blob.Data...)
	}
	return Blobs(blob)
}

// contentTypeOf is that of an output which nobody has given.
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

func isPacked(contentType string) bool {
	media, _, err := mime.ParseMediaType(contentType)
	return err == nil && (media == "application/msgpack" || media == "application/x-msgpack" || media == "application/vnd.msgpack")
}

// packedArray is what an array of n documents in MessagePack begins with.
func packedArray(n int) []byte {
	switch {
	case n < 1<<4:
		return []byte{0x90 | byte(n)}
	case n < 1<<16:
		return binary.BigEndian.AppendUint16([]byte{0xdc}, uint16(n))
	default:
		return binary.BigEndian.AppendUint32([]byte{0xdd}, uint32(n)) // as each takes a byte, and the whole is bounded
	}
}
