// Package payload is what requests carry: named parts, each a blob or a
// tensor, and typed parameters. It converts them from and to the contract's
// messages, or reads and writes their bytes on the wire, and checks what comes
// from outside: names, datatypes, and that shapes and raw bytes agree. It also
// interprets media types.
//
// FromProto and ToProto convert the generated messages; Code reads and writes what
// travels between stages, and accepts and rejects the same.
//
// Parts share their bytes with the message they came from, or with the bytes
// that they were read from; treat them as read-only. Values are immutable.
package payload

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Bounds on what one request may hold; all are checked before anything is
// queued. MaxName and MaxContentType are in bytes; MaxName bounds the names of
// parameters too.
const (
	MaxParts       = 256
	MaxParameters  = 256
	MaxName        = 256
	MaxContentType = 1024
)

// Part is one named input or output: a Tensor, or else a Blob.
type Part struct {
	Name string
	// Tensor is nil where the part is a blob.
	Tensor *tensor.Tensor
	Blob   Blob
	// Parameters of this part alone.
	Parameters Parameters
}

// Blob is opaque bytes with a media type.
type Blob struct {
	// ContentType is empty where it is not known.
	ContentType string
	Data        []byte
}

// OfTensor returns a part that holds the tensor.
func OfTensor(name string, t tensor.Tensor) Part { return Part{Name: name, Tensor: &t} }

// OfBlob returns a part that holds bytes of the content type.
func OfBlob(name, contentType string, data []byte) Part {
	return Part{Name: name, Blob: Blob{ContentType: contentType, Data: data}}
}

// Size returns the bytes of payload in the part.
func (p Part) Size() int {
	if p.Tensor != nil {
		return len(p.Tensor.Raw)
	}
	return len(p.Blob.Data)
}

// Size returns the bytes of payload in all parts.
func Size(parts []Part) int {
	total := 0
	for _, p := range parts {
		total += p.Size()
	}
	return total
}

// FromProto converts parts from outside and validates them. The field is the
// path of the list in the request, for messages: "inputs". Any error is a
// *fault.Fault that names the part.
func FromProto(field string, parts []*inferencev1.Part) ([]Part, error) {
	if len(parts) > MaxParts {
		return nil, tooMany(field, len(parts))
	}
	out := make([]Part, len(parts))
	for i, p := range parts {
		out[i].Name = p.GetName()
		if err := out[i].fromProto(p); err != nil {
			return nil, faultAt(field, i, out[i].Name, err)
		}
	}
	if err := Validate(field, out); err != nil {
		return nil, err
	}
	return out, nil
}

// Validate checks that parts can travel: their number, names, parameters and
// content types are within bounds and in UTF-8, no name is there twice, and
// datatype, shape and raw bytes of tensors agree. The field is as for
// FromProto; any error is a *fault.Fault that names the part.
func Validate(field string, parts []Part) error {
	if len(parts) > MaxParts {
		return tooMany(field, len(parts))
	}
	for i, p := range parts {
		if err := p.validate(); err != nil {
			return faultAt(field, i, p.Name, err)
		}
	}
	for i, p := range parts {
		if _, twice := Find(parts[:i], p.Name); twice {
			return fault.Newf(fault.InvalidInput, "two %s are named %q", field, p.Name).WithViolation(field, "%q is there twice", p.Name)
		}
	}
	return nil
}

func tooMany(field string, n int) error {
	return fault.Newf(fault.InvalidRequest, "%d %s, at most %d are allowed", n, field, MaxParts)
}

// faultAt returns err as the fault of that part. A part's own fault keeps its reason.
func faultAt(field string, i int, name string, err error) error {
	where := Path(field, i, name)
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return fault.InField(f.Reason, where, "%s", f.Message)
	}
	return fault.InField(fault.InvalidInput, where, "%w", err)
}

// Path returns the path of a part in a list, for messages: by its name, if it has a valid one.
func Path(field string, i int, name string) string {
	if name != "" && ValidName(name) == nil {
		return field + "." + name
	}
	return fault.Element(field, i)
}

// ValidName checks the name of a part or a parameter.
func ValidName(name string) error {
	if len(name) > MaxName || !utf8.ValidString(name) {
		return fmt.Errorf("a name is valid UTF-8 of at most %d bytes", MaxName)
	}
	return nil
}

func (p Part) validate() error {
	if err := ValidName(p.Name); err != nil {
		return err
	}
	if err := p.Parameters.Validate(); err != nil {
		return err
	}
	if p.Tensor != nil {
		return p.Tensor.Validate()
	}
	if len(p.Blob.ContentType) > MaxContentType || !utf8.ValidString(p.Blob.ContentType) {
		return fmt.Errorf("a content type is valid UTF-8 of at most %d bytes", MaxContentType)
	}
	return nil
}

var errNoBody = errors.New("neither blob nor tensor")

func errByReference() error {
	return fault.New(fault.NotSupported, "payloads by reference are not served yet; send a blob or a tensor")
}

