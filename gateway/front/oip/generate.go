package oip

import (
	"context"
	"fmt"
	"slices"
	"strings"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/gateway/front/oipjson"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Keys of the generate extension.
const (
	idKey         = "id"
	parametersKey = "parameters"
	// textKey is the model's only text input, whatever that is called, and
	// unnamedKey the output that has no name.
	textKey    = "text_input"
	unnamedKey = "text_output"

	textPlain = "text/plain"
)

// generation is a request of the generate extension: an object whose members are the
// model's inputs and the request's parameters.
type generation struct {
	takes   []*stagev1.PartSpec
	request *call.Request
	id      string
	// room is where inputs are made that are not in the body as they are.
	room *body.Room
}

// generationOf reads the text of a request for the model of that name.
func generationOf(ctx context.Context, name string, text []byte, model Model, room *body.Room) (*generation, error) {
	fields, err := oipjson.DecodeFields(text)
	if err != nil {
		return nil, err
	}
	out := &generation{takes: model.Inputs, room: room, request: &call.Request{Pipeline: name, Parameters: payload.Parameters{}}}
	for _, field := range fields {
		if err := out.take(field); err != nil {
			return nil, err
		}
	}
	if len(out.request.Inputs) == 0 {
		return nil, wrongInput(textKey, "is missing: the body has no input; %s", out.taken())
	}
	if err := out.request.Parameters.Validate(); err != nil {
		return nil, invalid(parametersKey, "%s", err)
	}
	if out.request.Timeout, err = taken(ctx, out.request.Parameters); err != nil {
		return nil, err
	}
	out.request.Booked = room.Made()
	return out, payload.Validate("inputs", out.request.Inputs)
}

// take takes one member of the body. The model's own names come first.
func (g *generation) take(f oipjson.Field) error {
	spec, known := named(g.takes, f.Name)
	switch {
	case known:
		return g.input(f, spec)
	case f.Name == textKey:
		return g.text(f)
	case f.Name == idKey:
		id, ok := f.Text()
		if !ok || len(id) > payload.MaxName {
			return wrongInput(idKey, "is no string of at most %d bytes", payload.MaxName)
		}
		g.id = id
		return nil
	case f.Name == parametersKey:
		return g.parameters(f)
	case !f.Scalar():
		return wrongInput(f.Name, "is neither an input nor a parameter, which is a string, a number or a boolean; %s", g.taken())
	}
	value, err := f.Parameter()
	if err != nil {
		return err
	}
	return g.parameter(f.Name, value)
}

func named(takes []*stagev1.PartSpec, name string) (*stagev1.PartSpec, bool) {
	i := slices.IndexFunc(takes, func(p *stagev1.PartSpec) bool { return p.GetName() == name })
	if i < 0 {
		return nil, false
	}
	return takes[i], true
}

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

// text takes the text for a model that has one input of text. One that says nothing
// of what it takes gets it as a blob without a name.
func (g *generation) text(f oipjson.Field) error {
	if len(g.takes) == 0 {
		if _, ok := f.Text(); !ok {
			return noString(f)
		}
		return g.input(f, &stagev1.PartSpec{Body: &stagev1.PartSpec_Blob{Blob: &stagev1.BlobSpec{ContentTypes: []string{textPlain}}}})
	}
	var only *stagev1.PartSpec
	for _, spec := range g.takes {
		if !takesText(spec) {
			continue
		}
		if only != nil {
			return wrongInput(textKey, "is one of several: name the input; %s", g.taken())
		}
		only = spec
	}
	if only == nil {
		return wrongInput(textKey, "is no input, and the model takes no text; %s", g.taken())
	}
	return g.input(f, only)
}

// taken says what the model takes.
func (g *generation) taken() string {
	if len(g.takes) == 0 {
		return "the model does not say what it takes, so send " + textKey + ", or use infer"
	}
	names := make([]string, len(g.takes))
	for i, spec := range g.takes {
		names[i] = spec.GetName()
	}
	return "the model takes " + strings.Join(names, ", ")
}

func (g *generation) input(f oipjson.Field, spec *stagev1.PartSpec) error {
	part, err := partOf(f, spec, g.room)
	if err != nil {
		return err
	}
	if _, twice := payload.Find(g.request.Inputs, part.Name); twice {
		return wrongInput(f.Name, "is there twice: as %s, and by its name", textKey)
	}
	g.request.Inputs = append(g.request.Inputs, part)
	return nil
}

// partOf returns a value as what the model takes: a tensor of one element or one
// axis, or a blob of text or JSON.
func partOf(f oipjson.Field, spec *stagev1.PartSpec, room *body.Room) (payload.Part, error) {
	if t := spec.GetTensor(); t != nil {
		out, err := f.Tensor(tensor.Datatype(t.GetDatatype()), len(t.GetShape()), room)
		return payload.OfTensor(spec.GetName(), out), err
	}
	types := spec.GetBlob().GetContentTypes()
	if contentType, takes := pick(types, isText, textPlain); takes {
		if text, ok, err := f.Bytes(room); ok || err != nil {
			return payload.OfBlob(spec.GetName(), contentType, text), err
		}
	}
	if contentType, takes := pick(types, payload.IsJSON, payload.JSONType); takes {
		return payload.OfBlob(spec.GetName(), contentType, f.JSON), nil
	}
	if _, takes := pick(types, isText, textPlain); takes && f.Null() {
		return payload.Part{}, noString(f)
	}
	return payload.Part{}, wrongInput(f.Name, "cannot be said so: the model takes %s there", strings.Join(types, ", "))
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

// pick returns the first of the media types that is one of the wanted, or else the
// usual one where a pattern takes it. An empty list takes any.
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
	return wrongInput(f.Name, "is no string; send one")
}

func wrongInput(field, format string, args ...any) error {
	field, text := fmt.Sprintf("%.*s", shown, field), fmt.Sprintf(format, args...)
	return fault.Newf(fault.InvalidInput, "%s %s", field, text).WithViolation(field, "%s", text)
}
