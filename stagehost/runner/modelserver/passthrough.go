package modelserver

import (
	"context"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/passthrough"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// pass passes a call of a gateway on to a model: the only input is the message.
func (l *link) pass(ctx context.Context, id, method string, call payload.Part) ([]payload.Part, error) {
	field := call.Parameters[passthrough.IDPath].String()
	path, err := passthrough.ParsePath(field)
	if err == nil {
		err = passthrough.CheckMethod(method)
	}
	if err != nil {
		return nil, fault.Newf(fault.InvalidRequest, "%w", err)
	}
	in, err := path.Set(call.Blob.Data, id)
	if err != nil {
		return nil, fault.Newf(fault.InvalidRequest, "field %s of the message cannot hold the ID of a model: %w", field, err)
	}
	name := passthrough.ModelHeader
	if strings.ContainsFunc(id, func(r rune) bool { return r < ' ' || r > '~' }) {
		name += "-bin"
	}
	headers := metadata.Join(passthrough.DecodeHeaders(call.Parameters[passthrough.Headers].String()), metadata.Pairs(name, id))
	var out []byte
	var header, trailer metadata.MD
	err = l.Invoke(metadata.NewOutgoingContext(ctx, headers), "/"+method, in, &out,
		grpc.ForceCodecV2(rawCodec{}), grpc.Header(&header), grpc.Trailer(&trailer))
	if err != nil {
		return nil, err
	}
	part := payload.OfBlob("response", call.Blob.ContentType, out)
	part.Parameters = payload.Parameters{
		passthrough.Headers: payload.String(passthrough.EncodeHeaders(header)), passthrough.Trailers: payload.String(passthrough.EncodeHeaders(trailer)),
	}
	return []payload.Part{part}, nil
}

// methodOf returns the method of a call that is passed on; none for any other item.
func methodOf(item runner.Item) string {
	if len(item.Inputs) != 1 || item.Inputs[0].Tensor != nil {
		return ""
	}
	return item.Inputs[0].Parameters[passthrough.Method].String()
}

// rawCodec takes messages as they are.
type rawCodec struct{}

var _ encoding.CodecV2 = rawCodec{}

// Name implements encoding.CodecV2.
func (rawCodec) Name() string { return proto.Name }

// Marshal implements encoding.CodecV2.
func (rawCodec) Marshal(message any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(message.([]byte))}, nil
}

// Unmarshal implements encoding.CodecV2.
func (rawCodec) Unmarshal(data mem.BufferSlice, message any) error {
	*message.(*[]byte) = data.Materialize()
	return nil
}
