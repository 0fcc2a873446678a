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
// "request_id" is the request's id where one was minted.
type Caller interface {
	Infer(ctx context.Context, r *call.Request) (*call.Response, error)
}

// Settings are what New takes beside its Caller.
type Settings struct {
	// MaxBodyBytes bounds a request's body; 0 is DefaultMaxBodyBytes.
	MaxBodyBytes int
	// Patience is how long a caller may send nothing of a body, or take nothing
	// of an answer; 0 is body.Patience.
	Patience time.Duration
}

type handler struct {
	caller   Caller
	limit    int64
	patience time.Duration
}

// New returns the handler of everything under Prefix.
func New(caller Caller, s Settings) http.Handler {
	h := &handler{caller: caller, limit: int64(s.MaxBodyBytes), patience: s.Patience}
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
	pipeline, ok := pipelineOf(r.URL.Path)
	switch {
	case !ok:
		NotFound(w, r)
	case r.Method != http.MethodPost:
		w.Header().Set("Allow", http.MethodPost)
		failure.WriteStatus(w, fault.Newf(fault.InvalidRequest, "inference is POST, not %.*s", shown, r.Method), http.StatusMethodNotAllowed)
	default:
		h.infer(w, r, pipeline)
	}
}

// infer answers one request, as a whole or not at all.
func (h *handler) infer(w http.ResponseWriter, r *http.Request, pipeline string) {
	start := time.Now()
	out, err := h.answer(w, r, pipeline)
	if err != nil {
		w.Header().Set(header.ServerTiming, header.Timing(call.Timeline{Total: time.Since(start)}))
		failure.Write(w, err)
		return
	}
	out.write(body.PatientWriter(w, h.patience))
}

func (h *handler) answer(w http.ResponseWriter, r *http.Request, pipeline string) (*answer, error) {
	request := &call.Request{Pipeline: pipeline, Trace: header.Trace(r.Header)}
	if err := h.refuse(r); err != nil {
		return nil, err
	}
	if err := options(request, r); err != nil {
		return nil, err
	}
	wish, err := h.inputs(request, w, r)
	if err != nil {
		return nil, err
	}
	response, err := h.caller.Infer(r.Context(), request)
	if err != nil {
		return nil, err
	}
	out, err := wish.answer(pipeline, response)
	if err != nil {
		return nil, fault.From(err).WithMetadata(header.RequestIDKey, response.RequestID)
	}
	return out, nil
}

// pipelineOf returns the pipeline that a path asks for.
func pipelineOf(path string) (string, bool) {
	rest, ok := strings.CutPrefix(path, Prefix+"pipelines/")
	if !ok || strings.Contains(rest, "/") {
		return "", false
	}
	name, ok := strings.CutSuffix(rest, ":infer")
	return name, ok && name != ""
}

// NotFound answers for a path at which there is nothing.
func NotFound(w http.ResponseWriter, r *http.Request) {
	failure.Write(w, fault.Newf(fault.NotFound, "there is nothing at %.*q; inference is POST %spipelines/<pipeline>:infer", shown, r.URL.Path, Prefix))
}
