package oip

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/internal/oipcodec"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Keys of the generate extension.
const (
	idKey         = "id"
	parametersKey = "parameters"
	// textKey is the model's only text input, whatever its name is. unnamedKey is the
	// output without a name.
	textKey    = "text_input"
	unnamedKey = "text_output"

	textPlain = "text/plain"
)

// generation is a request of the generate extension: an object whose members are the
// model's inputs and the request's parameters.
type generation struct {
	// takes are the inputs of the first step, kept what later ones read of the caller.
	takes, kept []*stagev1.PartSpec
	// isOpen is true where there may be other inputs.
	isOpen  bool
	request *request.Request
	id      string
	// memory is reserved for inputs that do not share the body's bytes.
	memory *budget.Account
}

// generationOf reads the text of a request for the model of that name.
func generationOf(ctx context.Context, name string, text []byte, model Model, memory *budget.Account) (*generation, error) {
	fields, err := oipjson.DecodeFields(text)
	if err != nil {
		return nil, err
	}
	out := &generation{takes: model.Inputs, kept: model.Kept, isOpen: model.IsOpen, memory: memory, request: &request.Request{Pipeline: name, ByModel: true, Parameters: payload.Parameters{}}}
	for _, field := range fields {
		if err := out.take(field); err != nil {
			return nil, err
		}
	}
	if len(out.request.Inputs) == 0 {
		return nil, wrongInput(textKey, "is missing: the body has no input; %s", out.inputNames())
	}
	if err := out.request.Parameters.Validate(); err != nil {
		return nil, invalid(parametersKey, "%s", err)
	}
	if err = takeOwnParameters(ctx, out.request); err != nil {
		return nil, err
	}
	return out, payload.Validate("inputs", out.request.Inputs)
}

// take takes one member of the body. The model's own names come first.
func (g *generation) take(f oipjson.Field) error {
	spec := g.find(f.Name)
	switch {
	case spec != nil:
		return g.input(f, spec)
	case f.Name == textKey:
		return g.text(f)
	case f.Name == idKey:
		id, ok := f.Text()
		if !ok || len(id) > payload.MaxName {
			return wrongInput(idKey, "must be a string of at most %d bytes", payload.MaxName)
		}
		g.id = id
		return nil
	case f.Name == parametersKey:
		return g.parameters(f)
	case !f.Scalar():
		return wrongInput(f.Name, "is neither an input nor a parameter, which is a string, a number or a boolean; %s", g.inputNames())
	}
	value, err := f.Parameter()
	if err != nil {
		return err
	}
	return g.parameter(f.Name, value)
}

// find returns the input of that name, nil if there is none.
func (g *generation) find(name string) *stagev1.PartSpec { return specOf(name, g.takes, g.kept) }

func (g *generation) parameters(f oipjson.Field) error {
	all, err := f.Parameters()
	if err != nil {
		return err
	}
	for name, value := range all {
		if err := g.parameter(name, value); err != nil {
			return err
		}
	}
	return nil
}

func (g *generation) parameter(name string, value payload.Value) error {
	if _, twice := g.request.Parameters[name]; twice {
		return wrongInput(name, "is there twice: as a member, and among the parameters")
	}
	g.request.Parameters[name] = value
	return nil
}

// text takes the text for a model that has one input of text. A model whose inputs are not all
// known gets it as a blob without a name.
func (g *generation) text(f oipjson.Field) error {
	texts := slices.DeleteFunc(slices.Clone(g.takes), func(spec *stagev1.PartSpec) bool { return !takesText(spec) })
	switch {
	case len(texts) == 1:
		return g.input(f, texts[0])
	case len(g.takes) == 0 || g.isOpen:
		if _, ok := f.Text(); !ok {
			return noString(f)
		}
		return g.input(f, &stagev1.PartSpec{Body: &stagev1.PartSpec_Blob{Blob: &stagev1.BlobSpec{ContentTypes: []string{textPlain}}}})
	case len(texts) > 1:
		return wrongInput(textKey, "is one of several: name the input; %s", g.inputNames())
	}
	return wrongInput(textKey, "is not an input, and the model has no text input; %s", g.inputNames())
}

// inputNames lists the model's inputs, for messages.
func (g *generation) inputNames() string {
	if len(g.takes) == 0 {
		return "the model's inputs are not known, so send " + textKey + ", or use infer"
	}
	var names []string
	for _, spec := range slices.Concat(g.takes, g.kept) {
		names = append(names, spec.GetName())
	}
	return "the model takes " + strings.Join(names, ", ")
}

