package rest

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/gateway/front/failure"
	"github.com/stagemesh/stagemesh/gateway/front/header"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Prefix is the path under which the handler is to be mounted.
const Prefix = "/v1/"

// DefaultMaxBodyBytes is the limit where Settings name none.
const DefaultMaxBodyBytes = 64 << 20

// Caller does the work: gateway/call's service.
//
// Its errors have a *fault.Fault in their chain; the fault's metadata
// "request_id" is the request's id where one was minted. Stream calls emit in
// order, and not after it returned; an error of emit ends the call.
type Caller interface {
	Infer(ctx context.Context, r *call.Request) (*call.Response, error)
	Stream(ctx context.Context, r *call.Request, emit func(call.Chunk) error) (*call.Response, error)
	Result(ctx context.Context, requestID string, wait time.Duration) (*call.Response, error)
	Cancel(ctx context.Context, requestID string) error
}

// Settings are what New takes beside its Caller.
type Settings struct {
	// MaxBodyBytes bounds a request's body; 0 is DefaultMaxBodyBytes.
	MaxBodyBytes int
	// MaxPayload bounds what is made of a request's inputs, in bytes; 0 leaves it to
	// the Caller.
	MaxPayload int
	// Patience is how long a caller may send nothing of a body, or take nothing
	// of an answer; 0 is body.Patience.
	Patience time.Duration
	// Silence is how long a streamed answer says nothing before a comment is
	// sent; 0 is eventstream.DefaultSilence.
	Silence time.Duration
}

type handler struct {
	caller   Caller
	limit    int64
	payload  int
	patience time.Duration
	silence  time.Duration
}

// New returns the handler of everything under Prefix.
func New(caller Caller, s Settings) http.Handler {
	h := &handler{caller: caller, limit: int64(s.MaxBodyBytes), payload: s.MaxPayload, patience: s.Patience, silence: s.Silence}
	if h.limit <= 0 {
		h.limit = DefaultMaxBodyBytes
	}
	if h.patience <= 0 {
		h.patience = body.Patience
	}
	return h
}

// ServeHTTP implements http.Handler.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	route, ok := h.route(r.URL.Path)
	switch {
	case !ok:
		failure.Write(w, Nothing(r.URL.Path))
	case r.Method != route.method:
		w.Header().Set("Allow", route.method)
		failure.WriteStatus(w, fault.Newf(fault.InvalidRequest, "%s is %s, not %.*s", route.what, route.method, shown, r.Method), http.StatusMethodNotAllowed)
	default:
		route.serve(w, r)
	}
	body.Finish(w, h.patience)
}

// route is what there is at a path.
type route struct {
	method, what string
	serve        http.HandlerFunc
}

func (h *handler) route(path string) (route, bool) {
	if pipeline, ok := pipelineOf(path, ":infer"); ok {
		return route{http.MethodPost, "inference", func(w http.ResponseWriter, r *http.Request) { h.infer(w, r, pipeline) }}, true
	}
	if pipeline, ok := pipelineOf(path, ":stream"); ok {
		return route{http.MethodPost, "inference", func(w http.ResponseWriter, r *http.Request) { h.stream(w, r, pipeline) }}, true
	}
	id, result, ok := requestOf(path)
	if result {
		return route{http.MethodGet, "fetching a result", func(w http.ResponseWriter, r *http.Request) { h.result(w, r, id) }}, ok
	}
	return route{http.MethodDelete, "calling a request off", func(w http.ResponseWriter, r *http.Request) { h.cancel(w, r, id) }}, ok
}

// infer answers one request, as a whole or not at all.
func (h *handler) infer(w http.ResponseWriter, r *http.Request, pipeline string) {
	h.write(w, func() (*answer, error) { return h.inferred(w, r, pipeline) })
}

// write sends the answer, or why there is none.
func (h *handler) write(w http.ResponseWriter, get func() (*answer, error)) {
	start := time.Now()
	out, err := get()
	if err != nil {
		h.fail(w, err, start)
		return
	}
	out.write(body.PatientWriter(w, h.patience))
}

// fail says why there is no answer to a request that came at start.
func (h *handler) fail(w http.ResponseWriter, err error, start time.Time) {
	w.Header().Set(header.ServerTiming, header.Timing(call.Timeline{Total: time.Since(start)}))
	failure.Write(body.PatientWriter(w, h.patience), err)
}

func (h *handler) inferred(w http.ResponseWriter, r *http.Request, pipeline string) (*answer, error) {
	room := body.NewRoom(r.Context(), h.payload)
	defer room.Close()
	request, wish, err := h.asked(w, r, pipeline, room)
	if err != nil {
		return nil, err
	}
	response, err := h.caller.Infer(r.Context(), request)
	if err != nil {
		return nil, err
	}
	return wish.answer(response)
}

// asked reads a request, whose inputs share its body or are made in the room, and how
// its answer is wished.
func (h *handler) asked(w http.ResponseWriter, r *http.Request, pipeline string, room *body.Room) (*call.Request, wish, error) {
	request := &call.Request{Pipeline: pipeline, Trace: header.Trace(r.Header)}
	if err := h.refuse(r); err != nil {
		return nil, wish{}, err
	}
	if err := options(request, r); err != nil {
		return nil, wish{}, err
	}
	wished, err := h.inputs(request, w, r, room)
	request.Booked = room.Made()
	return request, wished, err
}

// pipelineOf returns the pipeline that a path asks to do something.
func pipelineOf(path, verb string) (string, bool) {
	rest, ok := strings.CutPrefix(path, Prefix+"pipelines/")
	if !ok || strings.Contains(rest, "/") {
		return "", false
	}
	name, ok := strings.CutSuffix(rest, verb)
	return name, ok && name != ""
}

// Nothing is the fault of a path at which there is nothing.
func Nothing(path string) *fault.Fault {
	return fault.Newf(fault.NotFound, "there is nothing at %.*q; inference is POST %spipelines/<pipeline>:infer, and :stream for an answer in events", shown, path, Prefix)
}
