package openai

import (
	"bytes"
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/internal/front/rest"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Paths of the calls; a model is below ModelsPath.
const (
	ChatPath        = "/v1/chat/completions"
	CompletionsPath = "/v1/completions"
	EmbeddingsPath  = "/v1/embeddings"
	ModelsPath      = "/v1/models"
)

// CallPaths are the paths of NewCalls.
func CallPaths() []string { return []string{ChatPath, CompletionsPath, EmbeddingsPath, ModelsPath} }

// Config maps the names of models that callers use to pipelines, for each kind of call. It is the
// section openai of the mesh file.
type Config struct {
	Chat        map[string]string `yaml:"chat"`
	Completions map[string]string `yaml:"completions"`
	Embeddings  map[string]string `yaml:"embeddings"`
}

// Kinds returns the models by the kind of call, which is the key of the file.
func (c Config) Kinds() map[string]map[string]string {
	return map[string]map[string]string{"chat": c.Chat, "completions": c.Completions, "embeddings": c.Embeddings}
}

// Names returns the names of all models, sorted.
func (c Config) Names() (out []string) {
	for _, models := range c.Kinds() {
		for name := range models {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// headerRequestID is where clients of the API look for the ID of a request.
const headerRequestID = "X-Request-Id"

type calls struct {
	caller   call.Caller
	config   Config
	settings transport.Settings
	// begun is when the models came, in seconds of Unix time.
	begun int64
	// places are how many texts of a call of embeddings have places at once, a float64 by pipeline.
	places sync.Map
}

// NewCalls returns the handler of CallPaths, and of all below ModelsPath.
func NewCalls(caller call.Caller, c Config, s transport.Settings) http.Handler {
	s = s.WithDefaults()
	return transport.WithStallTimeout(&calls{caller: caller, config: c, settings: s, begun: time.Now().Unix()}, s.StallTimeout)
}

// ServeHTTP implements http.Handler.
func (h *calls) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	method, serve := http.MethodPost, (func(w http.ResponseWriter, r *http.Request, id pipeline.RequestID) error)(nil)
	model, isModel := strings.CutPrefix(r.URL.Path, ModelsPath+"/")
	switch {
	case r.URL.Path == ChatPath, r.URL.Path == CompletionsPath:
		serve = h.generate
	case r.URL.Path == EmbeddingsPath:
		serve = h.embed
	case r.URL.Path == ModelsPath, isModel:
		if !isModel {
			model = "" // all of them
		}
		method, serve = http.MethodGet, func(w http.ResponseWriter, _ *http.Request, _ pipeline.RequestID) error { return h.getModels(w, model) }
	}
	id := pipeline.RequestID(uuid.Must(uuid.NewV7()).String())
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set(headerRequestID, string(id))
	switch {
	case serve == nil:
		WriteError(w, fault.Newf(fault.NotFound, "there is nothing at %.*q", fault.MaxQuoted, r.URL.Path))
	case r.Method != method:
		writeError(w, transport.WrongMethod(w, r, method), http.StatusMethodNotAllowed)
	default:
		if err := serve(w, r, id); err != nil {
			WriteError(w, err)
		}
	}
}

// getModels answers with all models, or with the one of that name.
func (h *calls) getModels(w http.ResponseWriter, name string) error {
	data := []any{}
	for _, one := range h.config.Names() {
		if name == "" || name == one {
			data = append(data, map[string]any{"id": one, "object": "model", "created": h.begun, "owned_by": "stagemesh"})
		}
	}
	switch {
	case name == "":
		transport.WriteJSON(w, http.StatusOK, map[string]any{"object": "list", "data": data})
	case len(data) == 0:
		return h.noModel(name, "")
	default:
		transport.WriteJSON(w, http.StatusOK, data[0])
	}
	return nil
}

// noModel returns the fault of a model that is not there, or not for calls of that kind.
func (h *calls) noModel(name, kind string) error {
	if slices.Contains(h.config.Names(), name) {
		return fault.InField(fault.UnknownModel, "model", "%.*q is a model of other calls, not of %s", fault.MaxQuoted, name, kind)
	}
	return fault.InField(fault.UnknownModel, "model", "there is no %.*q; GET %s lists those that there are", fault.MaxQuoted, name, ModelsPath)
}

// input is a request as it was sent.
type input struct {
	request *request.Request
	// model is the name that the caller uses.
	model string
	// fields are the members of the body but model and those that are null. Those that nobody takes
	// become parameters.
	fields []oipjson.Field
	// parameters are in the body.
	parameters payload.Parameters
	memory     *budget.Account
}

// read reads the body of a call of that kind.
func (h *calls) read(w http.ResponseWriter, r *http.Request, id pipeline.RequestID, kind string, memory *budget.Account) (*input, error) {
	limit := int64(h.settings.MaxMessageBytes)
	if err := transport.CheckLength(r, limit); err != nil {
		return nil, err
	}
	options, err := rest.ReadOptions(r)
	if err != nil {
		return nil, err
	}
	data, err := transport.ReadBody(http.MaxBytesReader(w, transport.StallReader(w, r, h.settings), limit), r.ContentLength, limit)
	if err != nil {
		return nil, err
	}
	fields, err := oipjson.DecodeFields(data)
	if err != nil {
		return nil, err
	}
	in := &input{request: options, fields: slices.DeleteFunc(fields, oipjson.Field.Null), parameters: payload.Parameters{}, memory: memory}
	at := slices.IndexFunc(in.fields, func(f oipjson.Field) bool { return f.Name == "model" })
	if at < 0 {
		return nil, invalid("model", "is missing; GET %s lists those that there are", ModelsPath)
	}
	var ok bool
	if in.model, ok = in.fields[at].Text(); !ok {
		return nil, invalid("model", "must be a string")
	}
	in.fields = slices.Delete(in.fields, at, at+1)
	if options.Pipeline, ok = h.config.Kinds()[kind][in.model]; !ok {
		return nil, h.noModel(in.model, kind)
	}
	options.ID, options.Trace, options.Origin = id, transport.TraceContext(r.Header), transport.HTTPOrigin(r, r.URL.Path)
	return in, nil
}

// take calls do with each member of the body, which reports whether it takes it. The others are
// parameters of the request, or are refused.
func (in *input) take(do func(f oipjson.Field) (taken bool, err error)) error {
	for _, f := range in.fields {
		taken, err := do(f)
		if err == nil && !taken {
			err = in.takeParameter(f)
		}
		if err != nil {
			return err
		}
	}
	if len(in.request.Inputs) > 0 {
		if err := payload.Validate("inputs", in.request.Inputs); err != nil {
			return err
		}
	}
	in.request.Parameters = payload.Merge(in.parameters, in.request.Parameters)
	if err := in.request.Parameters.Validate(); err != nil {
		return fault.Newf(fault.InvalidRequest, "%w", err)
	}
	return nil
}

// refused are the members of the API that ask for what the gateway does not do, each with the values
// that ask for nothing. Other scalars become parameters, which the stages may refuse.
var refused = map[string][]string{
	"audio": nil, "best_of": {"1"}, "echo": {"false"}, "function_call": {`"none"`}, "functions": {"[]"}, "input": nil,
	"logit_bias": {"{}"}, "logprobs": {"false"}, "messages": nil, "modalities": {`["text"]`}, "n": {"1"},
	"parallel_tool_calls": nil, "prediction": nil, "prompt": nil, "response_format": {`{"type":"text"}`},
	"service_tier": {`"auto"`, `"default"`}, "store": {"false"}, "stream": {"false"}, "stream_options": nil, "suffix": {`""`},
	"tool_choice": {`"none"`}, "tools": {"[]"}, "top_logprobs": {"0"}, "web_search_options": nil,
}

// maxRefused bounds the text that may be one of the values of refused, in bytes.
const maxRefused = 64

func (in *input) takeParameter(f oipjson.Field) error {
	harmless, isRefused := refused[f.Name]
	if isRefused && len(f.JSON) <= maxRefused {
		text := jsontext.Value(bytes.Clone(f.JSON))
		if text.Compact() == nil && slices.Contains(harmless, string(text)) {
			return nil
		}
	}
	if isRefused || !f.Scalar() {
		also := ""
		if len(harmless) > 0 {
			also = ", or send " + strings.Join(harmless, " or ")
		}
		return invalid(f.Name, "is not supported with this value; leave it out%s", also)
	}
	value, err := f.Parameter()
	if err != nil {
		return err
	}
	return in.setParameter(f.Name, value)
}

func (in *input) setParameter(name string, value payload.Value) error {
	if other, twice := in.parameters[name]; twice && other != value {
		return invalid(name, "is there twice, with %s and %s", other, value)
	}
	in.parameters[name] = value
	return nil
}

// setCount sets a parameter to a member that is a whole number of at least 1, and returns it.
func (in *input) setCount(name string, f oipjson.Field) (int64, error) {
	value, err := f.Parameter()
	n, whole := value.Int()
	if err != nil || !whole || n < 1 {
		return 0, invalid(f.Name, "must be a whole number of at least 1")
	}
	return n, in.setParameter(name, value)
}

// boolean returns a value that is true or false.
func boolean(f oipjson.Field) (bool, error) {
	value, err := f.Parameter()
	is, ok := value.Any().(bool)
	if err != nil || !ok {
		return false, invalid(f.Name, "must be true or false")
	}
	return is, nil
}

func invalid(field, format string, args ...any) error {
	return fault.InField(fault.InvalidRequest, fmt.Sprintf("%.*s", fault.MaxQuoted, field), format, args...)
}

// write answers with a document for a response of the mesh.
func write(w http.ResponseWriter, r *request.Response, document any) {
	setHeaders(w.Header(), r)
	transport.WriteJSON(w, http.StatusOK, document)
}

// setHeaders sets the headers of an answer for a response of the mesh.
func setHeaders(h http.Header, r *request.Response) {
	h.Set(transport.HeaderRequestID, r.RequestID)
	h.Set(headerRequestID, cmp.Or(r.RequestID, h.Get(headerRequestID)))
	h.Set(transport.HeaderServerTiming, transport.ServerTiming(r.Timeline.Total, r.Timeline.Steps, r.Timeline.Branches))
	h.Set("X-Content-Type-Options", "nosniff")
	transport.SetNotes(r.Metadata, h.Set)
}
