package transport

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"math"
	"net"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// GRPCSettings are the settings of NewGRPC.
type GRPCSettings struct {
	Settings

	// Memory is what the callers of the port may hold; nil bounds only those without a token.
	Memory *Memory
	// TLS is nil for a port without TLS.
	TLS *tls.Config
	// Guard returns who makes a call, before any of its messages is read; nil admits all.
	Guard Guard
	// Delay waits before an UNAUTHENTICATED call is refused, on the call's own goroutine. nil does
	// not wait.
	Delay func(ctx context.Context, authorization string)
	// Unknown answers methods that no service has; nil knows none.
	Unknown Unknown
	// Logger logs panics of methods, as net/http does; their callers get INTERNAL.
	Logger *slog.Logger

	// services are the settings of services, by name.
	services map[string]Settings
}

// Bounds on what a connection may cost before and between requests, whatever serves it.
const (
	// HandshakeTimeout bounds the wait for a request's header too.
	HandshakeTimeout = 10 * time.Second
	IdleTimeout      = 2 * time.Minute
	// leaveTimeout is for a client of HTTP/2 that was asked to leave.
	leaveTimeout = 5 * time.Second
	// beginTimeout is for a connection without a request, of a port that stops.
	beginTimeout = 200 * time.Millisecond
	// MaxHeaderBytes bounds the header of a request, as decoded.
	MaxHeaderBytes = 16 << 10
	PingAfter      = 30 * time.Second
	PingTimeout    = 15 * time.Second
)

// Bounds on a connection of gRPC.
const (
	// maxGRPCStreams is per connection; the memory bounds what they hold. Of anonymous callers
	// there are fewer.
	maxGRPCStreams  = 8192
	maxProbeStreams = 16
	minPingInterval = 5 * time.Second
	streamWindow    = 64 << 10
	connWindow      = 1 << 20
)

// NewGRPC returns a server of the services' methods by grpc-go's own HTTP/2, which takes less
// CPU than net/http's. It bounds what a Service's handler bounds, with the same faults. The
// caller may register other services.
func NewGRPC(s GRPCSettings, services ...*Service) *grpc.Server {
	s.Settings = s.WithDefaults()
	if s.Memory == nil {
		s.Memory = NewMemory(nil)
	}
	if s.Guard == nil {
		s.Guard = func(Head) (Caller, error) { return Caller{}, nil }
	}
	s.services = map[string]Settings{}
	for _, service := range services {
		s.services[service.Name()] = service.settings
	}
	if s.TLS != nil {
		s.TLS = s.TLS.Clone()
		s.TLS.NextProtos = []string{"h2"}
	}
	out := grpc.NewServer(
		grpc.Creds(grpcCredentials{insecure.NewCredentials(), s}),
		grpc.InTapHandle(s.openStream),
		grpc.ChainStreamInterceptor(s.serve),
		grpc.UnknownServiceHandler(s.serveUnknown),
		grpc.ForceServerCodecV2(grpcCodec{encoding.GetCodecV2(grpcproto.Name)}),
		grpc.RPCDecompressor(gunzip{}), //nolint:staticcheck // the other API compresses the responses too
		// The connection bounds messages: the library's error has no details.
		grpc.MaxRecvMsgSize(math.MaxInt32),
		grpc.ReadBufferSize(0), // grpcConn has a buffer
		grpc.MaxConcurrentStreams(maxGRPCStreams), grpc.MaxHeaderListSize(MaxHeaderBytes), grpc.ConnectionTimeout(HandshakeTimeout),
		grpc.StaticStreamWindowSize(streamWindow), grpc.StaticConnWindowSize(connWindow),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: IdleTimeout, Time: PingAfter, Timeout: PingTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: minPingInterval, PermitWithoutStream: true}),
	)
	for _, service := range services {
		out.RegisterService(&grpc.ServiceDesc{
			ServiceName: string(service.descriptor.FullName()), HandlerType: (*any)(nil), Streams: service.streams, Metadata: service.descriptor.ParentFile().Path(),
		}, service)
	}
	return out
}

// grpcCredentials make the connections of a server, which calls nothing else of them.
type grpcCredentials struct {
	credentials.TransportCredentials

	settings GRPCSettings
}

// ServerHandshake implements credentials.TransportCredentials. The server limits its time.
func (c grpcCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if c.settings.TLS != nil {
		secure := tls.Server(conn, c.settings.TLS)
		if err := secure.Handshake(); err != nil {
			return nil, nil, err
		}
		conn = secure
	}
	out := newGRPCConn(conn, c.settings.Settings)
	return out, out, nil
}

// streamKey is the context key of the *grpcStream of a call.
type streamKey struct{}

