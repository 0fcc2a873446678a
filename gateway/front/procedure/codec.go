package procedure

import (
	"fmt"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// incoming is a request as it was decoded, or why it was not. The connect
// library answers a codec's error by itself and without details, so here that
// error is data and the handler answers it.
type incoming[M any, P message[M]] struct {
	message M
	err     error
}

// message is a pointer to a generated message.
type message[M any] interface {
	*M
	proto.Message
}

func (in *incoming[M, P]) decode(into func(proto.Message) error) {
	if err := into(P(&in.message)); err != nil {
		in.err = fault.Newf(fault.InvalidRequest, "the message cannot be decoded: %s", plain(err))
	}
}

// decodable is an *incoming of any message.
type decodable interface {
	decode(into func(proto.Message) error)
}

// maxNesting bounds the recursion of both decoders; our messages need six.
const maxNesting = 64

// binaryCodec is protobuf's binary form.
type binaryCodec struct{}

var _ connect.Codec = binaryCodec{}

// Name implements connect.Codec.
func (binaryCodec) Name() string { return "proto" }

// Marshal implements connect.Codec.
func (c binaryCodec) Marshal(message any) ([]byte, error) { return c.MarshalAppend(nil, message) }

// MarshalAppend lets the library reuse its buffers.
func (binaryCodec) MarshalAppend(dst []byte, message any) ([]byte, error) {
	m, ok := message.(proto.Message)
	if !ok {
		return nil, errNoMessage(message)
	}
	return proto.MarshalOptions{}.MarshalAppend(dst, m)
}

// Unmarshal implements connect.Codec for a decodable.
func (binaryCodec) Unmarshal(data []byte, message any) error {
	return decode(message, func(m proto.Message) error {
		if !newCrowd().wire(data, m.ProtoReflect().Descriptor(), maxNesting) {
			return errCrowd()
		}
		return proto.UnmarshalOptions{RecursionLimit: maxNesting}.Unmarshal(data, m)
	})
}

// jsonCodec is protobuf's JSON form. Unlike the library's own it refuses
// unknown fields and enum names: a misspelt durability must not become the
// default one.
type jsonCodec struct{ name string }

var _ connect.Codec = jsonCodec{}

// Name implements connect.Codec.
func (c jsonCodec) Name() string { return c.name }

// Marshal implements connect.Codec.
func (c jsonCodec) Marshal(message any) ([]byte, error) { return c.MarshalAppend(nil, message) }

// MarshalAppend lets the library reuse its buffers.
func (jsonCodec) MarshalAppend(dst []byte, message any) ([]byte, error) {
	m, ok := message.(proto.Message)
	if !ok {
		return nil, errNoMessage(message)
	}
	return protojson.MarshalOptions{}.MarshalAppend(dst, m)
}

// Unmarshal implements connect.Codec for a decodable.
func (jsonCodec) Unmarshal(data []byte, message any) error {
	return decode(message, func(m proto.Message) error {
		if !newCrowd().json(data) {
			return errCrowd()
		}
		return protojson.UnmarshalOptions{RecursionLimit: maxNesting}.Unmarshal(data, m)
	})
}

func decode(message any, into func(proto.Message) error) error {
	in, ok := message.(decodable)
	if !ok {
		return errNoMessage(message)
	}
	in.decode(into)
	return nil
}

// shown bounds what a library says about a caller's own text, in runes.
const shown = 400

// plain returns the error's text without the protobuf library's prefix, whose
// spaces vary by intent, and cut, for it may quote the caller.
func plain(err error) string {
	text := strings.ReplaceAll(err.Error(), "\u00a0", " ")
	return fmt.Sprintf("%.*s", shown, strings.TrimPrefix(text, "proto: "))
}

func errNoMessage(message any) error { return fmt.Errorf("%T is no message of this service", message) }
