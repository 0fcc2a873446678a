package oip

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/internal/oipcodec"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
)

// Root is the path of the REST form. All its paths begin with it; names of models follow the
// prefixes.
const (
	Root             = "/v2"
	ModelsPrefix     = Root + "/models/"
	RepositoryPrefix = Root + "/repository/models/"
)

// rest serves the protocol's REST form.
type rest struct {
	service
	settings transport.Settings
}

// NewREST returns the handler of Root and everything below it.
func NewREST(caller call.Caller, models Models, s transport.Settings) http.Handler {
	s = s.WithDefaults()
	out := &rest{service: service{caller: caller, models: models, maxPayload: s.MaxPayload}, settings: s}
	return transport.WithStallTimeout(out, s.StallTimeout)
}

// ServeHTTP implements http.Handler.
func (h *rest) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	at, ok := h.find(strings.TrimPrefix(r.URL.EscapedPath(), Root))
	switch {
	case !ok:
		writeFault(w, fault.Newf(fault.NotFound, "there is nothing at %.*q; a model is at %s/models/<pipeline>", fault.MaxQuoted, r.URL.Path, Root), 0)
	case r.Method != at.method:
		writeFault(w, transport.WrongMethod(w, r, at.method), http.StatusMethodNotAllowed)
	default:
		if err := at.serve(w, r); err != nil {
			WriteFault(w, err)
		}
	}
}

// endpoint serves a path. An error of serve becomes the response.
type endpoint struct {
	method string
	serve  func(w http.ResponseWriter, r *http.Request) error
}

// find returns the endpoint of an escaped path below Root.
func (h *rest) find(path string) (endpoint, bool) {
	switch path {
	case "", "/":
		return endpoint{http.MethodGet, h.serverMetadata}, true
	case "/health/live":
		return endpoint{http.MethodGet, h.serverLive}, true
	case "/health/ready":
		return endpoint{http.MethodGet, h.serverReady}, true
	case "/repository/index":
		return endpoint{http.MethodPost, h.repositoryIndex}, true
	}
	path, isRepository := strings.CutPrefix(path, "/repository")
	path, ok := strings.CutPrefix(path, "/models/")
	name, version, verb, isValid := splitModel(path)
	switch {
	case !ok || !isValid:
		return endpoint{}, false
	case isRepository:
		return h.findRepository(name, verb)
	}
	if name == "stats" && verb == "" {
		if _, err := h.models.Model("stats"); err != nil { // else it is that model
			return endpoint{http.MethodGet, func(w http.ResponseWriter, r *http.Request) error { return h.modelStatistics(w, r, "") }}, true
		}
	}
	method, serve := http.MethodPost, (func(http.ResponseWriter, *http.Request, string) error)(nil)
	switch verb {
	case "":
		method, serve = http.MethodGet, h.modelMetadata
	case "ready":
		method, serve = http.MethodGet, h.modelReady
	case "config":
		method, serve = http.MethodGet, h.modelConfig
	case "stats":
		method, serve = http.MethodGet, h.modelStatistics
	case "infer":
		serve = h.infer
	case "generate":
		serve = h.generate
	case "generate_stream":
		serve = h.generateStream
	}
	return endpoint{method, func(w http.ResponseWriter, r *http.Request) error {
		if err := checkVersion(name, version); err != nil {
			return err
		}
		return serve(w, r, name)
	}}, serve != nil
}

// verbs may end the path of a model.
var verbs = []string{"config", "stats", "ready", "infer", "generate", "generate_stream", "load", "unload"}

// splitModel splits the escaped path NAME[/versions/VERSION][/VERB]. A name may have slashes, and
// needs them escaped only where it ends as such a path does.
func splitModel(path string) (name, version, verb string, ok bool) {
	path = strings.TrimSuffix(path, "/")
	if i := strings.LastIndex(path, "/"); i >= 0 && slices.Contains(verbs, path[i+1:]) {
		path, verb = path[:i], path[i+1:]
	}
	if i := strings.LastIndex(path, "/versions/"); i >= 0 && !strings.Contains(path[i+len("/versions/"):], "/") {
		path, version = path[:i], path[i+len("/versions/"):]
	}
	name, err := url.PathUnescape(path)
	return name, version, verb, name != "" && err == nil
}

