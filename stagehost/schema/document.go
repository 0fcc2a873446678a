package schema

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// MaxSchema bounds the JSON Schema of one part, in bytes.
const MaxSchema = 256 << 10

// documents are the compiled JSON Schemas of parts, by name.
type documents map[string]*boundedSchema

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

func compile(s runner.PartSpec) (*boundedSchema, error) {
	if s.IsTensor() {
		return nil, errors.New("it is for the JSON of a blob, and this is a tensor")
	}
	if len(s.Schema) > MaxSchema {
		return nil, fmt.Errorf("%d bytes, at most %d are taken", len(s.Schema), MaxSchema)
	}
	doc, err := decode(s.Schema)
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
	all := reachableSchemas(compiler, out, doc)
	depth, err := longestChain(doc, all)
	if err != nil {
		return nil, err
	}
	bounded := &boundedSchema{root: out}
	bounded.guard(all, depth)
	return bounded, nil
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
		return fmt.Errorf("it is no JSON Schema: %s: %s", first.Field, first.Description)
	}
	return fmt.Errorf("it is no JSON Schema: %w", broken.Err)
}

func decodeNumbers(data []byte) (any, error) {
	var out any
	from := json.NewDecoder(bytes.NewReader(data))
	from.UseNumber()
	err := from.Decode(&out)
	return out, err
}

// check validates a part's JSON against its schema. The path is that of the part.
// Violations are returned as such. Text that is not JSON, and a document that takes
// too much work, are errors.
func (d documents) check(path string, part payload.Part) ([]violated, error) {
	schema, ok := d[part.Name]
	if !ok || part.Tensor != nil {
		return nil, nil
	}
	text, err := textOf(part.Blob)
	if err != nil {
		return nil, err
	}
	doc, err := decode(text)
	if err != nil {
		return nil, err
	}
	err = schema.validate(doc)
	if err == nil {
		return nil, nil
	}
	invalid, ok := errors.AsType[*jsonschema.ValidationError](err)
	if !ok {
		return nil, err
	}
	if hasRefCycle(invalid) {
		return nil, refCycle(path)
	}
	return violations(path, doc, invalid), nil
}

// refCycle returns the fault of a schema whose dynamic references form a cycle. The stage is
// at fault, not the document.
func refCycle(path string) *fault.Fault {
	const what = "has a schema that leads back to itself without a step into the document"
	return fault.Newf(fault.Internal, "%s %s", path, what).WithViolation(path, what)
}

// maxConverted bounds the JSON that MessagePack is converted to, in bytes.
const maxConverted = 32 << 20

// textOf returns the JSON of a blob: its data, or its MessagePack converted to JSON.
func textOf(b payload.Blob) ([]byte, error) {
	if msgpack.Is(b.ContentType) {
		return msgpack.ToJSON(b.Data, maxConverted)
	}
	return b.Data, nil
}
