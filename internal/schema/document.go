package schema

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"

	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// MaxSchema bounds the JSON Schema of one part, in bytes.
const MaxSchema = 256 << 10

// documents are the compiled JSON Schemas of parts, by name.
type documents map[string]*document

// document is a compiled schema, and what the values of a document cost at each depth.
type document struct {
	schema *jsonschema.Schema
	costs  []cost
}

// compileAll returns the JSON Schemas of the parts, or nil if there are none. Messages
// begin with the key, such as "inputs".
func compileAll(key string, specs []runner.PartSpec) (documents, error) {
	var out documents
	for i, s := range specs {
		if len(s.Schema) == 0 {
			continue
		}
		compiled, err := compile(s)
		if err != nil {
			return nil, fmt.Errorf("%s[%d].schema: of %q: %w", key, i, s.Name, err)
		}
		if out == nil {
			out = documents{}
		}
		out[s.Name] = compiled
	}
	return out, nil
}

// here is the base URL of a schema. No other document exists below nearby.
const (
	nearby = "stage:///"
	here   = nearby + "schema"
)

func compile(s runner.PartSpec) (*document, error) {
	if s.IsTensor() {
		return nil, errors.New("it is for the JSON of a blob, and this is a tensor")
	}
	if len(s.Schema) > MaxSchema {
		return nil, fmt.Errorf("%d bytes, at most %d are allowed", len(s.Schema), MaxSchema)
	}
	doc, err := decode(s.Schema, make([]cost, maxNesting+1))
	if err != nil {
		return nil, fmt.Errorf("it %w", err)
	}
	compiler := jsonschema.NewCompiler()
	compiler.DefaultDraft(jsonschema.Draft2020)
	compiler.UseLoader(noLoader{})
	if err := compiler.AddResource(here, doc); err != nil {
		return nil, err
	}
	out, err := compiler.Compile(here)
	if err != nil {
		return nil, compileError(doc, err)
	}
	costs, err := plan(doc, out)
	return &document{out, costs}, err
}

// noLoader loads nothing: a stage's contract does not depend on the network.
type noLoader struct{}

// Load implements jsonschema.URLLoader.
func (noLoader) Load(string) (any, error) {
	return nil, errors.New("schemas of other places are not loaded; put it below $defs")
}

// compileError describes why a schema does not compile, and at which place.
func compileError(doc any, err error) error {
	broken, ok := errors.AsType[*jsonschema.SchemaValidationError](err)
	if !ok {
		return fmt.Errorf("it does not compile: %s", strings.NewReplacer(here, "", nearby, "").Replace(err.Error()))
	}
	if invalid, ok := errors.AsType[*jsonschema.ValidationError](broken.Err); ok {
		first := violations("schema", doc, invalid)[0]
		return fmt.Errorf("it is not a JSON Schema: %s: %s", first.Field, first.Description)
	}
	return fmt.Errorf("it is not a JSON Schema: %w", broken.Err)
}

// check validates a part's JSON against its schema. The path names the part.
// Violations are returned as such. Text that is not JSON, and a document that takes
// too much work, are errors.
func (d documents) check(path string, part payload.Part) ([]fault.Violation, error) {
	schema, ok := d[part.Name]
	if !ok || part.Tensor != nil {
		return nil, nil
	}
	text := part.Blob.Data
	if msgpack.Is(part.Blob.ContentType) {
		var err error
		if text, err = msgpack.ToJSON(text, maxConverted); err != nil {
			return nil, err
		}
	}
	doc, err := decode(text, schema.costs)
	if err != nil {
		return nil, err
	}
	err = schema.schema.Validate(doc)
	if invalid, ok := errors.AsType[*jsonschema.ValidationError](err); ok {
		return violations(path, doc, invalid), nil
	}
	return nil, err
}

// maxConverted bounds the JSON that MessagePack is converted to, in bytes.
const maxConverted = 32 << 20

// Bounds on a document that is validated against a JSON Schema: its decoded size, and
// the size of its numbers when they become exact. The cost of validation depends on
// the schema too, and maxWork bounds it.
const (
	maxValues   = 100_000
	maxNesting  = 64
	maxDigits   = 400
	maxExponent = 999
	// An exact number costs a unit for so many digits, and so many for an exponent.
	digitsPerUnit = 2
	exponentUnits = 32
)

// decode reads a document within the bounds, whose values cost that at each depth. Numbers stay
// text.
func decode(data []byte, costs []cost) (any, error) {
	if !json.Valid(data) {
		var v any
		return nil, fmt.Errorf("is not JSON: %w", json.Unmarshal(data, &v))
	}
	if !jsontext.Value(data).IsValid(jsontext.AllowDuplicateNames(true)) {
		return nil, errors.New("is not JSON: not UTF-8, or half a surrogate pair in an escape")
	}
	if _, err := measure(data, costs); err != nil {
		return nil, err
	}
	var out any
	from := json.NewDecoder(bytes.NewReader(data))
	from.UseNumber()
	err := from.Decode(&out)
	return out, err
}

