package transport

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/wire"
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
		err = unmarshal(data, P(&in.message), in.memory)
	}
	if in.err = decodeFault(err); err != nil {
		in.memory.Close()
	}
}

func decodeFault(err error) error {
	if _, ok := errors.AsType[*fault.Fault](err); ok || err == nil {
		return err
	}
	return fault.Newf(fault.InvalidRequest, "the message cannot be decoded: %s", plainText(err))
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

// unmarshaler decodes a message, for whose elements it reserves memory first.
type unmarshaler func(data []byte, m proto.Message, memory *budget.Account) error

var _ connect.Codec = codec{}

// binaryCodec is protobuf's binary form, whose elements take at most limit bytes. Fields that
// the message does not have are dropped.
func binaryCodec(limit int) codec {
	return codec{"proto", proto.MarshalOptions{}.MarshalAppend, func(data []byte, m proto.Message, memory *budget.Account) error {
		n := wire.DecodedSize(data, m.ProtoReflect().Descriptor(), maxNesting, elementLimit(limit))
		if err := reserveElements(memory, n, limit); err != nil {
			return err
		}
		return proto.UnmarshalOptions{RecursionLimit: maxNesting, DiscardUnknown: true}.Unmarshal(data, m)
	}}
}

// jsonCodec is protobuf's JSON form. Unlike the library's own it rejects unknown fields and
// enum names: a misspelt durability must not become the default one.
func jsonCodec(name string, limit int) codec {
	return codec{name, protojson.MarshalOptions{}.MarshalAppend, func(data []byte, m proto.Message, memory *budget.Account) error {
		if err := reserveElements(memory, wire.DecodedJSONSize(data, elementLimit(limit)), limit); err != nil {
			return err
		}
		return protojson.UnmarshalOptions{RecursionLimit: maxNesting}.Unmarshal(data, m)
	}}
}

// leastElements is what the elements of a message may take, however small messages have to be.
const leastElements = 64 << 10

// elementLimit is the most that the elements of a message take, where messages take at most
// limit bytes.
func elementLimit(limit int) int64 { return int64(max(limit, leastElements)) }

func reserveElements(memory *budget.Account, n int64, limit int) error {
	if most := elementLimit(limit); n > most {
		return fmt.Errorf("its messages, map entries and list elements take more than %d bytes of memory; send tensors as raw bytes, or fewer at once", most)
	}
	return memory.Reserve(n)
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

func errNoMessage(message any) error {
	return fmt.Errorf("%T is not a message of this service", message)
}

// maxNesting bounds the recursion of both decoders; our messages need six levels.
const maxNesting = 64

// unreservedElements is what the elements of a message may take that is smaller than that.
const unreservedElements = 1 << 20

// ReadMessage decodes a message in protobuf's JSON form, which begins with a brace, or in its
// binary form. It returns the function that encodes in the same form.
func ReadMessage(data []byte, m proto.Message) (encode func(proto.Message) ([]byte, error), err error) {
	limit := max(len(data), unreservedElements)
	form := binaryCodec(limit)
	if bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) {
		form = jsonCodec("json", limit)
	}
	err = decodeFault(form.unmarshal(data, m, nil))
	return func(m proto.Message) ([]byte, error) { return form.marshal(nil, m) }, err
}

const (
	encodingGzip    = "gzip"
	encodingDeflate = "deflate"
)

// gzipReaders are kept, since each has tables of 40 KiB.
var gzipReaders = sync.Pool{New: func() any { return new(gzip.Reader) }}

// inflate returns a message that comes in gzip, or in deflate as HTTP means it, which is zlib. It
// is in the buffer.
func inflate(from io.Reader, encoding string, buffer *growingBuffer) (out []byte, err error) {
	var in io.Reader
	if encoding == encodingDeflate {
		in, err = zlib.NewReader(from)
	} else {
		unzip, _ := gzipReaders.Get().(*gzip.Reader)
		defer gzipReaders.Put(unzip)
		in, err = unzip, unzip.Reset(from)
	}
	if errors.Is(err, io.EOF) {
		return nil, nil
	}
	if err == nil {
		out, err = buffer.read(in)
	}
	_, isFault := errors.AsType[*fault.Fault](err)
	_, isStatus := errors.AsType[*connect.Error](err)
	_, isTooLarge := errors.AsType[*http.MaxBytesError](err)
	if err != nil && !isFault && !isStatus && !isTooLarge { // those are of the body
		err = fault.Newf(fault.InvalidRequest, "the message cannot be decompressed: %w", err)
	}
	return out, err
}
