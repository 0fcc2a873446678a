package transport

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// incoming is a decoded request, or why it was not decoded. The connect library answers a
// codec's error without details, so here the error is data and the handler answers it.
type incoming[M any, P message[M]] struct {
	message M
	err     error
}

// decodable takes a message.
type decodable interface {
	decode(unmarshal unmarshaler, data []byte)
}

// rawMessage is a message of protobuf that is not decoded.
type rawMessage struct {
	data []byte
	err  error
}

func (m *rawMessage) decode(unmarshal unmarshaler, data []byte) {
	if bytes.HasPrefix(data, []byte{gunzipFailed}) {
		m.err = unmarshal(data, nil)
		return
	}
	m.data = bytes.Clone(data)
}

// message is a pointer to a generated message.
type message[M any] interface {
	*M
	proto.Message
}

func (in *incoming[M, P]) decode(unmarshal unmarshaler, data []byte) {
	err := unmarshal(data, P(&in.message))
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		in.err = f
	} else if err != nil {
		in.err = fault.Newf(fault.InvalidRequest, "the message cannot be decoded: %s", plainText(err))
	}
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

// Unmarshal implements connect.Codec.
func (c codec) Unmarshal(data []byte, message any) error {
	in, ok := message.(decodable)
	if !ok {
		return errNoMessage(message)
	}
	in.decode(c.unmarshal, data)
	return nil
}

func errNoMessage(message any) error { return fmt.Errorf("%T is no message of this service", message) }

// maxNesting bounds the recursion of both decoders; our messages need six levels.
const maxNesting = 64

func unmarshalBinary(data []byte, m proto.Message) error {
	if c := (elementCounter{left: admission.MaxStrings}); !c.countWire(data, m.ProtoReflect().Descriptor(), maxNesting) {
		return errTooManyElements()
	}
	return proto.UnmarshalOptions{RecursionLimit: maxNesting}.Unmarshal(data, m)
}

func unmarshalJSON(data []byte, m proto.Message) error {
	if c := (elementCounter{left: admission.MaxStrings}); !c.countJSON(data) {
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

// The cost of an element, of admission.MaxStrings that a message has.
const messageCost, stringCost = admission.MaxStrings / admission.MaxMessages, 1

func errTooManyElements() error {
	return fmt.Errorf("there are more than %d messages, or %d texts, within it", admission.MaxMessages, admission.MaxStrings)
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

// decompressor is gzip with a bounded output, whose errors the library passes on as they are.
type decompressor struct {
	gzip  gzip.Reader
	out   limitedReader
	limit int64
	// err is why the data is not gzip. The library answers an error of Reset without
	// details, so Read reports it.
	err error
}

var _ connect.Decompressor = (*decompressor)(nil)

func newDecompressor(limit int) func() connect.Decompressor {
	return func() connect.Decompressor { return &decompressor{limit: int64(limit)} }
}

// Reset implements connect.Decompressor.
func (d *decompressor) Reset(from io.Reader) error {
	d.err = d.gzip.Reset(from)
	d.out = limitedReader{from: &d.gzip, left: d.limit, limit: d.limit}
	return nil
}

// Read implements io.Reader.
func (d *decompressor) Read(buf []byte) (n int, err error) {
	if err = d.err; err == nil {
		n, err = d.out.Read(buf)
	}
	if _, coded := errors.AsType[*connect.Error](err); err == nil || errors.Is(err, io.EOF) && d.err == nil || coded {
		return n, err
	}
	return n, RPCError(fault.Newf(fault.InvalidRequest, "the message cannot be decompressed: %w", err))
}

// Close implements connect.Decompressor.
func (d *decompressor) Close() error { return nil }

// newCompressor exists because a compression needs both sides; the handler options keep every
// response below the size where it would be used.
func newCompressor() connect.Compressor { return gzip.NewWriter(io.Discard) }
