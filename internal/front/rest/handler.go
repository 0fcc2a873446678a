// Package rest serves inference on plain HTTP, for curl and other clients without RPC.
// docs/http.md is the manual of its paths, options, formats and events:
//
//	POST   /v1/pipelines/{pipeline}:infer
//	POST   /v1/pipelines/{pipeline}:stream
//	POST   /v1/pipelines/{pipeline}:many        a request and an answer a line
//	GET    /v1/requests/{request_id}/result?wait=5s
//	DELETE /v1/requests/{request_id}
//
// The Content-Type decides how a body is read: JSON and MessagePack are tensors in the form
// of the Open Inference Protocol where they look like it, by internal/front/oipjson. Each part
// of a form, and every other body, is one blob. Options of the query win over the
// body's, and unknown keys are rejected.
//
// A response of exactly one blob is that blob, unless Accept or the request asks for JSON or
// MessagePack. A stream responds with server-sent events in JSON. A failure before the first
// event is an ordinary response; after it, the last event. A request with Last-Event-ID is
// rejected: a stream cannot be resumed, and running it again unasked would run it twice.
//
// Faults are written by transport.WriteFault. A wrong method is 405 with the reason
// INVALID_REQUEST.
//
// The handler is safe for concurrent use. It starts one goroutine beside each stream, and one for each
// line of :many that runs, which end with it. The whole body, or line, is in memory before the Caller
// gets the request, and the whole response before its first byte is sent.
package rest

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/internal/jobs"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Prefix is the path under which the handler is to be mounted. Names of pipelines follow
// PipelinesPrefix.
const (
	Prefix          = "/v1/"
	PipelinesPrefix = Prefix + "pipelines/"
)

type handler struct {
	caller call.Caller
	// jobs is nil where there are none.
	jobs     *jobs.Service
	settings transport.Settings
}

// New returns the handler of everything under Prefix. The jobs may be nil.
func New(caller call.Caller, jobs *jobs.Service, s transport.Settings) http.Handler {
	s = s.WithDefaults()
	return transport.WithStallTimeout(&handler{caller: caller, jobs: jobs, settings: s}, s.StallTimeout)
}

// ServeHTTP implements http.Handler.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	method, serve := h.route(r.URL.Path)
	switch {
	case serve == nil:
		transport.WriteFault(w, NotFound(r.URL.Path))
	case r.Method != method:
		transport.WriteFaultStatus(w, transport.WrongMethod(w, r, method), http.StatusMethodNotAllowed)
	default:
		serve(w, r)
	}
}

// route returns the method and the handler of a path, nil where nothing serves it. The name of a
// pipeline ends at the last colon, and a model's may have slashes. The router of net/http
// knows no pattern with a suffix, and writes its own 404 and 405.
func (h *handler) route(path string) (method string, serve http.HandlerFunc) {
	kind, rest, _ := strings.Cut(strings.TrimPrefix(path, Prefix), "/")
	name, verb := rest, ""
	if i := strings.LastIndexAny(rest, ":/"); i >= 0 {
		name, verb = rest[:i], rest[i:]
	}
	switch {
	case name == "", kind != "pipelines" && strings.Contains(name, "/"):
	case kind == "pipelines" && verb == ":infer":
		return http.MethodPost, func(w http.ResponseWriter, r *http.Request) {
			if wait, ok := asyncPreference(r.Header); ok && h.jobs != nil && h.jobs.QueueOf(r.Context(), name) != "" {
				start := time.Now()
				if err := h.inferAsync(w, r, name, wait); err != nil {
					h.fail(w, err, start)
				}
				return
			}
			h.write(w, func() (*response, error) { return h.infer(w, r, name) })
		}
	case kind == "pipelines" && verb == ":stream":
		return http.MethodPost, func(w http.ResponseWriter, r *http.Request) { h.stream(w, r, name) }
	case kind == "pipelines" && verb == ":many":
		return http.MethodPost, func(w http.ResponseWriter, r *http.Request) {
			start := time.Now()
			if err := h.inferMany(w, r, name); err != nil {
				h.fail(w, err, start)
			}
		}
	case kind == "pipelines" && verb == ":result":
		return http.MethodGet, func(w http.ResponseWriter, r *http.Request) { h.result(w, r, kind, name) }
	case kind == "pipelines" && verb == ":cancel":
		return http.MethodPost, func(w http.ResponseWriter, r *http.Request) { h.cancel(w, r, kind, name) }
	case kind == "requests" && verb == "/result":
		return http.MethodGet, func(w http.ResponseWriter, r *http.Request) { h.result(w, r, kind, name) }
	case kind == "requests" && !strings.HasPrefix(verb, "/"):
		return http.MethodDelete, func(w http.ResponseWriter, r *http.Request) { h.cancel(w, r, kind, rest) }
	}
	return "", nil
}

