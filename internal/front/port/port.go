// Package port builds the HTTP handlers of the gateway's ports: the public port with every
// front on it, and what every port has around its services.
//
//	handler, err := port.PublicHandler(port.PublicSettings{Caller: service, Port: port.Port{Health: health}})
//	server := port.NewServer(handler, logger)
//	go server.Serve(listener) // and stop it with server.Shutdown
//
// NewGRPC serves the RPC services of the same settings with grpc-go, on a port for gRPC alone.
//
// One Health function answers all probes. It gets "", the gateway as a whole, from /readyz,
// from gRPC health of "" and of the RPC services; and any other name, of a pipeline, as it
// is. /livez is always 200. A Watch of gRPC health looks every second, and ends when the gateway
// stops.
//
// Pages of other origins may call only where Port.Origins lists theirs. That is more than CORS
// headers: a browser sends simple requests, such as a form's, before it looks at the
// response, so a request of an origin that is not listed is PERMISSION_DENIED and reaches no
// service. Programs send no Origin and are not affected.
//
// A Port with Tokens admits callers that send one of them as "Authorization: Bearer TOKEN".
// Others get UNAUTHENTICATED: an RPC in its protocol, other requests in the form of their
// path. Probes, gRPC health and its Open paths need no token.
//
// Handlers are safe for concurrent use and start goroutines for streams only. After
// Stopping is closed, streams of many requests take no more and end when the requests in
// flight are answered.
package port

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"

	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/oip"
	"github.com/stagemesh/stagemesh/internal/front/openai"
	"github.com/stagemesh/stagemesh/internal/front/rest"
	"github.com/stagemesh/stagemesh/internal/jobs"
	"github.com/stagemesh/stagemesh/internal/openapi"
	"github.com/stagemesh/stagemesh/internal/transport"
)

// PublicSettings are the settings of PublicHandler.
type PublicSettings struct {
	// Settings bound what a caller may cost, on every protocol.
	transport.Settings
	// Caller runs the requests: internal/call's service.
	Caller call.Caller
	// Jobs keeps jobs; nil serves none.
	Jobs *jobs.Service
	// Batches keeps files and batches; nil serves none.
	Batches *jobs.Service
	// OpenAI are the models of the OpenAI API; none serve no calls.
	OpenAI openai.Config
	// Models are the pipelines to clients of the Open Inference Protocol; nil serves none.
	Models oip.Models
	// More are further RPC services.
	More []*transport.Service
	// Docs has the OpenAPI document; nil serves neither it nor the page that shows it.
	Docs openapi.Source
	// Passthrough are the methods that models' servers answer, with the text of the
	// passthrough.Path to the ID of the model.
	Passthrough map[string]string
	// Port is what is around the services; PublicHandler adds their names, paths and forms. A
	// nil Health is always healthy.
	Port
}

// PublicHandler returns the handler of everything on the public port.
func PublicHandler(s PublicSettings) (http.Handler, error) {
	mux := http.NewServeMux()
	p, services := s.services()
	for _, service := range services {
		mux.Handle(service.Path(), service)
	}
	mux.Handle(rest.Prefix, rest.New(s.Caller, s.Jobs, s.Settings))
	if s.Jobs != nil {
		jobs := rest.NewJobs(s.Jobs, s.Settings)
		mux.Handle(rest.QueuesPrefix, jobs)
		mux.Handle(rest.JobsPrefix, jobs)
	}
	if s.Batches != nil {
		batches := openai.New(s.Batches, s.Settings)
		for _, path := range []string{openai.FilesPath, openai.BatchesPath} {
			mux.Handle(path, batches)
			mux.Handle(path+"/", batches)
			p.Forms[path] = openai.WriteError
		}
	}
	if len(s.OpenAI.Names()) > 0 {
		calls := openai.NewCalls(s.Caller, s.OpenAI, s.Settings)
		mux.Handle(openai.ModelsPath+"/", calls)
		for _, path := range openai.CallPaths() {
			mux.Handle(path, calls)
			p.Forms[path] = openai.WriteError
		}
	}
	if s.Models != nil {
		tensors := oip.NewREST(s.Caller, s.Models, s.Settings)
		mux.Handle(oip.Root, tensors)
		mux.Handle(oip.Root+"/", tensors)
		p.Forms[oip.Root] = oip.WriteFault
	}
	if s.Docs != nil {
		openapi.Mount(mux, s.Docs)
		p.Open = openapi.OpenPaths()
	}
	mux.Handle("/", transport.NewUnknown(s.Settings, s.passOn, notFound(s.Docs != nil)))
	return p.Handler(mux)
}