func (g *generation) input(f oipjson.Field, spec *stagev1.PartSpec) error {
	part, err := partOf(f, spec, g.memory)
	if err != nil {
		return err
	}
	if _, twice := payload.Find(g.request.Inputs, part.Name); twice {
		return wrongInput(f.Name, "is there twice: as %s, and by its name", textKey)
	}
	g.request.Inputs = append(g.request.Inputs, part)
	return nil
}

// partOf converts a value to the model's input: a tensor of one element or one axis,
// or a blob of text or JSON.
func partOf(f oipjson.Field, spec *stagev1.PartSpec, memory *budget.Account) (payload.Part, error) {
	if t := spec.GetTensor(); t != nil {
		out, err := f.Tensor(tensor.Datatype(t.GetDatatype()), t.GetShape(), memory)
		return payload.OfTensor(spec.GetName(), out), err
	}
	if spec.GetBody() == nil { // only conditions read it
		return anyPart(f, memory)
	}
	types := spec.GetBlob().GetContentTypes()
	if contentType, takes := pick(types, isText, textPlain); takes {
		if text, ok, err := f.Bytes(memory); ok || err != nil {
			return payload.OfBlob(spec.GetName(), contentType, text), err
		}
	}
	if contentType, takes := pick(types, payload.IsJSON, payload.JSONType); takes {
		return payload.OfBlob(spec.GetName(), contentType, f.JSON), nil
	}
	if _, takes := pick(types, isText, textPlain); takes && f.Null() {
		return payload.Part{}, noString(f)
	}
	return payload.Part{}, wrongInput(f.Name, "has the wrong type: the model takes %s there", strings.Join(types, ", "))
}

// takesText reports whether an input is text.
func takesText(spec *stagev1.PartSpec) bool {
	if t := spec.GetTensor(); t != nil {
		return t.GetDatatype() == string(tensor.Bytes)
	}
	_, takes := pick(spec.GetBlob().GetContentTypes(), isText, textPlain)
	return takes
}

func isText(contentType string) bool {
	return strings.HasPrefix(payload.BareType(contentType), "text/")
}

// pick returns the first of the wanted media types. Otherwise it returns the usual one
// if a pattern matches it. An empty list matches any.
func pick(types []string, wanted func(contentType string) bool, usual string) (string, bool) {
	takesUsual := len(types) == 0
	for _, t := range types {
		pattern := strings.HasSuffix(payload.BareType(t), "*")
		if !pattern && wanted(t) {
			return strings.ToLower(t), true
		}
		takesUsual = takesUsual || pattern && payload.AcceptsType(t, usual)
	}
	return usual, takesUsual
}

func noString(f oipjson.Field) error {
	if f.Null() {
		return wrongInput(f.Name, "is null; send a string")
	}
	return wrongInput(f.Name, "must be a string")
}

func wrongInput(field, format string, args ...any) error {
	return fault.InField(fault.InvalidInput, fmt.Sprintf("%.*s", fault.MaxQuoted, field), format, args...)
}

// Adapt returns the request, whose only input is JSON or MessagePack without a name, with the inputs
// that this has by name, as text, numbers, booleans and lists, or as tensors that may lack datatype
// and shape. A request whose model takes it, or takes JSON, or is not known stays as it is, and so does one
// with other names where the model is open.
func Adapt(r *request.Request, model Model, memory *budget.Account) (*request.Request, error) {
	document := r.Inputs[0].Blob
	isPacked := msgpack.Is(document.ContentType)
	takesIt := func(spec *stagev1.PartSpec) bool {
		return takesDocument(spec, payload.IsJSON, payload.JSONType) || isPacked && takesDocument(spec, msgpack.Is, msgpack.Type)
	}
	if len(model.Inputs) == 0 || slices.ContainsFunc(model.Inputs, takesIt) {
		return r, nil
	}
	out := *r
	text, err := document.Data, error(nil)
	if isPacked {
		var release func()
		text, release, err = oipjson.Unpack(document.Data, memory)
		defer release()
	}
	if err == nil {
		err = adapt(&out, text, &generation{takes: model.Inputs, kept: model.Kept, isOpen: model.IsOpen, memory: memory, request: &out})
	}
	f := fault.From(err)
	if body := bodyOf(slices.Concat(model.Inputs, model.Kept)); err != nil && body != "" && (f.Reason == fault.InvalidInput || f.Reason == fault.InvalidRequest) {
		return nil, fault.Newf(f.Reason, "%s; send JSON such as %s", f.Message, body).WithViolation("inputs", "%s", f.Message)
	}
	return &out, err
}