// openStream runs when the headers of a stream were read, in the goroutine that reads the
// connection. A stream that it opens gets a handler, or is ended by the library.
func (s GRPCSettings) openStream(ctx context.Context, info *tap.Info) (context.Context, error) {
	from, _ := peer.FromContext(ctx)
	conn, header := from.AuthInfo.(*grpcConn), GRPCHeader(info.Header)
	if conn.counted != nil {
		conn.counted.hasBegun.Store(true)
	}
	caller, denied := s.Guard(Head{info.FullMethodName, header.First(":authority"), header.First, conn.tls})
	isAnonymous := caller.IsAnonymous || denied != nil
	err := ctx.Err()
	if err == nil && !isAnonymous {
		err = conn.counted.admit(caller.Tenant)
	}
	if err != nil {
		return ctx, grpcstatus.ErrorProto(fault.From(err).Status())
	}
	account, full := s.Memory.account(conn.counted, caller, denied, headerSize(header)+int64(len(info.FullMethodName)))
	if full != nil {
		return ctx, grpcstatus.ErrorProto(fault.From(cmp.Or(denied, full)).Status())
	}
	service, _, _ := strings.Cut(strings.TrimPrefix(info.FullMethodName, "/"), "/")
	stream := &grpcStream{
		conn: conn, id: conn.id, header: header, account: account, settings: s.Settings,
		isProbe: isAnonymous, isStandard: strings.HasPrefix(service, "grpc.reflection."),
	}
	if own, ok := s.services[service]; ok {
		stream.settings.MaxMessageBytes, stream.settings.Uncompressed = own.MaxMessageBytes, own.Uncompressed
	}
	if stream.isStandard {
		stream.settings.MaxMessageBytes, stream.settings.Uncompressed = MaxProbeBytes, true
	}
	if denied != nil {
		stream.failure = fault.From(denied)
	}
	if err := conn.open(stream); err != nil {
		account.Close()
		return ctx, grpcstatus.ErrorProto(fault.From(cmp.Or(denied, err)).Status())
	}
	stream.begins = context.AfterFunc(ctx, stream.end)
	return context.WithValue(callerContext(ctx, account, caller), streamKey{}, stream), nil
}

// serve is the interceptor of all methods.
func (s GRPCSettings) serve(service any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) (err error) {
	stream := streamOf(ss)
	stream.begins()
	defer stream.end()
	defer func() {
		if cause := recover(); cause != nil {
			s.Logger.Error("panic in a call", "method", info.FullMethod, "panic", cause, "stack", string(debug.Stack()))
			err = grpcError(ss, fault.New(fault.Internal, "the gateway failed"))
		}
	}()
	if err = stream.begin(func() { writeStatus(ss, stream.failure) }); err == nil {
		err = next(service, ss)
	} else if s.Delay != nil && fault.From(err).Reason == fault.Unauthenticated {
		s.Delay(ss.Context(), stream.header.First("authorization"))
	}
	return grpcError(ss, err)
}

// writeStatus ends a stream while its handler receives. The handler cannot: the library's
// function for that answers errors itself, without details.
func writeStatus(ss grpc.ServerStream, err error) {
	st, _ := grpcstatus.FromError(grpcError(ss, err))
	if w, ok := grpc.ServerTransportStreamFromContext(ss.Context()).(interface {
		WriteStatus(st *grpcstatus.Status) error
	}); ok {
		_ = w.WriteStatus(st) // the connection is closed
	}
}

func streamOf(ss grpc.ServerStream) *grpcStream { return ss.Context().Value(streamKey{}).(*grpcStream) }

// grpcError returns the status of an error, and sets what else RPCError has.
func grpcError(ss grpc.ServerStream, err error) error {
	if err == nil {
		return nil
	}
	f, ok := errors.AsType[*fault.Fault](err)
	if !ok {
		if _, ok := grpcstatus.FromError(err); ok {
			return err // the library's
		}
		f = fault.From(err)
	}
	if id := f.Metadata[RequestIDKey]; id != "" {
		ss.SetTrailer(metadata.Pairs(HeaderRequestID, id))
	}
	if f.Reason == fault.Unauthenticated {
		_ = ss.SetHeader(metadata.Pairs("www-authenticate", "Bearer"))
	}
	return grpcstatus.ErrorProto(f.Status())
}

// Unknown answers a call of gRPC of a method that no service has. It receives the message of the
// call, and returns the answer's, or ErrNoMethod.
type Unknown func(ctx context.Context, c *Call, header GRPCHeader, receive func() ([]byte, error)) ([]byte, error)

// ErrNoMethod is the status of a method that nobody has.
var ErrNoMethod = grpcstatus.Error(codes.Unimplemented, "there is no such method")

// serveUnknown serves a method by Unknown.
func (s GRPCSettings) serveUnknown(_ any, ss grpc.ServerStream) error {
	if s.Unknown == nil {
		return ErrNoMethod
	}
	stream, c, err := newGRPCCall(ss)
	if err != nil {
		return err
	}
	out, err := s.Unknown(ss.Context(), c, stream.header, func() ([]byte, error) {
		if strings.HasSuffix(stream.header.First("content-type"), "json") {
			return nil, notProtobuf()
		}
		in := &rawMessage{}
		err := stream.receiveOnly(ss, in)
		return in.data, cmp.Or(err, in.err)
	})
	if err != nil {
		return err
	}
	return stream.send(ss, &rawMessage{data: out})
}