func (h *rest) serverMetadata(w http.ResponseWriter, _ *http.Request) error {
	return writeJSON(w, http.StatusOK, map[string]any{"name": serverName, "version": h.models.Version(), "extensions": extensions()})
}

func (h *rest) serverLive(w http.ResponseWriter, _ *http.Request) error {
	return writeJSON(w, http.StatusOK, map[string]any{"live": true})
}

func (h *rest) serverReady(w http.ResponseWriter, r *http.Request) error {
	return writeReady(w, h.models.Ready(r.Context(), "") == nil, map[string]any{})
}

func (h *rest) modelReady(w http.ResponseWriter, r *http.Request, name string) error {
	err := h.models.Ready(r.Context(), name)
	if isUnknown(err) {
		return err
	}
	return writeReady(w, err == nil, map[string]any{"name": name})
}

// writeReady answers with 200 or 503: clients look only at the status.
func writeReady(w http.ResponseWriter, ready bool, with map[string]any) error {
	with["ready"] = ready
	if !ready {
		return writeJSON(w, http.StatusServiceUnavailable, with)
	}
	return writeJSON(w, http.StatusOK, with)
}

func (h *rest) modelMetadata(w http.ResponseWriter, r *http.Request, name string) error {
	out, err := h.service.modelMetadata(r.Context(), nil, &oipv2.ModelMetadataRequest{Name: name})
	return writeMessage(w, out, err)
}

func (h *rest) modelConfig(w http.ResponseWriter, r *http.Request, name string) error {
	out, err := h.service.modelConfig(r.Context(), nil, &oipv2.ModelConfigRequest{Name: name})
	return writeMessage(w, out.GetConfig(), err)
}

func (h *rest) modelStatistics(w http.ResponseWriter, r *http.Request, name string) error {
	out, err := h.service.modelStatistics(r.Context(), nil, &oipv2.ModelStatisticsRequest{Name: name})
	return writeMessage(w, out, err)
}

// writeMessage answers with a message in the JSON of the REST form, or returns err.
func writeMessage(w http.ResponseWriter, m proto.Message, err error) error {
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, object(m.ProtoReflect()))
}

// object returns a message as an object with all members but maps, which no answer has: 64-bit
// integers are numbers, as in the REST form and unlike in protobuf's JSON.
func object(m protoreflect.Message) map[string]any {
	out, fields := map[string]any{}, m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		switch value := m.Get(f); {
		case f.IsMap(), f.Message() != nil && !f.IsList() && !m.Has(f):
		case f.IsList():
			list := []any{}
			for i := range value.List().Len() {
				list = append(list, jsonValue(f, value.List().Get(i)))
			}
			out[f.TextName()] = list
		default:
			out[f.TextName()] = jsonValue(f, value)
		}
	}
	return out
}

func jsonValue(f protoreflect.FieldDescriptor, value protoreflect.Value) any {
	switch f.Kind() {
	case protoreflect.MessageKind:
		return object(value.Message())
	case protoreflect.EnumKind:
		return f.Enum().Values().ByNumber(value.Enum()).Name()
	}
	return value.Interface()
}

// writeJSON answers with JSON. A failed write is not an error: the caller has disconnected.
func writeJSON(w http.ResponseWriter, status int, value any) error {
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(append(data, '\n'))
	return nil
}

// WriteFault answers with the protocol's error: {"error": text}.
func WriteFault(w http.ResponseWriter, err error) { writeFault(w, err, 0) }

// writeFault is WriteFault with a status, where it is not 0.
func writeFault(w http.ResponseWriter, err error, status int) {
	f := fault.From(err)
	if status == 0 {
		status = f.HTTPStatus()
	}
	transport.SetFaultHeaders(w.Header(), f)
	_ = writeJSON(w, status, errorBody(f)) // text always encodes
}