// withNames serves the paths with names of models, of a mux that has all its handlers. The mux would
// redirect names with "//" or "..".
func withNames(mux *http.ServeMux) http.Handler {
	prefixes := []string{rest.PipelinesPrefix, oip.ModelsPrefix, oip.RepositoryPrefix, openai.ModelsPath + "/"}
	named := make([]http.Handler, len(prefixes))
	for i, prefix := range prefixes {
		named[i], _ = mux.Handler(&http.Request{Method: http.MethodGet, URL: &url.URL{Path: prefix}})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for i, prefix := range prefixes {
			if strings.HasPrefix(r.URL.Path, prefix) {
				named[i].ServeHTTP(w, r)
				return
			}
		}
		mux.ServeHTTP(w, r)
	})
}

// NewGRPC returns a server of the RPC services on the public port for clients of gRPC. It
// answers them as PublicHandler does, in less time. The TLS may be nil.
func NewGRPC(s PublicSettings, secure *tls.Config, log *slog.Logger) (*grpc.Server, error) {
	p, services := s.services()
	protection, err := p.originProtection()
	if err != nil {
		return nil, err
	}
	out := transport.NewGRPC(transport.GRPCSettings{
		Settings: s.Settings, Memory: p.Memory, TLS: secure, Guard: p.guardCalls(protection), Delay: p.Tokens.DelayRefusal, Unknown: s.passOn, Logger: log,
	}, append(services, p.healthService())...)
	reflection.Register(struct {
		grpc.ServiceRegistrar
		reflection.ServiceInfoProvider
	}{out, p})
	return out, nil
}

// services returns the port with the names of its RPC services, and these.
func (s PublicSettings) services() (*Port, []*transport.Service) {
	p, out := s.Port, []*transport.Service{newRPC(s.Caller, s.Settings)}
	if s.Jobs != nil {
		out = append(out, newJobs(s.Jobs, s.Settings))
	}
	if s.Models != nil {
		out = append(out, oip.New(s.Caller, s.Models, s.Settings))
	}
	out = append(out, s.More...)
	p.Services, p.Forms = nil, Forms{}
	for _, one := range out {
		p.Services = append(p.Services, one.Name())
	}
	if p.Health == nil {
		p.Health = func(context.Context, string) error { return nil }
	}
	return &p, out
}

// notFound answers for paths that nothing serves.
func notFound(documented bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		f := rest.NotFound(r.URL.Path)
		if documented {
			f.Message += "; GET " + openapi.DocumentPath + " describes all that there is"
		}
		transport.WriteFault(w, f)
	}
}

// Bounds on a connection, beside transport's. There is no bound on a whole request
// or answer: uploads and answers have transport.DefaultStallTimeout, and streams may be long.
const (
	// maxConcurrentStreams is per connection, the least that RFC 9113 recommends: net/http takes 8 KiB
	// for each before a handler counts it.
	maxConcurrentStreams = 100
	writeStall           = 30 * time.Second
	// maxFrame and the buffers are per connection, and taken before a handler reads anything.
	maxFrame         = 16 << 10
	maxStreamBuffer  = 256 << 10
	maxRequestBuffer = 512 << 10
)

// NewServer returns a server for the handler: HTTP/1 and HTTP/2 on
// one port, HTTP/2 without TLS too. The caller listens by transport.Connections, which end those
// that are idle, serves and stops it.
func NewServer(h http.Handler, log *slog.Logger) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:           h,
		Protocols:         protocols,
		ReadHeaderTimeout: transport.HandshakeTimeout,
		MaxHeaderBytes:    transport.MaxHeaderBytes,
		ConnContext:       transport.ConnContext,
		ConnState:         transport.EndIdle,
		ErrorLog:          transport.ErrorLog(log),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxConcurrentStreams,
			SendPingTimeout:      transport.PingAfter,
			PingTimeout:          transport.PingTimeout,
			WriteByteTimeout:     writeStall,
			MaxReadFrameSize:     maxFrame,

			MaxReceiveBufferPerStream:     maxStreamBuffer,
			MaxReceiveBufferPerConnection: maxRequestBuffer,
		},
	}
}
