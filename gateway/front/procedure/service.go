package procedure

import (
	"context"
	"math"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/stagemesh/stagemesh/gateway/front/body"
)

// DefaultMaxMessageBytes is the limit where Settings name none.
const DefaultMaxMessageBytes = 64 << 20

// Settings bound what a caller may cost.
type Settings struct {
	// MaxMessageBytes bounds one request message, as sent and decompressed; 0
	// is DefaultMaxMessageBytes.
	MaxMessageBytes int
	// MaxPayload bounds what a procedure makes of the inputs in one message, in bytes,
	// for procedures that make any; 0 means that nothing does.
	MaxPayload int
	// Patience is how long a caller may send nothing of a message, or take
	// nothing of an answer; 0 is body.Patience.
	Patience time.Duration
	// Stopping is closed when the gateway stops: a stream of many messages takes
	// no more then. nil never is.
	Stopping <-chan struct{}
}

func (s Settings) withDefaults() Settings {
	if s.MaxMessageBytes <= 0 {
		s.MaxMessageBytes = DefaultMaxMessageBytes
	}
	if s.Patience <= 0 {
		s.Patience = body.Patience
	}
	return s
}

// Service is the handler of a service's procedures.
type Service struct {
	descriptor protoreflect.ServiceDescriptor
	settings   Settings
	// procedures are by path.
	procedures map[string]http.Handler
}

var _ http.Handler = (*Service)(nil)

// NewService returns the service of that descriptor, without any procedure.
func NewService(d protoreflect.ServiceDescriptor, s Settings) *Service {
	return &Service{descriptor: d, settings: s.withDefaults(), procedures: map[string]http.Handler{}}
}

// ServeHTTP implements http.Handler. The procedures are there before it is called.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if procedure, ok := s.procedures[r.URL.Path]; ok {
		procedure.ServeHTTP(w, r)
		return
	}
	http.NotFound(w, r)
}

// Path is where the service is to be mounted.
func (s *Service) Path() string { return "/" + string(s.descriptor.FullName()) + "/" }

// Request is one call of a procedure. P is a pointer to a generated message.
type Request[P any] struct {
	Message P
	Header  http.Header
	// Connect says that the caller speaks Connect's own protocol.
	Connect bool
}

// Unary makes f the procedure of that name.
func Unary[M any, P message[M], Out any](s *Service, name protoreflect.Name, f func(context.Context, Request[P]) (*connect.Response[Out], error)) {
	s.handle(name, limit, func(procedure string, options connect.HandlerOption) http.Handler {
		return connect.NewUnaryHandler(procedure, func(ctx context.Context, in *connect.Request[incoming[M, P]]) (*connect.Response[Out], error) {
			if in.Msg.err != nil {
				return nil, Failure(in.Msg.err)
			}
			out, err := f(ctx, request(in))
			if err != nil {
				return nil, Failure(err)
			}
			return out, nil
		}, options)
	})
}

// Stream makes f the procedure of that name, which answers with a stream.
func Stream[M any, P message[M], Out any](s *Service, name protoreflect.Name, f func(context.Context, Request[P], *connect.ServerStream[Out]) error) {
	s.handle(name, limit, func(procedure string, options connect.HandlerOption) http.Handler {
		return connect.NewServerStreamHandler(procedure, func(ctx context.Context, in *connect.Request[incoming[M, P]], out *connect.ServerStream[Out]) error {
			err := in.Msg.err
			if err == nil {
				err = f(ctx, request(in), out)
			}
			if err != nil {
				return Failure(err)
			}
			return nil
		}, options)
	})
}

func request[M any, P message[M]](in *connect.Request[incoming[M, P]]) Request[P] {
	return Request[P]{
		Message: &in.Msg.message,
		Header:  in.Header(),
		Connect: in.Peer().Protocol == connect.ProtocolConnect,
	}
}

func (s *Service) handle(name protoreflect.Name, bound func(http.Handler, Settings) http.Handler, handler func(procedure string, options connect.HandlerOption) http.Handler) {
	procedure := s.Path() + string(name)
	if s.procedures[procedure] != nil {
		panic("two procedures " + procedure) // as of a ServeMux
	}
	s.procedures[procedure] = bound(handler(procedure, s.options(name)), s.settings)
}

func (s *Service) options(name protoreflect.Name) connect.HandlerOption {
	return connect.WithHandlerOptions(
		connect.WithSchema(s.descriptor.Methods().ByName(name)),
		connect.WithCodec(binaryCodec{}),
		connect.WithCodec(jsonCodec{name: "json"}),
		connect.WithCodec(jsonCodec{name: "json; charset=utf-8"}),
		connect.WithCompression("gzip", newDecompressor(s.settings.MaxMessageBytes), newCompressor),
		connect.WithCompressMinBytes(math.MaxInt),
		connect.WithReadMaxBytes(s.settings.MaxMessageBytes),
	)
}