// write sends the response that get returns, or its error.
func (h *handler) write(w http.ResponseWriter, get func() (*response, error)) {
	start := time.Now()
	out, err := get()
	if err != nil {
		h.fail(w, err, start)
		return
	}
	out.write(w)
}

// fail sends the error of a request that arrived at start.
func (h *handler) fail(w http.ResponseWriter, err error, start time.Time) {
	w.Header().Set(transport.HeaderServerTiming, transport.ServerTiming(time.Since(start), nil, nil))
	transport.WriteFault(w, err)
}

// infer runs one request and returns its whole response.
func (h *handler) infer(w http.ResponseWriter, r *http.Request, pipeline string) (*response, error) {
	memory := budget.Of(r.Context(), h.settings.MaxPayload)
	defer memory.Close()
	request, f, err := h.readRequest(w, r, pipeline, PipelinesPrefix+"{pipeline}:infer", memory)
	if err != nil {
		return nil, err
	}
	out, err := h.caller.Infer(r.Context(), request)
	if err != nil {
		return nil, err
	}
	return f.encode(out)
}

// readRequest reads a request, and the format of its response. Its inputs share the body's bytes
// or are decoded into reserved memory.
func (h *handler) readRequest(w http.ResponseWriter, r *http.Request, pipeline, route string, memory *budget.Account) (*request.Request, format, error) {
	if err := transport.CheckLength(r, int64(h.settings.MaxMessageBytes)); err != nil {
		return nil, format{}, err
	}
	request, err := ReadOptions(r)
	if err != nil {
		return nil, format{}, err
	}
	request.Pipeline, request.Trace, request.Origin = pipeline, transport.TraceContext(r.Header), transport.HTTPOrigin(r, route)
	f, err := h.readInputs(request, w, r, memory)
	return request, f, err
}

// ReadOptions returns a request of what its headers and query say.
func ReadOptions(r *http.Request) (*request.Request, error) {
	if err := transport.CheckEncoding(r); err != nil {
		return nil, err
	}
	out := new(request.Request)
	return out, options(out, r)
}

// NotFound is the fault of a path that nothing serves.
func NotFound(path string) *fault.Fault {
	return fault.Newf(fault.NotFound, "there is nothing at %.*q; inference is POST %s<pipeline>:infer, and :stream for an answer in events", fault.MaxQuoted, path, PipelinesPrefix)
}

// result answers with the stored result of a request. It may change, so no cache may store the
// response.
func (h *handler) result(w http.ResponseWriter, r *http.Request, kind, name string) {
	w.Header().Set("Cache-Control", "no-store")
	h.write(w, func() (*response, error) {
		wait, err := waitOf(r.URL.RawQuery)
		if err != nil {
			return nil, err
		}
		id, err := h.requestID(r, kind, name)
		if err != nil {
			return nil, err
		}
		out, err := h.caller.Result(r.Context(), id, wait)
		if err != nil {
			return nil, err
		}
		return formatOf(r.Header).encode(out)
	})
}

// requestID returns the ID of the request that a path names, by its ID or by its pipeline and
// the idempotency key in a header.
func (h *handler) requestID(r *http.Request, kind, name string) (string, error) {
	if kind == "requests" {
		return name, nil
	}
	var asked request.Request
	if err := takeHeader(&asked, transport.HeaderIdempotencyKey, strings.TrimSpace(r.Header.Get(transport.HeaderIdempotencyKey))); err != nil {
		return "", invalid(transport.HeaderIdempotencyKey, err)
	}
	return h.caller.RequestOf(r.Context(), request.Key{Pipeline: pipeline.Name(name), Key: asked.IdempotencyKey})
}

