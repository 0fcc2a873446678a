package transport

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strings"

	"connectrpc.com/connect"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// NewUnknown returns the handler of calls of gRPC and gRPC-Web whose methods no service has;
// other requests are next's.
func NewUnknown(s Settings, answer Unknown, next http.Handler) http.Handler {
	s = s.WithDefaults()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		contentType := r.Header.Get("Content-Type")
		if !strings.HasPrefix(contentType, "application/grpc") {
			next.ServeHTTP(w, r)
			return
		}
		handler := connect.NewUnaryHandler(r.URL.Path, func(ctx context.Context, in *connect.Request[rawMessage]) (*connect.Response[rawMessage], error) {
			out, c := connect.NewResponse(&rawMessage{}), newCall(ctx, in.Header(), in.Peer(), r.URL.Path)
			c.setHeader = func(name, value string) { out.Header().Add(name, encodeBinary(name, value)) }
			c.setTrailer = func(name, value string) { out.Trailer().Add(name, encodeBinary(name, value)) }
			header := GRPCHeader{}
			for name, values := range in.Header() {
				header[strings.ToLower(name)] = decodeBinary(name, values)
			}
			var err error
			out.Msg.data, err = answer(ctx, c, header, func() ([]byte, error) {
				if strings.HasSuffix(contentType, "json") {
					return nil, notProtobuf()
				}
				message, release := takeMessage(ctx)
				defer release()
				in.Msg.decode(budget.FromContext(ctx), nil, message)
				return in.Msg.data, in.Msg.err
			})
			if err != nil {
				return nil, statusError(err)
			}
			return out, nil
		}, connect.WithCodec(rawCodec("proto")), connect.WithCodec(rawCodec("json")), connect.WithCompressMinBytes(math.MaxInt), connect.WithReadMaxBytes(s.MaxMessageBytes))
		limitMessage(handler, s).ServeHTTP(w, r)
	})
}

func notProtobuf() *fault.Fault {
	return fault.New(fault.UnsupportedMedia, "messages of this method are protobuf")
}

const binarySuffix = "-bin"

func encodeBinary(name, value string) string {
	if strings.HasSuffix(strings.ToLower(name), binarySuffix) {
		return connect.EncodeBinaryHeader([]byte(value))
	}
	return value
}

// decodeBinary returns the values of a header of gRPC, whose binary ones are in Base64.
func decodeBinary(name string, values []string) []string {
	if !strings.HasSuffix(strings.ToLower(name), binarySuffix) {
		return values
	}
	var out []string
	for _, value := range values {
		if data, err := connect.DecodeBinaryHeader(value); err == nil {
			out = append(out, string(data))
		}
	}
	return out
}

// statusError is RPCError for errors that may have a status of gRPC.
func statusError(err error) error {
	status, ok := grpcstatus.FromError(err)
	if _, isFault := errors.AsType[*fault.Fault](err); isFault || !ok {
		return RPCError(err)
	}
	out := connect.NewError(connect.Code(status.Code()), errors.New(status.Message()))
	for _, any := range status.Proto().GetDetails() {
		if detail, err := connect.NewErrorDetail(any); err == nil {
			out.AddDetail(detail)
		}
	}
	return out
}

// rawCodec passes messages as they are. Those that come are not in its data, see callBody.
type rawCodec string

var _ connect.Codec = rawCodec("")

// Name implements connect.Codec.
func (c rawCodec) Name() string { return string(c) }

// Marshal implements connect.Codec. The library's own message is the status of an error.
func (rawCodec) Marshal(message any) ([]byte, error) {
	switch m := message.(type) {
	case *rawMessage:
		return m.data, nil
	case proto.Message:
		return proto.Marshal(m)
	}
	return nil, errNoMessage(message)
}

// Unmarshal implements connect.Codec.
func (rawCodec) Unmarshal([]byte, any) error { return nil }
