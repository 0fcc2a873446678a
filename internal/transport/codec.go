package transport

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// incoming is a decoded request, or why it was not decoded. The connect library answers a
// codec's error without details, so here the error is data and the handler answers it.
type incoming[M any, P message[M]] struct {
	message M
	err     error
	// memory is what the message takes; whoever handles it closes that.
	memory *budget.Account

	// unmarshal decodes the message that the connect library has received, see callBody.
	unmarshal unmarshaler
}

// decodable takes a message, for which it reserves memory of the caller's account, or the
// reason why there is none.
type decodable interface {
	decode(from *budget.Account, unmarshal unmarshaler, data []byte)
	fail(err error)
}

// rawMessage is a message of protobuf that is not decoded.
type rawMessage struct {
	data []byte
	err  error
}

func (m *rawMessage) decode(from *budget.Account, _ unmarshaler, data []byte) {
	if m.err = from.Reserve(int64(len(data))); m.err == nil {
		m.data = bytes.Clone(data)
	}
}

func (m *rawMessage) fail(err error) { m.err = err }

// message is a pointer to a generated message.
type message[M any] interface {
	*M
	proto.Message
}

func (in *incoming[M, P]) decode(from *budget.Account, unmarshal unmarshaler, data []byte) {
	in.memory = from.Part()
	err := in.memory.Reserve(int64(len(data)))
	if err == nil {
		err = unmarshal(data, P(&in.message))
	}
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		in.err = f
	} else if err != nil {
		in.err = fault.Newf(fault.InvalidRequest, "the message cannot be decoded: %s", plainText(err))
	}
}

func (in *incoming[M, P]) fail(err error) { in.err = err }

func (in *incoming[M, P]) decodeBy(unmarshal unmarshaler) { in.unmarshal = unmarshal }

// open decodes a message that the connect library has received.
func (in *incoming[M, P]) open(ctx context.Context) error {
	if in.unmarshal != nil {
		data, release := takeMessage(ctx)
		in.decode(budget.FromContext(ctx), in.unmarshal, data)
		in.unmarshal = nil
		release()
	}
	return in.err
}

// codec is a form of protobuf's messages. It decodes an *incoming of any message.
type codec struct {
	name      string
	marshal   func(dst []byte, m proto.Message) ([]byte, error)
	unmarshal unmarshaler
}

type unmarshaler func(data []byte, m proto.Message) error

var _ connect.Codec = codec{}

// binaryCodec is protobuf's binary form.
func binaryCodec() codec {
	return codec{"proto", proto.MarshalOptions{}.MarshalAppend, unmarshalBinary}
}

// jsonCodec is protobuf's JSON form. Unlike the library's own it rejects unknown fields and
// enum names: a misspelt durability must not become the default one.
func jsonCodec(name string) codec {
	return codec{name, protojson.MarshalOptions{}.MarshalAppend, unmarshalJSON}
}

// Name implements connect.Codec.
func (c codec) Name() string { return c.name }

// Marshal implements connect.Codec.
func (c codec) Marshal(message any) ([]byte, error) { return c.MarshalAppend(nil, message) }

// MarshalAppend lets the library reuse its buffers.
func (c codec) MarshalAppend(dst []byte, message any) ([]byte, error) {
	m, ok := message.(proto.Message)
	if !ok {
		return nil, errNoMessage(message)
	}
	return c.marshal(dst, m)
}

// Unmarshal implements connect.Codec. The message is not in data, see callBody.
func (c codec) Unmarshal(_ []byte, message any) error {
	in, ok := message.(interface{ decodeBy(unmarshal unmarshaler) })
	if !ok {
		return errNoMessage(message)
	}
	in.decodeBy(c.unmarshal)
	return nil
}

func errNoMessage(message any) error { return fmt.Errorf("%T is no message of this service", message) }

// maxNesting bounds the recursion of both decoders; our messages need six levels.
const maxNesting = 64

func unmarshalBinary(data []byte, m proto.Message) error {
	if c := (elementCounter{left: maxStrings}); !c.countWire(data, m.ProtoReflect().Descriptor(), maxNesting) {
		return errTooManyElements()
	}
	return proto.UnmarshalOptions{RecursionLimit: maxNesting}.Unmarshal(data, m)
}

func unmarshalJSON(data []byte, m proto.Message) error {
	if c := (elementCounter{left: maxStrings}); !c.countJSON(data) {
		return errTooManyElements()
	}
	return protojson.UnmarshalOptions{RecursionLimit: maxNesting}.Unmarshal(data, m)
}

