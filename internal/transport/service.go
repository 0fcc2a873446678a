package transport

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// defaultMaxMessageBytes is the limit of a request where Settings name none.
const defaultMaxMessageBytes = 64 << 20

// Settings bound what a caller may cost, on every front.
type Settings struct {
	// MaxMessageBytes bounds one request message or body, as sent and decompressed; 0 is
	// defaultMaxMessageBytes.
	MaxMessageBytes int
	// Uncompressed refuses messages in gzip.
	Uncompressed bool
	// MaxPayload bounds the memory of one request's decoded inputs, in bytes; 0 is no limit.
	MaxPayload int
	// StallTimeout is how long a caller may take to send 256 KiB of a message, or to take as
	// much of a response; 0 is DefaultStallTimeout.
	StallTimeout time.Duration
	// PingInterval is how long an event stream sends nothing before a comment; 0 is
	// DefaultPingInterval.
	PingInterval time.Duration
	// Stopping is closed when the gateway stops: bidirectional streams then take no more
	// messages. nil never is.
	Stopping <-chan struct{}
	// Closing is closed when requests are no longer admitted: a body that has not arrived by
	// then is not awaited. nil never is.
	Closing <-chan struct{}
}

// WithDefaults returns s with the defaults of what is not set.
func (s Settings) WithDefaults() Settings {
	if s.MaxMessageBytes <= 0 {
		s.MaxMessageBytes = defaultMaxMessageBytes
	}
	if s.StallTimeout <= 0 {
		s.StallTimeout = DefaultStallTimeout
	}
	return s
}

// Service is the HTTP handler of a service's methods.
type Service struct {
	descriptor protoreflect.ServiceDescriptor
	settings   Settings
	// methods are by path.
	methods map[string]http.Handler
	// streams are the methods for NewGRPC.
	streams []grpc.StreamDesc
}

var _ http.Handler = (*Service)(nil)

// NewService returns the service of that descriptor, without any method.
func NewService(d protoreflect.ServiceDescriptor, s Settings) *Service {
	return &Service{descriptor: d, settings: s.WithDefaults(), methods: map[string]http.Handler{}}
}

// ServeHTTP implements http.Handler. All methods are added before it is called.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if method, ok := s.methods[r.URL.Path]; ok {
		method.ServeHTTP(w, r)
		return
	}
	http.NotFound(w, r)
}

// Name is the service's.
func (s *Service) Name() string { return string(s.descriptor.FullName()) }

// Path is where the service is to be mounted.
func (s *Service) Path() string { return "/" + s.Name() + "/" }

// Call is what a method learns of a call beside its message, and what it answers beside it.
type Call struct {
	// Trace is the caller's W3C trace context, and Origin how the call came.
	Trace  envelope.Trace
	Origin tracing.Origin
	// PlainHTTP is true where HTTP tools show the response's headers: the protocol is
	// Connect's own.
	PlainHTTP bool
	// Index is the place of a message in a stream of many, from 0.
	Index uint64

	// earlier is the order of that stream.
	earlier               *order
	header                func(name string) []string
	setHeader, setTrailer func(name, value string)
}

// Header returns the values of a header of the request, by its name in lower case.
func (c *Call) Header(name string) []string {
	if c == nil || c.header == nil {
		return nil
	}
	return c.header(name)
}

// AwaitEarlier returns once all messages of the stream before this one are answered.
func (c *Call) AwaitEarlier(ctx context.Context) error { return c.earlier.await(ctx, c.Index) }

// SetHeader sets a header of the response; headers of a stream leave with its first message.
func (c *Call) SetHeader(name, value string) {
	if c.setHeader != nil {
		c.setHeader(name, value)
	}
}

// SetTrailer sets a trailer of the response.
func (c *Call) SetTrailer(name, value string) {
	if c.setTrailer != nil {
		c.setTrailer(name, value)
	}
}

func newCall(ctx context.Context, h http.Header, peer connect.Peer, procedure string) *Call {
	out := &Call{
		Trace:     TraceContext(h),
		Origin:    tracing.Origin{Protocol: connect.ProtocolGRPC, Method: strings.TrimPrefix(procedure, "/"), Client: peer.Addr},
		PlainHTTP: peer.Protocol == connect.ProtocolConnect,
		header:    h.Values,
	}
	if b, ok := ctx.Value(callBodyKey{}).(*callBody); ok {
		out.Origin.Server = b.host
	}
	if out.PlainHTTP {
		out.Origin.Protocol = "connectrpc"
	}
	return out
}

