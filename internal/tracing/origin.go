package tracing

import (
	"net"
	"net/http"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Origin is how a request came: what its span says of its caller's protocol.
type Origin struct {
	// Protocol is http, grpc or connectrpc; empty for a library's caller.
	Protocol string
	// Method is the method of HTTP, or "service/method" of an RPC.
	Method string
	// Route is the path of HTTP, with its variable parts in braces.
	Route string
	// Path is the path of HTTP.
	Path string
	// Server and Client are addresses: the Host that the caller gave, and the caller's.
	Server, Client string
}

// ProtocolHTTP is the Protocol of plain HTTP.
const ProtocolHTTP = "http"

// SpanName returns the name of the span of such a request.
func (o *Origin) SpanName() string {
	switch {
	case o.Method == "":
		return "infer"
	case o.Route == "":
		return o.Method
	}
	return o.Method + " " + o.Route
}

// maxOriginText bounds a caller's own text in a span, in bytes.
const maxOriginText = 1024

func clip(text string) string { return Text(text[:min(len(text), maxOriginText)]) }

// Attributes returns the attributes of its span.
func (o *Origin) Attributes() []attribute.KeyValue {
	var out []attribute.KeyValue
	switch o.Protocol {
	case "":
	case ProtocolHTTP:
		out = append(out, semconv.HTTPRequestMethodKey.String(o.Method), semconv.HTTPRoute(o.Route), semconv.URLPath(clip(o.Path)))
	default:
		out = append(out, semconv.RPCSystemNameKey.String(o.Protocol), semconv.RPCMethod(o.Method))
	}
	host, port, err := net.SplitHostPort(o.Server)
	if err != nil {
		host = o.Server
	}
	if host != "" {
		out = append(out, semconv.ServerAddress(clip(host)))
	}
	if n, err := strconv.Atoi(port); err == nil {
		out = append(out, semconv.ServerPort(n))
	}
	if host, _, err := net.SplitHostPort(o.Client); err == nil {
		out = append(out, semconv.ClientAddress(host))
	}
	return out
}

// status returns the attribute of the answer.
func (o *Origin) status(f *fault.Fault) attribute.KeyValue {
	status, code := http.StatusOK, "OK"
	if f != nil {
		status, code = f.HTTPStatus(), f.GRPCCode().String()
	}
	if o.Protocol == ProtocolHTTP {
		return semconv.HTTPResponseStatusCode(status)
	}
	return semconv.RPCResponseStatusCode(code)
}

// End ends the span of a request; f is nil for success.
func (o *Origin) End(span trace.Span, f *fault.Fault, at time.Time) {
	if !span.IsRecording() {
		return
	}
	if o.Protocol != "" {
		span.SetAttributes(o.status(f))
	}
	if f != nil {
		Fail(span, f)
	}
	span.End(trace.WithTimestamp(at))
}
