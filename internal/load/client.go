package load

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Target makes one request, waits for its answer, and fills it in. The answer is empty,
// but its slices may have capacity to reuse. Errors other than a *RequestError count as
// ReasonUnknown.
type Target func(ctx context.Context, into *Answer) error

// Answer is what is measured of one answer, beside its latency. It belongs to the caller
// of the target, who reuses it.
type Answer struct {
	// Total is from the gateway's admission of the request to the reply's arrival
	// there; 0 if the target does not report it.
	Total time.Duration
	// Steps are the timeline, in order; none if the target does not report it.
	Steps []StepTiming
	// Chunks are the times at which the parts of a streamed answer arrived, since the
	// request was sent.
	Chunks []time.Duration
}

// StepTiming is the time that one request spent at one step.
type StepTiming struct {
	Name              string
	Queue, Batch, Run time.Duration
	BatchSize         uint32
	Dispatch          string
	// Attempt counts deliveries of the item; 0 if that is not known.
	Attempt uint32
}

func (a *Answer) reset() { a.Total, a.Steps, a.Chunks = 0, a.Steps[:0], a.Chunks[:0] }

// Protocol is the protocol of a client.
type Protocol string

// The protocols.
const (
	GRPC    Protocol = "grpc"
	Connect Protocol = "connect"
	HTTP    Protocol = "http"
	OIP     Protocol = "oip"
)

// ClientSettings describe a client of a mesh, and its requests.
type ClientSettings struct {
	Protocol Protocol
	// Address is the base URL of a gateway, without a path.
	Address string
	// TLS is for https; nil means the system's own roots.
	TLS *tls.Config
	// Token is sent with every request, unless it is empty.
	Token    string
	Pipeline string
	// Inputs of the requests, which take turns.
	Inputs [][]payload.Part
	// Timeout of a request; 0 means the pipeline's own.
	Timeout    time.Duration
	Durability pipeline.Durability
	Priority   int32
	// Streams requests the answer in chunks; for GRPC and Connect.
	Streams bool
	// Traced gives each request a trace of its own, sampled, as a W3C traceparent.
	Traced bool
	// Connections are how many connections with one request at a time are kept open;
	// 0 means DefaultMaxInFlight.
	Connections int
}

// errUnsupported means that the protocol has no way to express a setting.
var errUnsupported = errors.New("not supported")

// Validate returns an error that begins with the name of the wrong setting.
func (s ClientSettings) Validate() error {
	u, err := url.Parse(s.Address)
	known := slices.Contains([]Protocol{GRPC, Connect, HTTP, OIP}, s.Protocol)
	rpc := s.Protocol == GRPC || s.Protocol == Connect
	switch {
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		return fmt.Errorf("address: %q is not a URL such as http://127.0.0.1:8080", s.Address)
	case len(s.Inputs) == 0:
		return errors.New("inputs: at least one is required")
	case s.Timeout < 0:
		return fmt.Errorf("timeout: %s is negative", s.Timeout)
	case !known:
		return fmt.Errorf("protocol: expected grpc, connect, http or oip, got %q", s.Protocol)
	case s.Streams && !rpc:
		return fmt.Errorf("streams: %w by %s: use grpc or connect", errUnsupported, s.Protocol)
	case s.Durability != "" && s.Protocol == OIP:
		return fmt.Errorf("durability: %w by %s: use another protocol, or set it in the pipeline", errUnsupported, s.Protocol)
	case s.Priority != 0 && s.Protocol == OIP:
		return fmt.Errorf("priority: %w by %s: use another protocol", errUnsupported, s.Protocol)
	}
	return nil
}

// Client makes the requests of its settings. It is safe for concurrent use.
type Client struct {
	settings ClientSettings
	wire     wire
	next     atomic.Uint64
}

// wire implements one protocol; the i-th of the prepared requests is sent.
type wire interface {
	send(ctx context.Context, i int, into *Answer) error
	close()
}