func (h *handler) cancel(w http.ResponseWriter, r *http.Request, kind, name string) {
	id, err := h.requestID(r, kind, name)
	if err == nil {
		err = h.caller.Cancel(r.Context(), id)
	}
	if err != nil {
		transport.WriteFault(w, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// stream answers one request with events as its chunks arrive.
func (h *handler) stream(w http.ResponseWriter, r *http.Request, pipeline string) {
	start := time.Now()
	out := &stream{EventStream: transport.NewEventStream(w, h.settings.PingInterval)}
	err := h.sendStream(out, w, r, pipeline)
	switch {
	case err == nil:
	case out.Begun():
		// A failed send is not an error: the caller has disconnected.
		_ = out.Send(transport.Event{Name: "error", Data: transport.FaultJSON(transport.WithRequestID(err, out.id))})
	default:
		h.fail(w, err, start)
	}
}

// sendStream reads the request and sends its response.
func (h *handler) sendStream(out *stream, w http.ResponseWriter, r *http.Request, pipeline string) error {
	if last := strings.TrimSpace(r.Header.Get(lastEventID)); last != "" {
		return invalid(lastEventID, fmt.Errorf("%.*q: streams cannot be resumed; send the request again without Last-Event-ID", fault.MaxQuoted, last))
	}
	memory := budget.Of(r.Context(), h.settings.MaxPayload)
	defer memory.Close()
	request, f, err := h.readRequest(w, r, pipeline, PipelinesPrefix+"{pipeline}:stream", memory)
	if err != nil {
		return err
	}
	return out.Run(r.Context(), func(ctx context.Context) error {
		response, err := h.caller.Stream(ctx, request, out.sendChunk)
		if err != nil {
			return err
		}
		return out.sendDone(response, f)
	})
}

// lastEventID is the header of a reader that resumes a broken stream.
const lastEventID = "Last-Event-ID"

// stream is a streamed response.
type stream struct {
	*transport.EventStream

	// id and seq are of the last event.
	id  string
	seq uint64
}

// sendChunk sends a chunk. A chunk that JSON cannot represent ends the call.
func (s *stream) sendChunk(c request.Chunk) error {
	if a := c.Activating; a != nil {
		s.SetHeader(transport.HeaderRequestID, c.RequestID)
		s.SetHeader(transport.HeaderActivating, a.Stage)
		s.id = c.RequestID
		return s.Send(transport.Event{Name: "activating", Data: appendValue(nil, map[string]any{"request_id": c.RequestID, "stage": a.Stage, "waited_ms": a.Waited.Milliseconds()})})
	}
	data, err := chunkDocument(c)
	if err != nil {
		return err
	}
	s.SetHeader(transport.HeaderRequestID, c.RequestID)
	s.id, s.seq = c.RequestID, c.Seq
	return s.Send(transport.Event{ID: strconv.FormatUint(c.Seq, 10), Name: "chunk", Data: data})
}

func chunkDocument(c request.Chunk) ([]byte, error) {
	dst := make([]byte, 0, 256+2*payload.Size(c.Outputs))
	dst = oipjson.AppendString(append(dst, `{"request_id":`...), c.RequestID)
	dst = strconv.AppendUint(append(dst, `,"seq":`...), c.Seq, 10)
	dst, err := appendOutputs(append(dst, `,"outputs":[`...), c.Outputs)
	return append(dst, "]}"...), err
}

// sendDone sends the whole response, as inference would have returned it.
func (s *stream) sendDone(r *request.Response, f format) error {
	document, err := f.document(r)
	if err != nil {
		return transport.WithRequestID(err, r.RequestID)
	}
	s.SetHeader(transport.HeaderRequestID, r.RequestID)
	return s.Send(transport.Event{ID: strconv.FormatUint(s.seq+1, 10), Name: "done", Data: bytes.TrimSpace(document)})
}
