package oip

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/gateway/front/failure"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Root is the path of the REST form, and what all its paths begin with.
const Root = "/v2"

// DefaultMaxBodyBytes is the limit where RESTSettings name none.
const DefaultMaxBodyBytes = 64 << 20

// RESTSettings bound what a caller may cost.
type RESTSettings struct {
	// MaxBodyBytes bounds a request's body; 0 is DefaultMaxBodyBytes.
	MaxBodyBytes int
	// MaxPayload bounds what is made of a request's inputs, in bytes; 0 leaves it to
	// the Caller.
	MaxPayload int
	// Patience is how long a caller may send nothing of a body, or take nothing of an
	// answer; 0 is body.Patience.
	Patience time.Duration
	// Silence is how long a streamed answer says nothing before a comment is sent; 0
	// is eventstream.DefaultSilence.
	Silence time.Duration
}

// rest answers the protocol's REST form.
type rest struct {
	service
	limit    int64
	patience time.Duration
	silence  time.Duration
}

// NewREST returns the handler of Root and everything below it.
func NewREST(caller Caller, models Models, s RESTSettings) http.Handler {
	out := &rest{service: service{caller: caller, models: models, maxPayload: s.MaxPayload}, limit: int64(s.MaxBodyBytes), patience: s.Patience, silence: s.Silence}
	if out.limit <= 0 {
		out.limit = DefaultMaxBodyBytes
	}
	if out.patience <= 0 {
		out.patience = body.Patience
	}
	return out
}

// ServeHTTP implements http.Handler.
func (h *rest) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	out := body.PatientWriter(w, h.patience)
	at, ok := h.find(strings.TrimPrefix(r.URL.Path, Root))
	switch {
	case !ok:
		fail(out, fault.Newf(fault.NotFound, "there is nothing at %.*q; a model is at %s/models/<pipeline>", shown, r.URL.Path, Root), 0)
	case r.Method != at.method:
		w.Header().Set("Allow", at.method)
		fail(out, fault.Newf(fault.InvalidRequest, "%.*q is %s, not %.*s", shown, r.URL.Path, at.method, shown, r.Method), http.StatusMethodNotAllowed)
	default:
		if err := at.serve(out, r); err != nil {
			Fail(out, err)
		}
	}
	body.Finish(w, h.patience)
}

// endpoint is what there is at a path. An error of serve is the answer.
type endpoint struct {
	method string
	serve  func(w http.ResponseWriter, r *http.Request) error
}

// find returns what there is at a path below Root.
func (h *rest) find(path string) (endpoint, bool) {
	switch path {
	case "", "/":
		return endpoint{http.MethodGet, h.server}, true
	case "/health/live":
		return endpoint{http.MethodGet, h.live}, true
	case "/health/ready":
		return endpoint{http.MethodGet, h.ready}, true
	}
	name, ok := strings.CutPrefix(path, "/models/")
	if !ok {
		return endpoint{}, false
	}
	name, rest, _ := strings.Cut(name, "/")
	version := ""
	if after, ok := strings.CutPrefix(rest, "versions/"); ok {
		version, rest, _ = strings.Cut(after, "/")
	}
	of := func(serve func(w http.ResponseWriter, r *http.Request, name string) error) func(http.ResponseWriter, *http.Request) error {
		return func(w http.ResponseWriter, r *http.Request) error {
			if err := known(name, version); err != nil {
				return err
			}
			return serve(w, r, name)
		}
	}
	switch {
	case name == "":
	case rest == "":
		return endpoint{http.MethodGet, of(h.model)}, true
	case rest == "ready":
		return endpoint{http.MethodGet, of(h.usable)}, true
	case rest == "infer":
		return endpoint{http.MethodPost, of(h.infer)}, true
	case rest == "generate":
		return endpoint{http.MethodPost, of(h.generate)}, true
	case rest == "generate_stream":
		return endpoint{http.MethodPost, of(h.generateStream)}, true
	}
	return endpoint{}, false
}

func (h *rest) server(w http.ResponseWriter, _ *http.Request) error {
	return say(w, http.StatusOK, map[string]any{"name": serverName, "version": h.models.Version(), "extensions": extensions()})
}

func (h *rest) live(w http.ResponseWriter, _ *http.Request) error {
	return say(w, http.StatusOK, map[string]any{"live": true})
}

func (h *rest) ready(w http.ResponseWriter, r *http.Request) error {
	return sayReady(w, h.models.Ready(r.Context(), "") == nil, map[string]any{})
}

func (h *rest) usable(w http.ResponseWriter, r *http.Request, name string) error {
	err := h.models.Ready(r.Context(), name)
	if unknown(err) {
		return err
	}
	return sayReady(w, err == nil, map[string]any{"name": name})
}

// sayReady answers with 200 or 503: clients look at nothing else.
func sayReady(w http.ResponseWriter, ready bool, with map[string]any) error {
	with["ready"] = ready
	if !ready {
		return say(w, http.StatusServiceUnavailable, with)
	}
	return say(w, http.StatusOK, with)
}

func (h *rest) model(w http.ResponseWriter, _ *http.Request, name string) error {
	model, err := h.models.Model(name)
	if err != nil {
		return err
	}
	type shaped struct {
		Name     string  `json:"name"`
		Datatype string  `json:"datatype"`
		Shape    []int64 `json:"shape"`
	}
	list := func(of []*metadata) []shaped {
		out := make([]shaped, len(of))
		for i, t := range of {
			out[i] = shaped{t.GetName(), t.GetDatatype(), t.GetShape()}
		}
		return out
	}
	return say(w, http.StatusOK, map[string]any{
		"name": name, "versions": []string{onlyVersion}, "platform": platform,
		"inputs": list(described(model.Inputs)), "outputs": list(described(model.Outputs)),
	})
}

// say answers with JSON.
func say(w http.ResponseWriter, status int, value any) error {
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	// A caller that no longer listens is not told.
	_, _ = w.Write(append(data, '\n'))
	return nil
}

// Fail answers with the protocol's error: {"error": text}.
func Fail(w http.ResponseWriter, err error) { fail(w, err, 0) }

// fail is Fail with a status, where it is not 0.
func fail(w http.ResponseWriter, err error, status int) {
	f := fault.From(err)
	if status == 0 {
		status = f.HTTPStatus()
	}
	failure.Headers(w.Header(), f)
	// Of text there is nothing to refuse.
	_ = say(w, status, failed(f))
}

// failed is the body of a failure.
func failed(f *fault.Fault) map[string]string { return map[string]string{"error": text(f)} }

// text is a fault where there is room for text alone.
func text(f *fault.Fault) string { return string(f.Reason) + ": " + f.Message }

// unknown reports whether there is no such model.
func unknown(err error) bool {
	f, ok := errors.AsType[*fault.Fault](err)
	return ok && (f.Reason == fault.UnknownPipeline || f.Reason == fault.NotFound)
}