// newGRPCCall returns the stream of a call, and the Call for its method.
func newGRPCCall(ss grpc.ServerStream) (*grpcStream, *Call, error) {
	s := streamOf(ss)
	switch kind := s.header.First("content-type"); kind {
	case "application/grpc", "application/grpc+proto", "application/grpc;proto":
		s.codec = binaryCodec(s.settings.MaxMessageBytes)
	case "application/grpc+json", "application/grpc;json":
		s.codec = jsonCodec("json", s.settings.MaxMessageBytes)
	default:
		return nil, nil, fault.Newf(fault.UnsupportedMedia, "messages of %.*q are not accepted; use proto or json", fault.MaxQuoted, kind)
	}
	method, _ := grpc.MethodFromServerStream(ss)
	out := &Call{
		Trace:      traceContext(s.header["traceparent"], s.header["tracestate"]),
		Origin:     tracing.Origin{Protocol: connect.ProtocolGRPC, Method: strings.TrimPrefix(method, "/"), Server: s.header.First(":authority")},
		header:     func(name string) []string { return s.header[name] },
		setHeader:  func(name, value string) { _ = ss.SetHeader(metadata.Pairs(name, value)) }, // they may have left
		setTrailer: func(name, value string) { ss.SetTrailer(metadata.Pairs(name, value)) },
	}
	return s, out, nil
}

// GRPCHeader is the header of a call, with names in lower case.
type GRPCHeader metadata.MD

// First returns the first value of that name, or "".
func (h GRPCHeader) First(name string) string {
	if values := h[name]; len(values) > 0 {
		return values[0]
	}
	return ""
}

// receive is newGRPCCall, with the only message of the call.
func receive[M any, P message[M]](ss grpc.ServerStream) (*grpcStream, *Call, *incoming[M, P], error) {
	s, c, err := newGRPCCall(ss)
	if err != nil {
		return nil, nil, nil, err
	}
	in := &incoming[M, P]{}
	return s, c, in, cmp.Or(s.receiveOnly(ss, in), in.err)
}

// receiveOnly receives the only message of a call.
func (s *grpcStream) receiveOnly(ss grpc.ServerStream, into decodable) error {
	s.into = into
	err := s.receive(ss, true)
	if errors.Is(err, io.EOF) {
		err = grpcstatus.Error(codes.Unimplemented, "the request has no message")
	}
	return err
}

// grpcBidi is the stream of a BidiStream.
type grpcBidi[M any, P message[M], Out any] struct {
	stream *grpcStream
	ss     grpc.ServerStream
	// interrupted is closed when nothing more is received.
	interrupted   chan struct{}
	interruptOnce sync.Once
	receivers     sync.WaitGroup
}

// receive returns the next message, or an error once the stream is interrupted.
func (b *grpcBidi[M, P, Out]) receive() (*incoming[M, P], error) {
	in, received := &incoming[M, P]{}, make(chan error, 1)
	b.receivers.Go(func() {
		b.stream.into = in
		received <- b.stream.receive(b.ss, false)
	})
	select {
	case err := <-received:
		return in, err
	case <-b.interrupted:
		return nil, cmp.Or(b.stream.interruptBy(b.interrupt), error(context.Canceled))
	}
}

func (b *grpcBidi[M, P, Out]) send(out *Out) error { return b.stream.send(b.ss, out) }
func (b *grpcBidi[M, P, Out]) interrupt()          { b.interruptOnce.Do(func() { close(b.interrupted) }) }

// finish sends the stream's status, which ends what is still received, and waits for that.
func (b *grpcBidi[M, P, Out]) finish(err error) {
	writeStatus(b.ss, err)
	b.receivers.Wait()
}

// grpcCodec passes messages as the stream has encoded them, and decodes them into what the
// stream has for them. The messages of other services are the standard's.
type grpcCodec struct{ standard encoding.CodecV2 }

var _ encoding.CodecV2 = grpcCodec{}

// Name implements encoding.CodecV2.
func (c grpcCodec) Name() string { return c.standard.Name() }

// Marshal implements encoding.CodecV2.
func (c grpcCodec) Marshal(message any) (mem.BufferSlice, error) {
	if buffers, ok := message.(mem.BufferSlice); ok {
		return buffers, nil
	}
	return c.standard.Marshal(message)
}

// Unmarshal implements encoding.CodecV2.
func (c grpcCodec) Unmarshal(data mem.BufferSlice, into any) error {
	s, ok := into.(*grpcStream)
	if !ok {
		return c.standard.Unmarshal(data, into)
	}
	s.decode(data)
	return nil
}

// gunzip is there so that the library takes messages in gzip. Streams clear the flags of
// compressed messages and decompress them themselves: the library asks nobody for memory.
type gunzip struct{}

// Type implements grpc.Decompressor.
func (gunzip) Type() string { return encodingGzip }

// Do implements grpc.Decompressor.
func (gunzip) Do(io.Reader) ([]byte, error) { return nil, errors.ErrUnsupported }