// adapt sets the inputs of a request. Its options win over a document's of tensors.
func adapt(out *request.Request, text []byte, g *generation) error {
	fields, err := oipjson.DecodeFields(text)
	if err != nil {
		return err
	}
	whole := out.Inputs
	out.Inputs = nil
	isInputs := func(f oipjson.Field) bool { return f.Name == "inputs" && g.find(f.Name) == nil }
	if slices.ContainsFunc(fields, isInputs) {
		in, err := oipjson.DecodeKnown(text, known(g.takes, g.kept), g.memory)
		if err != nil {
			return err
		}
		out.Parameters = payload.Merge(in.Parameters, out.Parameters)
		if out.Outputs == nil {
			out.Outputs = in.OutputNames()
		}
		if out.Inputs, err = in.Parts(); err != nil {
			return err
		}
		for i, part := range out.Inputs {
			if out.Inputs[i], err = oipcodec.AsBlob(part, g.find(part.Name).GetBlob() != nil); err != nil {
				return fault.InField(fault.InvalidInput, payload.Path("inputs", i, part.Name), "%w", err)
			}
		}
		return nil
	}
	for _, field := range fields {
		spec := g.find(field.Name)
		switch {
		case spec == nil && g.isOpen:
			out.Inputs = whole
			return nil
		case spec == nil:
			return wrongInput(field.Name, "is not an input; %s", g.inputNames())
		}
		if err := g.input(field, spec); err != nil {
			return err
		}
	}
	if len(out.Inputs) == 0 {
		return wrongInput("inputs", "are missing; %s", g.inputNames())
	}
	return nil
}

// known returns the datatypes and shapes of inputs; a blob is one element of BYTES.
func known(of ...[]*stagev1.PartSpec) oipjson.Known {
	return func(name string) (tensor.Datatype, []int64) {
		spec := specOf(name, of...)
		if spec.GetBlob() != nil {
			return tensor.Bytes, []int64{1}
		}
		t := spec.GetTensor()
		return tensor.Datatype(t.GetDatatype()), t.GetShape()
	}
}

// anyPart returns a string as text, and other values as a tensor of BYTES, BOOL, INT64 or FP64.
func anyPart(f oipjson.Field, memory *budget.Account) (payload.Part, error) {
	if text, ok, err := f.Bytes(memory); ok || err != nil {
		return payload.OfBlob(f.Name, textPlain, text), err
	}
	datatype := tensor.Int64
	switch {
	case bytes.ContainsRune(f.JSON, '"'):
		datatype = tensor.Bytes
	case bytes.ContainsAny(f.JSON, "tf"): // true or false
		datatype = tensor.Bool
	case bytes.ContainsAny(f.JSON, ".eE"):
		datatype = tensor.FP64
	}
	out, err := f.Tensor(datatype, nil, memory)
	return payload.OfTensor(f.Name, out), err
}

// takesDocument reports whether an input is a blob of the wanted media types.
func takesDocument(spec *stagev1.PartSpec, wanted func(contentType string) bool, usual string) bool {
	if spec.GetBody() == nil { // only conditions read it
		return false
	}
	_, takes := pick(spec.GetBlob().GetContentTypes(), wanted, usual)
	return spec.GetTensor() == nil && takes
}

// bodyOf returns the smallest document that Adapt takes, shortened; empty if there is none.
func bodyOf(takes []*stagev1.PartSpec) string {
	const maxRepeated, longest = 4, 64
	var out []byte
	for _, spec := range takes {
		datatype, text := tensor.Datatype(spec.GetTensor().GetDatatype()), "0"
		switch {
		case spec.GetOptional():
			continue
		case takesText(spec):
			text = `"text"`
		case datatype == tensor.Bool:
			text = "false"
		case datatype == "", datatype == tensor.FP16, datatype == tensor.BF16:
			return ""
		}
		for _, extent := range slices.Backward(spec.GetTensor().GetShape()) {
			switch n := int(min(max(extent, 1), maxRepeated+1)); {
			case n > maxRepeated || n > 1 && len(text) > longest:
				text += ", ..."
			default:
				text = strings.Repeat(text+", ", n-1) + text
			}
			text = "[" + text + "]"
		}
		out = append(append(appendKey(out, spec.GetName()), ' '), text...)
	}
	if out == nil {
		return ""
	}
	return string(append(out, '}'))
}