// measure checks text that is JSON for the bounds, before anything is allocated for its
// values, and returns the most steps that its validation takes.
func measure(data []byte, costs []cost) (steps int, err error) {
	values, depth, text := 0, 0, 0
	steps = costs[0].value
	for at := 0; at < len(data); at++ {
		switch c := data[at]; c {
		case '"':
			begin := at
			for at++; data[at] != '"'; at++ {
				if data[at] == '\\' {
					at++
				}
			}
			text += (at - begin) * costs[depth].text
		case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
			end := at + 1
			for end < len(data) && strings.IndexByte("0123456789+-.eE", data[end]) >= 0 {
				end++
			}
			// Leading zeros of an exponent count too.
			e := bytes.IndexAny(data[at:end], "eE")
			if end-at > maxDigits || e >= 0 && end-at-e > len("e-999") {
				return 0, fmt.Errorf("has the number %.40s: numbers have at most %d digits and exponents to %d", data[at:end], maxDigits, maxExponent)
			}
			size := 2 + (end-at)/digitsPerUnit
			if e >= 0 {
				size += exponentUnits
			}
			steps += size * costs[depth].number
			at = end - 1
		case '[', '{', ',':
			if c != ',' {
				depth++
			}
			// A value begins after a bracket or a comma.
			if values++; values > maxValues {
				return 0, fmt.Errorf("has more than %d values, which is too much for a schema", maxValues)
			}
			if depth > maxNesting {
				return 0, fmt.Errorf("nests deeper than %d, which is too much for a schema", maxNesting)
			}
			steps += costs[depth].value
		case ']', '}':
			depth--
		}
	}
	if steps += text / textPerStep; steps > maxWork {
		return steps, errTooMuchWork
	}
	return steps, nil
}

// errTooMuchWork is about a document; plan bounds the schema.
var errTooMuchWork = fmt.Errorf("has too many values or levels for its schema: validation may take more than %d steps; send less at a time", maxWork)

// Bounds on the report of a document that violates its schema.
const (
	maxViolations  = 5
	maxDescription = 200
	maxPlaces      = 16
	// maxCompared bounds the violations among which the first ones are picked.
	maxCompared = 1000
)

// violations returns the first violations of a document, at least one, in the
// document's order where it has an order. The path names the document.
func violations(path string, doc any, invalid *jsonschema.ValidationError) []fault.Violation {
	leaves := collect(nil, invalid)
	slices.SortStableFunc(leaves, func(a, b *jsonschema.ValidationError) int {
		return slices.CompareFunc(a.InstanceLocation, b.InstanceLocation, comparePlaces)
	})
	var out []fault.Violation
	for _, leaf := range leaves {
		one := fault.Violation{Field: pathOf(path, doc, leaf.InstanceLocation), Description: describe(leaf)}
		if !slices.Contains(out, one) {
			out = append(out, one)
		}
		if len(out) == maxViolations {
			break
		}
	}
	return out
}

// collect adds the errors that describe a violation themselves. If no alternative
// matches, that error stands for the alternatives.
func collect(to []*jsonschema.ValidationError, e *jsonschema.ValidationError) []*jsonschema.ValidationError {
	if len(to) == maxCompared {
		return to
	}
	switch e.ErrorKind.(type) {
	case *kind.AnyOf, *kind.OneOf, *kind.Contains, *kind.MinContains:
		return append(to, e)
	}
	if len(e.Causes) == 0 {
		return append(to, e)
	}
	for _, cause := range e.Causes {
		to = collect(to, cause)
	}
	return to
}

// comparePlaces orders elements by their index, and members by their key.
func comparePlaces(a, b string) int {
	x, notA := strconv.Atoi(a)
	y, notB := strconv.Atoi(b)
	if notA == nil && notB == nil {
		return cmp.Compare(x, y)
	}
	return cmp.Compare(a, b)
}

// pathOf returns the path to a place. Only the document distinguishes an index from a
// key that is a number.
func pathOf(path string, doc any, location []string) string {
	for i, element := range location {
		if i == maxPlaces {
			return path + "..."
		}
		switch at := doc.(type) {
		case []any:
			n, err := strconv.Atoi(element)
			if err != nil || n < 0 || n >= len(at) {
				return path
			}
			path, doc = fault.Element(path, n), at[n]
		case map[string]any:
			path, doc = fault.Member(path, element), at[element]
		}
	}
	return path
}

func describe(e *jsonschema.ValidationError) string {
	var out string
	switch k := e.ErrorKind.(type) {
	case *kind.AnyOf:
		out = "matches none of the schemas in anyOf: " + alternatives(e)
	case *kind.OneOf:
		if len(k.Subschemas) > 0 {
			out = "matches more than one of the schemas in oneOf"
		} else {
			out = "matches none of the schemas in oneOf: " + alternatives(e)
		}
	case *kind.Contains, *kind.MinContains:
		out = "has too few elements of the form that contains has"
	case *kind.Not:
		out = "is of the form that not has"
	case *kind.FalseSchema:
		out = "is not allowed"
	default:
		out = describePlain(e)
	}
	return clip(out)
}

// describePlain describes an error in the library's words. It escapes unprintable text that
// the error quotes. It leaves out the cause, which may contain all of a document.
func describePlain(e *jsonschema.ValidationError) string {
	alone := jsonschema.ValidationError{SchemaURL: e.SchemaURL, InstanceLocation: e.InstanceLocation, ErrorKind: e.ErrorKind}
	if out := alone.BasicOutput(); out.Error != nil {
		return printable(out.Error.String())
	}
	return fmt.Sprintf("breaks %s", strings.Join(alone.ErrorKind.KeywordPath(), "."))
}

// alternatives describes the wanted alternatives, as far as space permits.
func alternatives(e *jsonschema.ValidationError) string {
	var out []string
	for _, cause := range e.Causes[:min(len(e.Causes), maxViolations)] {
		leaf := collect(nil, cause)[0]
		what := describePlain(leaf)
		if below := leaf.InstanceLocation[min(len(e.InstanceLocation), len(leaf.InstanceLocation)):]; len(below) > 0 {
			what = clip(strings.Join(below, ".")) + " " + what
		}
		out = append(out, what)
	}
	return printable(strings.Join(out, "; "))
}

func clip(s string) string {
	if len(s) > maxDescription {
		return strings.ToValidUTF8(s[:maxDescription], "") + "..."
	}
	return s
}

func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if strconv.IsPrint(r) {
			return r
		}
		return '\uFFFD'
	}, s)
}
