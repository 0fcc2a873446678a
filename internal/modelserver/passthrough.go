package modelserver

import (
	"cmp"
	"context"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"

	"github.com/stagemesh/stagemesh/internal/passthrough"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// pass passes a call of a gateway on to a model, whose ID is in a field of the message.
func (l *link) pass(ctx context.Context, id, method, field string, call payload.Part) ([]payload.Part, error) {
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

// inferMethod is the method for items that are no calls of a gateway.
const inferMethod = "inference.GRPCInferenceService/ModelInfer"

// methodOf returns the method that an item calls, and the field with the model's ID if a gateway
// passes the call on.
func methodOf(item runner.Item) (method, idPath string) {
	if len(item.Inputs) == 1 && item.Inputs[0].Tensor == nil {
		call := item.Inputs[0].Parameters
		method, idPath = call[passthrough.Method].String(), call[passthrough.IDPath].String()
	}
	return cmp.Or(method, inferMethod), idPath
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