// Unary serves f as the method of that name.
func Unary[M any, P message[M], Out any](s *Service, name protoreflect.Name, f func(context.Context, *Call, P) (*Out, error)) {
	s.handle(name, limitMessage, func(path string, options connect.HandlerOption) http.Handler {
		return connect.NewUnaryHandler(path, func(ctx context.Context, in *connect.Request[incoming[M, P]]) (*connect.Response[Out], error) {
			if err := in.Msg.open(ctx); err != nil {
				return nil, RPCError(err)
			}
			defer in.Msg.memory.Close()
			out, c := connect.NewResponse[Out](nil), newCall(ctx, in.Header(), in.Peer(), path)
			c.setHeader = func(name, value string) { out.Header().Set(name, value) }
			c.setTrailer = func(name, value string) { out.Trailer().Set(name, value) }
			var err error
			if out.Msg, err = f(ctx, c, &in.Msg.message); err != nil {
				return nil, RPCError(err)
			}
			return out, nil
		}, options)
	})
	s.handleGRPC(name, func(ss grpc.ServerStream) error {
		stream, c, in, err := receive[M, P](ss)
		if err != nil {
			return err
		}
		defer in.memory.Close()
		out, err := f(ss.Context(), c, &in.message)
		if err != nil {
			return err
		}
		return stream.send(ss, out)
	})
}

// ServerStream serves f as the method of that name, which sends a stream of messages. An
// error of send means that nobody takes the response; f returns it.
func ServerStream[M any, P message[M], Out any](s *Service, name protoreflect.Name, f func(ctx context.Context, c *Call, in P, send func(*Out) error) error) {
	s.handle(name, limitMessage, func(path string, options connect.HandlerOption) http.Handler {
		return connect.NewServerStreamHandler(path, func(ctx context.Context, in *connect.Request[incoming[M, P]], out *connect.ServerStream[Out]) error {
			if err := in.Msg.open(ctx); err != nil {
				return RPCError(err)
			}
			defer in.Msg.memory.Close()
			c := newCall(ctx, in.Header(), in.Peer(), path)
			c.setHeader, c.setTrailer = out.ResponseHeader().Set, out.ResponseTrailer().Set
			send := func(m *Out) error { return sendFault(ctx, out.Send(m)) }
			if err := f(ctx, c, &in.Msg.message, send); err != nil {
				return RPCError(err)
			}
			return nil
		}, options)
	})
	s.handleGRPC(name, func(ss grpc.ServerStream) error {
		stream, c, in, err := receive[M, P](ss)
		if err != nil {
			return err
		}
		defer in.memory.Close()
		return f(ss.Context(), c, &in.message, func(m *Out) error { return sendFault(ss.Context(), stream.send(ss, m)) })
	})
}

// sendFault classifies a response that could not be sent: the deadline passed, or the caller
// has disconnected.
func sendFault(ctx context.Context, err error) error {
	if _, ok := errors.AsType[*fault.Fault](err); ok || err == nil {
		return err
	}
	if cause := ctx.Err(); cause != nil {
		return fault.From(cause)
	}
	return fault.Newf(fault.Cancelled, "the answer could not be sent: %w", err)
}

func (s *Service) handle(name protoreflect.Name, limit func(http.Handler, Settings) http.Handler, handler func(path string, options connect.HandlerOption) http.Handler) {
	path := s.Path() + string(name)
	if s.methods[path] != nil {
		panic("two methods " + path) // as of a ServeMux
	}
	options := connect.WithHandlerOptions(
		connect.WithSchema(s.descriptor.Methods().ByName(name)),
		connect.WithCodec(binaryCodec(s.settings.MaxMessageBytes)),
		connect.WithCodec(jsonCodec("json", s.settings.MaxMessageBytes)),
		connect.WithCodec(jsonCodec("json; charset=utf-8", s.settings.MaxMessageBytes)),
		connect.WithCompressMinBytes(math.MaxInt),
		connect.WithReadMaxBytes(s.settings.MaxMessageBytes),
	)
	s.methods[path] = limit(handler(path, options), s.settings)
}

// handleGRPC is handle for NewGRPC. The library handles a message of a stream when the
// handler receives it, and another method's before.
func (s *Service) handleGRPC(name protoreflect.Name, handler func(grpc.ServerStream) error) {
	s.streams = append(s.streams, grpc.StreamDesc{
		StreamName: string(name), ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, ss grpc.ServerStream) error { return handler(ss) },
	})
}

// maxLead is how much earlier than the RPC a request ends, at most.
const maxLead = 10 * time.Millisecond

// EarlierTimeout returns the earlier of the timeout that a request asks for, 0 for none, and
// the time that the RPC's own deadline leaves; 0 where there is neither. It leaves the time to
// answer: grpc-go resets a stream at its deadline, and a client whose own timer is later
// takes that for a cancellation.
func EarlierTimeout(ctx context.Context, requested time.Duration) (time.Duration, error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return requested, nil
	}
	left := time.Until(deadline)
	if left <= 0 {
		return 0, fault.From(context.DeadlineExceeded)
	}
	const part = 20
	left -= min(maxLead, left/part)
	if requested == 0 {
		return left, nil
	}
	return min(requested, left), nil
}