func (p *Part) fromProto(in *inferencev1.Part) error {
	params, err := ParametersFromProto(in.GetParameters())
	if err != nil {
		return err
	}
	p.Parameters = params
	switch body := in.GetBody().(type) {
	case *inferencev1.Part_Blob:
		p.Blob = Blob{ContentType: body.Blob.GetContentType(), Data: body.Blob.GetData()}
	case *inferencev1.Part_Tensor:
		p.Tensor = &tensor.Tensor{
			Datatype: tensor.Datatype(body.Tensor.GetDatatype()),
			Shape:    body.Tensor.GetShape(),
			Raw:      body.Tensor.GetRaw(),
		}
	case *inferencev1.Part_Ref:
		return errByReference()
	default:
		return errNoBody
	}
	return nil
}

// ToProto converts parts for the wire. The messages share the parts' bytes.
func ToProto(parts []Part) []*inferencev1.Part {
	out := make([]*inferencev1.Part, len(parts))
	for i, p := range parts {
		out[i] = p.toProto()
	}
	return out
}

func (p Part) toProto() *inferencev1.Part {
	out := &inferencev1.Part{Name: p.Name, Parameters: p.Parameters.ToProto()}
	if p.Tensor == nil {
		out.Body = &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: p.Blob.ContentType, Data: p.Blob.Data}}
		return out
	}
	out.Body = &inferencev1.Part_Tensor{Tensor: &inferencev1.Tensor{
		Datatype: string(p.Tensor.Datatype), Shape: p.Tensor.Shape, Raw: p.Tensor.Raw,
	}}
	return out
}

// Find returns the part of that name.
func Find(parts []Part, name string) (Part, bool) {
	for _, p := range parts {
		if p.Name == name {
			return p, true
		}
	}
	return Part{}, false
}

const (
	// OctetStream is the content type of a blob that names none.
	OctetStream = "application/octet-stream"
	// JSONType is the content type of JSON.
	JSONType = "application/json"
)

// BareType returns a media type without its parameters, in lower case.
func BareType(contentType string) string {
	out, _, _ := strings.Cut(contentType, ";")
	return strings.ToLower(strings.TrimSpace(out))
}

// IsJSON reports whether a content type is JSON: application/json, or one that ends in
// +json, which is JSON whatever else it is.
func IsJSON(contentType string) bool {
	bare := BareType(contentType)
	return bare == JSONType || strings.HasSuffix(bare, "+json")
}

// LargeNumber returns the first number of a JSON document that no double holds, and its offset. A
// reader in most languages makes infinity of it, which JSON does not have.
func LargeNumber(doc []byte) (at int, number []byte) {
	for ; at < len(doc); at++ {
		switch c := doc[at]; {
		case c == '"':
			for at++; at < len(doc) && doc[at] != '"'; at++ {
				if doc[at] == '\\' {
					at++
				}
			}
		case c == '-' || '0' <= c && c <= '9':
			number = doc[at : len(doc)-len(bytes.TrimLeft(doc[at:], "0123456789+-.eE"))]
			if mayBeLarge := len(number) > 300 || bytes.ContainsAny(number, "eE"); mayBeLarge {
				if _, err := strconv.ParseFloat(string(number), 64); errors.Is(err, strconv.ErrRange) {
					return at, number
				}
			}
			at += len(number) - 1
		}
	}
	return 0, nil
}

// AcceptsType reports whether a content type is one that the pattern means, both perhaps
// with parameters and in any case: "image/png", "image/*" or "*/*". What takes
// application/json takes whatever IsJSON.
func AcceptsType(pattern, contentType string) bool {
	got, pattern := BareType(contentType), BareType(pattern)
	if family, ok := strings.CutSuffix(pattern, "*"); ok {
		return family == "*/" || strings.HasPrefix(got, family)
	}
	return got == pattern || pattern == JSONType && IsJSON(got)
}

// ModelRef names a model by id or else, where Alias is set, by a movable name.
// The zero ModelRef is the stage's default.
type ModelRef struct {
	Model   string `yaml:"model"`
	Alias   string `yaml:"alias"`
	Version string `yaml:"version"`
}

// Validate checks that the reference names a model in one way only.
func (m ModelRef) Validate() error {
	if m.Model != "" && m.Alias != "" {
		return fmt.Errorf("names the model %.*q and the alias %.*q; name one of them", MaxName, m.Model, MaxName, m.Alias)
	}
	return nil
}

// ModelFromProto converts a reference from outside; nil is the default.
func ModelFromProto(in *inferencev1.ModelRef) ModelRef {
	return ModelRef{Model: in.GetModel(), Alias: in.GetAlias(), Version: in.GetVersion()}
}

// ToProto converts the reference for the wire; the default is nil.
func (m ModelRef) ToProto() *inferencev1.ModelRef {
	switch {
	case m == ModelRef{}:
		return nil
	case m.Alias != "":
		return &inferencev1.ModelRef{Name: &inferencev1.ModelRef_Alias{Alias: m.Alias}, Version: m.Version}
	default:
		return &inferencev1.ModelRef{Name: &inferencev1.ModelRef_Model{Model: m.Model}, Version: m.Version}
	}
}