// NewClient returns a client. It connects when the first request is sent.
func NewClient(s ClientSettings) (*Client, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	out := &Client{settings: s}
	var err error
	switch s.Protocol {
	case HTTP:
		out.wire, err = newHTTPWire(s)
	case OIP:
		out.wire, err = newOIPWire(s)
	default:
		out.wire = newRPCWire(s)
	}
	return out, err
}

// Bounds on a request: defaultTimeout if it has no timeout of its own, and else grace
// longer than its timeout, as the mesh should end it first.
const (
	defaultTimeout = 10 * time.Minute
	grace          = 10 * time.Second
)

// Do is a Target.
func (c *Client) Do(ctx context.Context, into *Answer) error {
	limit := defaultTimeout
	if c.settings.Timeout > 0 {
		limit = c.settings.Timeout + grace
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	turn := (c.next.Add(1) - 1) % uint64(len(c.settings.Inputs))
	return c.wire.send(ctx, int(turn), into)
}

// Close closes the connections. No request may be in flight.
func (c *Client) Close() { c.wire.close() }

// Bounds on connections.
const (
	handshakeTime = 10 * time.Second
	idleTime      = time.Minute
)

// httpClient returns a client of HTTP/2, or of HTTP/1.1. It follows no redirect: the
// token is for that address alone.
func (s ClientSettings) httpClient(http2 bool) *http.Client {
	connections := s.Connections
	if connections == 0 {
		connections = DefaultMaxInFlight
	}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: s.TLS.Clone(),
		TLSHandshakeTimeout: handshakeTime, IdleConnTimeout: idleTime,
		MaxIdleConnsPerHost: connections, DisableCompression: true,
		Protocols: new(http.Protocols),
	}
	transport.Protocols.SetHTTP1(!http2)
	transport.Protocols.SetHTTP2(http2)
	transport.Protocols.SetUnencryptedHTTP2(http2)
	return &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// RequestError is the error of a request without an answer.
type RequestError struct {
	// Reason is one of few names, such as QUEUE_FULL.
	Reason string
	// Refused is true if the target did not admit the request: there was no capacity.
	Refused bool
	// Retryable is true if the same request may succeed later.
	Retryable bool
	Err       error
}

// Error implements error.
func (e *RequestError) Error() string { return e.Err.Error() }

// Unwrap returns the target's error.
func (e *RequestError) Unwrap() error { return e.Err }

// Reasons of errors that have no reason of the mesh.
const (
	ReasonUnreachable = "UNREACHABLE"
	ReasonNoAnswer    = "NO_ANSWER"
	ReasonUnknown     = "UNKNOWN"
)

func requestError(reason string, err error) error {
	class := fault.Classify(fault.Reason(reason))
	return &RequestError{Reason: reason, Refused: class.Refused(), Retryable: class.Retryable, Err: err}
}

// transportError describes a request without an answer of any kind.
func transportError(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return requestError(ReasonNoAnswer, err)
	}
	return requestError(ReasonUnreachable, err)
}

// connectError classifies an error of Connect's client.
func connectError(err error) error {
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return transportError(err)
	}
	for _, detail := range rpc.Details() {
		value, err := detail.Value()
		if info, is := value.(*errdetails.ErrorInfo); err == nil && is {
			return requestError(info.GetReason(), rpc)
		}
	}
	if !connect.IsWireError(rpc) {
		return transportError(rpc)
	}
	return requestError(strings.ToUpper(rpc.Code().String()), rpc)
}

// grpcError classifies an error of gRPC's client. A mesh gives a reason with all of its
// own errors.
func grpcError(err error) error {
	of := status.Convert(err)
	for _, detail := range of.Details() {
		if info, is := detail.(*errdetails.ErrorInfo); is {
			return requestError(info.GetReason(), err)
		}
	}
	switch of.Code() {
	case codes.Unavailable:
		return requestError(ReasonUnreachable, err)
	case codes.DeadlineExceeded:
		return requestError(ReasonNoAnswer, err)
	}
	// Connect writes the codes as their specification does, but in lower case.
	return requestError(strings.ToUpper(connect.Code(of.Code()).String()), err)
}