// generate answers one request with one object, which has the whole response.
func (h *rest) generate(w http.ResponseWriter, r *http.Request, name string) error {
	memory := budget.Of(r.Context(), h.maxPayload)
	defer memory.Close()
	g, err := h.readGeneration(w, r, name, "/v2/models/{model}/generate", memory)
	if err != nil {
		return err
	}
	response, err := h.caller.Infer(r.Context(), g.request)
	if err != nil {
		return err
	}
	text, err := g.object(response.Outputs)
	if err != nil {
		return transport.WithRequestID(err, response.RequestID)
	}
	write(w, response, append(text, '\n'), nil)
	return nil
}

// generateStream answers one request with an event for each chunk, or with one for a response
// without chunks. It returns an error only before the first event.
func (h *rest) generateStream(w http.ResponseWriter, r *http.Request, name string) error {
	memory := budget.Of(r.Context(), h.maxPayload)
	defer memory.Close()
	g, err := h.readGeneration(w, r, name, "/v2/models/{model}/generate_stream", memory)
	if err != nil {
		return err
	}
	out := transport.NewEventStream(w, h.settings.PingInterval)
	err = out.Run(r.Context(), func(ctx context.Context) error { return h.sendEvents(ctx, g, out) })
	if err == nil || !out.Begun() {
		return err
	}
	data, _ := json.Marshal(errorBody(err)) // text always encodes
	// A failed send is not an error: the caller has disconnected.
	_ = out.Send(transport.Event{Data: data})
	return nil
}

func (h *rest) sendEvents(ctx context.Context, g *generation, out *transport.EventStream) error {
	send := func(requestID string, outputs []payload.Part) error {
		data, err := g.object(outputs)
		if err != nil {
			return transport.WithRequestID(err, requestID)
		}
		out.SetHeader(transport.HeaderRequestID, requestID)
		return out.Send(transport.Event{Data: data})
	}
	chunks := false
	response, err := h.caller.Stream(ctx, g.request, func(c request.Chunk) error {
		if c.Activating != nil {
			return nil // the protocol has no event for it
		}
		chunks = true
		return send(c.RequestID, c.Outputs)
	})
	if err != nil || chunks {
		return err
	}
	return send(response.RequestID, response.Outputs)
}

func (h *rest) readGeneration(w http.ResponseWriter, r *http.Request, name, route string, memory *budget.Account) (*generation, error) {
	model, err := h.models.Model(name)
	if err != nil {
		return nil, err
	}
	data, err := h.readBody(w, r)
	if err != nil {
		return nil, err
	}
	out, err := generationOf(r.Context(), name, data, model, memory)
	if err != nil {
		return nil, err
	}
	out.request.Trace = transport.TraceContext(r.Header)
	out.request.Origin = transport.HTTPOrigin(r, route)
	return out, nil
}

// object returns a response, or a chunk of one: the model, and the outputs by their
// names. An output replaces a member of the same name.
func (g *generation) object(outputs []payload.Part) (dst []byte, err error) {
	dst = make([]byte, 0, 256+2*payload.Size(outputs))
	for _, head := range [][2]string{{"model_name", g.request.Pipeline}, {"model_version", onlyVersion}, {idKey, g.id}} {
		if _, output := payload.Find(outputs, head[0]); !output && head[1] != "" {
			dst = oipjson.AppendString(appendKey(dst, head[0]), head[1])
		}
	}
	for _, part := range outputs {
		name := part.Name
		if _, taken := payload.Find(outputs, unnamedKey); name == "" && !taken {
			name = unnamedKey
		}
		if dst, err = appendValue(appendKey(dst, name), part); err != nil {
			return nil, err
		}
	}
	return append(dst, '}'), nil
}

// appendKey begins a member: the first opens the object.
func appendKey(dst []byte, key string) []byte {
	opening := byte(',')
	if len(dst) == 0 {
		opening = '{'
	}
	return append(oipjson.AppendString(append(dst, opening), key), ':')
}

// appendValue appends an output: a tensor's elements, JSON unchanged, and other text
// as a string.
func appendValue(dst []byte, p payload.Part) ([]byte, error) {
	if p.Tensor != nil {
		return oipjson.AppendValue(dst, p)
	}
	data := p.Blob.Data
	switch {
	case payload.IsJSON(p.Blob.ContentType) && oipjson.IsValid(data):
		return append(dst, data...), nil
	case utf8.Valid(data):
		return oipjson.AppendString(dst, string(data)), nil
	}
	return nil, fault.Newf(fault.NotSupported, "outputs.%s: %d bytes that are not text do not fit JSON; use infer", p.Name, len(data))
}