// errorBody is the JSON of a failure.
func errorBody(err error) map[string]string { return map[string]string{"error": errorText(err)} }

// The binary extension: bytes of tensors follow the JSON, whose length is in a header.
const (
	binarySize      = "binary_data_size"
	binaryOne       = "binary_data"
	binaryAll       = "binary_data_output"
	classify        = "classification"
	binaryExtension = "binary_tensor_data"
)

func extensions() []string {
	return []string{binaryExtension, "generate", "model_configuration", "statistics"}
}

// infer answers one request.
func (h *rest) infer(w http.ResponseWriter, r *http.Request, name string) error {
	model, err := h.models.Model(name)
	if err != nil {
		return err
	}
	memory := budget.Of(r.Context(), h.maxPayload)
	defer memory.Close()
	request, as, err := h.readRequest(w, r, name, model, memory)
	if err != nil {
		return err
	}
	response, err := h.caller.Infer(r.Context(), request)
	if err != nil {
		return err
	}
	text, binary, err := as.encode(response)
	if err != nil {
		return transport.WithRequestID(err, response.RequestID)
	}
	write(w, response, text, binary)
	return nil
}

// readRequest reads the body: the request, and the format of the response. It decodes
// tensors in JSON into reserved memory.
func (h *rest) readRequest(w http.ResponseWriter, r *http.Request, name string, model Model, memory *budget.Account) (out *request.Request, as format, err error) {
	data, err := h.readBody(w, r)
	if err != nil {
		return nil, as, err
	}
	text, binary, err := split(data, r.Header.Get(transport.HeaderJSONLength))
	if err != nil {
		return nil, as, err
	}
	in, err := oipjson.DecodeKnown(text, known(model.Inputs, model.Kept), memory)
	if err != nil {
		return nil, as, err
	}
	if err := takeBinary(in, binary); err != nil {
		return nil, as, err
	}
	if as, err = formatOf(name, in); err != nil {
		return nil, as, err
	}
	out = &request.Request{Pipeline: name, ByModel: true, Parameters: in.Parameters, Outputs: in.OutputNames(), Trace: transport.TraceContext(r.Header)}
	out.Origin = transport.HTTPOrigin(r, "/v2/models/{model}/infer")
	if err = takeOwnParameters(r.Context(), out); err != nil {
		return nil, as, err
	}
	if out.Inputs, err = in.Parts(); err != nil {
		return nil, as, err
	}
	for i, part := range out.Inputs {
		spec, err := model.input(i, part.Name)
		if err != nil {
			return nil, as, err
		}
		if out.Inputs[i], err = oipcodec.AsBlob(part, spec.GetBlob() != nil); err != nil {
			return nil, as, fault.InField(fault.InvalidInput, "inputs."+part.Name, "%w", err)
		}
	}
	return out, as, payload.Validate("inputs", out.Inputs)
}

// readBody reads the body, also in gzip or deflate.
func (h *rest) readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	limit := int64(h.settings.MaxMessageBytes)
	if err := transport.CheckLength(r, limit); err != nil {
		return nil, err
	}
	body := http.MaxBytesReader(w, transport.StallReader(w, r, h.settings), limit)
	return transport.ReadEncodedBody(body, r, limit)
}

// split returns the JSON of a body, and the bytes behind it.
func split(data []byte, length string) (text, binary []byte, err error) {
	if length == "" {
		return data, nil, nil
	}
	n, err := strconv.ParseUint(length, 10, 63)
	if err != nil || n > uint64(len(data)) {
		return nil, nil, invalid(transport.HeaderJSONLength, "%.*q is not a length within a body of %d bytes", fault.MaxQuoted, length, len(data))
	}
	return data[:n], data[n:], nil
}