// ReadMessage decodes a message in protobuf's JSON form, which begins with a brace, or in its
// binary form. It returns the function that encodes in the same form.
func ReadMessage(data []byte, m proto.Message) (encode func(proto.Message) ([]byte, error), err error) {
	form := binaryCodec()
	if bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) {
		form = jsonCodec("json")
	}
	if err = form.unmarshal(data, m); err != nil {
		err = fault.Newf(fault.InvalidRequest, "the message cannot be decoded: %s", plainText(err))
	}
	return func(m proto.Message) ([]byte, error) { return form.marshal(nil, m) }, err
}

// The element limit of a message, which is checked before it is decoded: an empty
// message or map entry is two bytes on the wire and over a hundred in memory, an empty
// string in a list is a sixth of that. A message within the byte limit could take
// gigabytes.
const (
	// maxMessages is more than all inputs with all parameters that a request may have.
	maxMessages = 1 << 18
	// maxStrings bounds the strings in lists, where there is no nested message.
	maxStrings = 4 * maxMessages
)

// The cost of an element, of maxStrings that a message has.
const messageCost, stringCost = maxStrings / maxMessages, 1

func errTooManyElements() error {
	return fmt.Errorf("there are more than %d messages, or %d texts, within it", maxMessages, maxStrings)
}

// elementCounter counts the elements of a message that is not decoded yet.
type elementCounter struct{ left int }

func (c *elementCounter) take(cost int) bool {
	c.left -= cost
	return c.left >= 0
}

// countWire counts the elements of a binary message, and reports whether they are within the
// limit. It ignores malformed data, which the decoder reports.
func (c *elementCounter) countWire(data []byte, d protoreflect.MessageDescriptor, depth int) bool {
	for len(data) > 0 && depth > 0 {
		number, kind, n := protowire.ConsumeTag(data)
		if n < 0 {
			return true
		}
		size := protowire.ConsumeFieldValue(number, kind, data[n:])
		if size < 0 {
			return true
		}
		value := data[n : n+size]
		data = data[n+size:]
		if f := d.Fields().ByNumber(number); kind == protowire.BytesType && f != nil && !c.countField(value, f, depth) {
			return false
		}
	}
	return true
}

// countField counts a field's value, which has its length before it.
func (c *elementCounter) countField(value []byte, f protoreflect.FieldDescriptor, depth int) bool {
	switch {
	case f.Message() != nil:
		inner, _ := protowire.ConsumeBytes(value)
		return c.take(messageCost) && c.countWire(inner, f.Message(), depth-1)
	case f.IsList() && (f.Kind() == protoreflect.BytesKind || f.Kind() == protoreflect.StringKind):
		return c.take(stringCost)
	}
	return true
}

// countJSON counts the objects in JSON text; each is a message or the entries of a map.
func (c *elementCounter) countJSON(data []byte) bool {
	quoted := false
	for i := 0; i < len(data); i++ {
		switch b := data[i]; {
		case b == '"':
			quoted = !quoted
		case quoted && b == '\\':
			i++
		case !quoted && b == '{':
			if !c.take(messageCost) {
				return false
			}
		}
	}
	return true
}

const encodingGzip = "gzip"

// gzipReaders are kept, since each has tables of 40 KiB.
var gzipReaders = sync.Pool{New: func() any { return new(gzip.Reader) }}

// inflate returns a message that comes in gzip, of at most limit bytes. It reserves memory
// before it allocates it, about twice what has been decompressed so far. The caller releases
// the capacity of what is returned, also with an error.
func inflate(from io.Reader, account *budget.Account, limit int64) (out []byte, err error) {
	in, _ := gzipReaders.Get().(*gzip.Reader)
	defer gzipReaders.Put(in)
	if err = in.Reset(from); errors.Is(err, io.EOF) {
		return nil, nil
	}
	for err == nil {
		if len(out) == cap(out) {
			size := min(max(int64(2*len(out)), minBuffer), limit+1)
			if err = account.Reserve(size); err != nil {
				return out, err
			}
			grown := make([]byte, len(out), size)
			copy(grown, out)
			account.Release(int64(cap(out)))
			out = grown
		}
		var n int
		n, err = in.Read(out[len(out):cap(out)])
		if out = out[:len(out)+n]; int64(len(out)) > limit {
			return out, TooLarge(limit)
		}
	}
	_, isFault := errors.AsType[*fault.Fault](err)
	_, isStatus := errors.AsType[*connect.Error](err)
	switch {
	case errors.Is(err, io.EOF):
		return out, nil
	case isFault, isStatus:
		return out, err // of the body
	}
	return out, fault.Newf(fault.InvalidRequest, "the message cannot be decompressed: %w", err)
}
