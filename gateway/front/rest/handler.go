package rest

import (
	"net/http"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Prefix is the path under which the handler is to be mounted.
const Prefix = "/v1/"

type handler struct {
	caller   transport.Caller
	settings transport.Settings
}

// New returns the handler of everything under Prefix.
func New(caller transport.Caller, s transport.Settings) http.Handler {
	return &handler{caller: caller, settings: s.WithDefaults()}
}

// ServeHTTP implements http.Handler.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	route, ok := h.route(r.URL.Path)
	switch {
	case !ok:
		transport.WriteFault(w, NotFound(r.URL.Path))
	case r.Method != route.method:
		w.Header().Set("Allow", route.method)
		transport.WriteFaultStatus(w, fault.Newf(fault.InvalidRequest, "%s is %s, not %.*s", route.what, route.method, shown, r.Method), http.StatusMethodNotAllowed)
	default:
		route.serve(w, r)
	}
	transport.FlushResponse(w, h.settings.StallTimeout)
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
	out.write(transport.StallWriter(w, h.settings.StallTimeout))
}

// fail says why there is no answer to a request that came at start.
func (h *handler) fail(w http.ResponseWriter, err error, start time.Time) {
	w.Header().Set(transport.HeaderServerTiming, transport.ServerTiming(call.Timeline{Total: time.Since(start)}))
	transport.WriteFault(transport.StallWriter(w, h.settings.StallTimeout), err)
}

func (h *handler) inferred(w http.ResponseWriter, r *http.Request, pipeline string) (*answer, error) {
	memory := transport.NewReservation(r.Context(), h.settings.MaxPayload)
	defer memory.Release()
	request, wish, err := h.asked(w, r, pipeline, memory)
	if err != nil {
		return nil, err
	}
	response, err := h.caller.Infer(r.Context(), request)
	if err != nil {
		return nil, err
	}
	return wish.answer(response)
}

// asked reads a request, whose inputs share its body or are made in the memory, and how
// its answer is wished.
func (h *handler) asked(w http.ResponseWriter, r *http.Request, pipeline string, memory *transport.Reservation) (*call.Request, wish, error) {
	request := &call.Request{Pipeline: pipeline, Trace: transport.TraceContext(r.Header)}
	if err := h.refuse(r); err != nil {
		return nil, wish{}, err
	}
	if err := options(request, r); err != nil {
		return nil, wish{}, err
	}
	wished, err := h.inputs(request, w, r, memory)
	request.Booked = memory.Inputs()
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

// NotFound is the fault of a path that nothing serves.
func NotFound(path string) *fault.Fault {
	return fault.Newf(fault.NotFound, "there is nothing at %.*q; inference is POST %spipelines/<pipeline>:infer, and :stream for an answer in events", shown, path, Prefix)
}