// takeBinary gives inputs without data their bytes, which they share with the body.
func takeBinary(in *oipjson.Request, binary []byte) error {
	for i := range in.Inputs {
		input := &in.Inputs[i]
		size, ok := input.Parameters[binarySize]
		if !ok {
			continue
		}
		field := fmt.Sprintf("inputs[%d].parameters.%s", i, binarySize)
		n, whole := size.Int()
		switch {
		case input.Tensor.Raw != nil:
			return invalid(field, "it has data in the JSON too")
		case !whole || n < 0 || n > int64(len(binary)):
			return invalid(field, "%s, and %d bytes are left behind the JSON", size, len(binary))
		}
		input.Tensor.Raw, binary = binary[:n:n], binary[n:]
		delete(input.Parameters, binarySize)
	}
	if len(binary) > 0 {
		return invalid("inputs", "%d bytes after the JSON belong to no input", len(binary))
	}
	return nil
}

// format is the encoding of a response that its caller requests.
type format struct {
	model, id string
	// all is true if outputs that byName does not have are binary.
	all    bool
	byName map[string]bool
}

func formatOf(model string, in *oipjson.Request) (format, error) {
	out := format{model: model, id: in.ID, byName: map[string]bool{}}
	if all, ok := in.Parameters[binaryAll]; ok {
		var is bool
		if out.all, is = all.Any().(bool); !is {
			return out, invalid("parameters."+binaryAll, "%s is neither true nor false", all)
		}
		delete(in.Parameters, binaryAll)
	}
	for i, output := range in.Outputs {
		if _, ok := output.Parameters[classify]; ok {
			return out, noClassification(i)
		}
		wanted, ok := output.Parameters[binaryOne]
		if !ok {
			continue
		}
		isBinary, ok := wanted.Any().(bool)
		if !ok {
			return out, invalid(fmt.Sprintf("outputs[%d].parameters.%s", i, binaryOne), "%s is neither true nor false", wanted)
		}
		out.byName[output.Name] = isBinary
	}
	return out, nil
}

// encode encodes a response: the JSON, and the bytes that follow it.
func (f format) encode(r *request.Response) (text []byte, binary [][]byte, err error) {
	text = oipjson.AppendString([]byte(`{"model_name":`), f.model)
	text = oipjson.AppendString(append(text, `,"model_version":`...), onlyVersion)
	if f.id != "" {
		text = oipjson.AppendString(append(text, `,"id":`...), f.id)
	}
	text = append(text, `,"outputs":[`...)
	for i, part := range r.Outputs {
		if i > 0 {
			text = append(text, ',')
		}
		part = oipcodec.AsTensor(part)
		asBinary, ok := f.byName[part.Name]
		if !ok {
			asBinary = f.all
		}
		if !asBinary {
			if text, err = oipjson.AppendTensor(text, part); err != nil {
				return nil, nil, err
			}
			continue
		}
		part.Parameters = payload.Merge(part.Parameters, payload.Parameters{binarySize: payload.Int64(int64(len(part.Tensor.Raw)))})
		if text, err = oipjson.AppendHead(text, part); err != nil {
			return nil, nil, err
		}
		text, binary = append(text, '}'), append(binary, part.Tensor.Raw)
	}
	return append(text, `]}`...), binary, nil
}

// write sends a response. A failed write is not an error: the caller has disconnected.
func write(w http.ResponseWriter, r *request.Response, text []byte, binary [][]byte) {
	length := len(text)
	h := w.Header()
	h.Set("Content-Type", payload.JSONType)
	if binary != nil {
		h.Set("Content-Type", payload.OctetStream)
		h.Set(transport.HeaderJSONLength, strconv.Itoa(len(text)))
	}
	for _, raw := range binary {
		length += len(raw)
	}
	h.Set("Content-Length", strconv.Itoa(length))
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set(transport.HeaderRequestID, r.RequestID)
	transport.SetNotes(r.Metadata, h.Set)
	h.Set(transport.HeaderServerTiming, transport.ServerTiming(r.Timeline.Total, r.Timeline.Steps, r.Timeline.Branches))
	_, _ = w.Write(text)
	for _, raw := range binary {
		_, _ = w.Write(raw)
	}
}

// noClassification returns the fault of an output that asks for the classification extension.
func noClassification(output int) error {
	return fault.Newf(fault.NotSupported, "outputs[%d].parameters.%s is not served; a stage such as top_k does that", output, classify)
}
