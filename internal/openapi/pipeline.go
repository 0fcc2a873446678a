package openapi

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"
)

func inferPath(name string) string  { return "/v1/pipelines/" + name + ":infer" }
func streamPath(name string) string { return "/v1/pipelines/" + name + ":stream" }

// describe returns the paths of a pipeline, and the schemas that they refer to.
func describe(d *document, p Pipeline) (paths, schemas map[string]json.RawMessage, err error) {
	first, last := &p.Steps[0], &p.Steps[len(p.Steps)-1]
	a := operations{document: d, pipeline: p, out: side{spec: p.Specs[string(last.Stage)], key: "stage." + string(last.Stage)}, schemas: object{}}
	a.in = side{spec: p.Specs[string(first.Stage)], key: "stage." + string(first.Stage), rename: first.Inputs}
	if p.HasBlocks() {
		key := "graph." + strings.ReplaceAll(string(p.Name), ".", "..")
		a.out = side{spec: &stagev1.Spec{Outputs: p.Outputs}, key: key}
		a.in.key, a.in.asked = key, p.Inputs
	} else if len(p.Keep)+len(first.Inputs) > 0 {
		// Callers use other input names than for the stage alone, or send more. The dots of a name are
		// doubled, so that no two keys are one.
		if len(p.Keep) > 0 {
			a.in.asked = p.Inputs
		}
		a.in.key = "pipeline." + strings.ReplaceAll(string(p.Name), ".", "..")
	}
	made := object{inferPath(string(p.Name)): object{"post": a.infer()}}
	if a.out.spec.GetStream() {
		made[streamPath(string(p.Name))] = object{"post": a.stream()}
	}
	if paths, err = marshalMembers(made); err != nil {
		return nil, nil, err
	}
	schemas, err = marshalMembers(a.schemas)
	return paths, schemas, err
}

func marshalMembers(of object) (map[string]json.RawMessage, error) {
	out := make(map[string]json.RawMessage, len(of))
	for key, value := range of {
		text, err := json.Marshal(value)
		if err != nil {
			return nil, err
		}
		out[key] = text
	}
	return out, nil
}

// route lists the stages that a request passes.
func route(p Pipeline) string {
	var steps []string
	for _, step := range p.StageSteps() {
		text := string(step.Name)
		if string(step.Stage) != text {
			text += " (" + string(step.Stage) + ")"
		}
		steps = append(steps, text)
	}
	return strings.Join(steps, " → ")
}

// side is the input or the output side of a pipeline.
type side struct {
	// spec is nil if it is not known.
	spec *stagev1.Spec
	// key begins the keys of its components.
	key string
	// rename maps inputs to the names that callers use.
	rename map[string]string
	// asked are the inputs of a pipeline with blocks or kept inputs, where they are known; the spec is its first stage's.
	asked []pipelines.Input
}

// inputs are the parts that callers send; nil means any.
func (s side) inputs() (out []part) {
	if s.asked == nil {
		return s.parts("input", s.spec.GetInputs())
	}
	for _, in := range s.asked {
		if in.GetBody() != nil {
			out = append(out, side{key: s.key}.part("input", len(out), in.PartSpec, in.Rows))
		}
	}
	return out
}

// outputs are the parts that callers receive; nil means any.
func (s side) outputs() []part { return s.parts("output", s.spec.GetOutputs()) }

func (s side) parts(kind string, specs []*stagev1.PartSpec) (out []part) {
	for i, spec := range specs {
		out = append(out, s.part(kind, i, spec, s.spec.GetBatchAxis() == stagev1.BatchAxis_BATCH_AXIS_ROWS))
	}
	return out
}

func (s side) part(kind string, i int, spec *stagev1.PartSpec, rows bool) part {
	out := part{PartSpec: spec, name: cmp.Or(s.rename[spec.GetName()], spec.GetName()), rows: rows}
	out.key = fmt.Sprintf("%s.%s.%s", s.key, kind, out.name)
	if strings.Trim(out.key, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") != "" {
		// No other character may be in a component's key.
		out.key = fmt.Sprintf("%s.%ss.%d", s.key, kind, i)
	}
	return out
}

// operations describes the operations of one pipeline.
type operations struct {
	*document

	pipeline Pipeline
	in, out  side
	// schemas are the components that it needs.
	schemas object
}

// define adds a component, and returns a reference to it.
func (a operations) define(key string, schema any) object {
	a.schemas[key] = schema
	return schemaRef(key)
}

// variant returns a component of the static part with other properties.
func (a operations) variant(key string, properties object) object {
	var out object
	_ = json.Unmarshal(a.Schemas[key], &out) // embedded, and a test builds all variants
	maps.Copy(out["properties"].(object), properties)
	return out
}

// own returns an operation of any pipeline as the pipeline's own.
func (a operations) own(of operation, prefix string, success response) operation {
	name := string(a.pipeline.Name)
	of.ID, of.Tags = prefix+name, []string{name}
	of.Summary = strings.Replace(of.Summary, "any pipeline", name, 1)
	of.Description = a.about()
	of.Parameters = slices.Concat(of.Parameters[1:], a.stepParameters())
	a.nameOutputs(of.Parameters)
	of.Body = a.body(of.Body)
	of.Responses = maps.Clone(of.Responses)
	of.Responses["200"] = success
	return of
}

func (a operations) infer() operation {
	out := a.own(a.document.infer, "infer_", a.answer())
	out.Spec = a.spec()
	return out
}

func (a operations) stream() operation {
	success := a.document.stream.Responses["200"]
	success.Content = bytes.ReplaceAll(success.Content, []byte(`"#/components/schemas/Chunk"`), []byte(`"`+a.chunk()["$ref"].(string)+`"`))
	out := a.own(a.document.stream, "stream_", success)
	// The description of any pipeline ends with what holds for all streams.
	_, aboutStreams, _ := strings.Cut(a.document.stream.Description, "with the whole alone. ")
	out.Description += "\n\n" + aboutStreams
	return out
}

// about is an operation's description.
func (a operations) about() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Steps: %s.", route(a.pipeline))
	if a.pipeline.Timeout > 0 {
		fmt.Fprintf(&b, " A request may take %s.", a.pipeline.Timeout)
	}
	if a.pipeline.Durability == pipeline.File {
		b.WriteString(" Requests are durable: their answers are stored.")
	}
	listParts(&b, "Inputs", a.in.inputs())
	listParts(&b, "Outputs", a.out.outputs())
	return b.String()
}

// listParts describes parts, one a line.
func listParts(b *strings.Builder, title string, parts []part) {
	if parts == nil {
		fmt.Fprintf(b, "\n\n%s: not known, anything.", title)
		return
	}
	fmt.Fprintf(b, "\n\n%s:\n", title)
	for _, p := range parts {
		fmt.Fprintf(b, "\n- `%s`: %s", strings.ReplaceAll(p.name, "`", "'"), p.about())
	}
}

// stepParameters are the parameters that a request may set for one step: those that its stage
// declares, and those that the pipeline sets.
func (a operations) stepParameters() []any {
	var out []any
	for _, step := range a.pipeline.StageSteps() {
		if step.Locked {
			continue
		}
		declared := map[string]*stagev1.ParameterSpec{}
		for _, one := range a.pipeline.Specs[string(step.Stage)].GetParameters().GetSpecs() {
			declared[one.GetName()] = one
		}
		names := slices.AppendSeq(slices.Collect(maps.Keys(declared)), maps.Keys(step.Parameters))
		slices.Sort(names)
		for _, name := range slices.Compact(names) {
			about := fmt.Sprintf("Parameter `%s` of the step %s.", name, step.Name)
			if text := declared[name].GetDescription(); text != "" {
				about += " " + text
			}
			if value, ok := step.Parameters[name]; ok {
				about += fmt.Sprintf(" The pipeline sets %s.", value)
			}
			out = append(out, object{
				"name": "steps." + string(step.Name) + "." + name, "in": "query", "description": about,
				"schema": object{"type": parameterType(payload.Type(declared[name].GetType()))},
			})
		}
	}
	return out
}

// nameOutputs lists the names that the parameter outputs takes. A chunked response may have others.
func (a operations) nameOutputs(parameters []any) {
	names := []any{}
	for _, p := range a.out.outputs() {
		if strings.ContainsAny(p.name, ", ") || p.name == "" {
			return // not in a list
		}
		names = append(names, p.name)
	}
	at := slices.IndexFunc(parameters, func(p any) bool { return reflect.DeepEqual(p, component("parameters", "Outputs")) })
	if at < 0 || len(names) == 0 || a.out.spec.GetStream() {
		return
	}
	var own object
	_ = json.Unmarshal(a.Parameters["Outputs"], &own) // embedded
	own["schema"].(object)["items"] = object{"enum": names}
	parameters[at] = own
}

// parameterType returns the type of a parameter in JSON Schema.
func parameterType(t payload.Type) any {
	switch t {
	case payload.TypeBool:
		return "boolean"
	case payload.TypeInt:
		return "integer"
	case payload.TypeFloat:
		return "number"
	default:
		return []any{"string", "number", "boolean"}
	}
}

// body describes the request bodies that callers may send: one blob as it is, several
// blobs as a form, and tensors as JSON or MessagePack. Where no inputs are known it is the
// body for any pipeline.
func (a operations) body(unknown body) body {
	inputs := a.in.inputs()
	if len(inputs) == 0 {
		return unknown
	}
	var all content
	required := without(inputs, func(p part) bool { return p.GetOptional() })
	blobs, tensors := without(inputs, part.isTensor), without(inputs, part.isBlob)
	// A body is one part without a name, blobs with names, or tensors.
	if len(inputs) == 1 && len(blobs) == 1 {
		a.single(&all, blobs[0])
	}
	if len(blobs) > 0 && !slices.ContainsFunc(required, part.isTensor) {
		all.add("multipart/form-data", a.form(blobs))
	}
	if len(tensors) > 0 && !slices.ContainsFunc(required, part.isBlob) {
		a.tensors(&all, tensors)
	}
	if len(all) == 0 {
		unknown.Description = "The inputs are blobs and tensors: ask by `/v2`, or by gRPC."
		return unknown
	}
	return body{Required: true, Content: all.raw()}
}

// single adds the only input, which needs no name.
func (a operations) single(content *content, p part) {
	for _, media := range p.takes() {
		schema := a.blobSchema(p, media)
		if schema["type"] == "string" {
			schema["minLength"] = 1
		}
		one := object{"schema": schema}
		if examples := a.blobExamples(p, media); len(examples) > 0 {
			one["examples"] = byName(examples)
		}
		content.add(media, one)
	}
}

// form has a part for each blob, with the blob's name.
func (a operations) form(blobs []part) object {
	properties, encoding, required := object{}, object{}, []any{}
	for _, p := range blobs {
		media := p.types()[0]
		schema := maps.Clone(a.blobSchema(p, media))
		if examples := a.blobExamples(p, media); len(examples) > 0 {
			if _, is := examples[0].value.(binary); !is {
				schema["examples"] = []any{examples[0].value}
			}
		}
		if text := p.GetDescription(); text != "" && len(schema) > 0 {
			schema["description"] = text
		}
		properties[p.name] = schema
		encoding[p.name] = object{"contentType": strings.Join(p.takes(), ", ")}
		if !p.GetOptional() {
			required = append(required, p.name)
		}
	}
	schema := object{"type": "object", "properties": properties, "additionalProperties": false}
	if len(required) > 0 {
		schema["required"] = required
	}
	return object{"schema": schema, "encoding": encoding}
}

// tensors adds requests of the Open Inference Protocol. It adds the JSON form only if
// JSON can represent them.
func (a operations) tensors(content *content, inputs []part) {
	inJSON := without(inputs, func(p part) bool { return !p.representable() })
	if len(inJSON) > 0 && !slices.ContainsFunc(inputs, func(p part) bool { return !p.representable() && !p.GetOptional() }) {
		one := object{"schema": a.request(inJSON, asJSON())}
		if examples := a.tensorExamples(inJSON); len(examples) > 0 {
			one["examples"] = byName(examples)
		}
		content.add(jsonType, one)
	}
	content.add(msgpack.Type, object{"schema": packed(a.request(inputs, asPacked()))})
}

// request refers to the schema of a request of the Open Inference Protocol.
func (a operations) request(inputs []part, f form) object {
	list := object{"type": "array", "minItems": 1, "maxItems": len(inputs), "items": anyOf(inputs, func(p part) object { return a.tensorSchema(p, f.sent) })}
	var all []any
	for _, p := range inputs {
		once := object{"contains": object{"required": []any{"name"}, "properties": object{"name": object{"const": p.name}}}, "maxContains": 1}
		if p.GetOptional() {
			once["minContains"] = 0
		}
		all = append(all, once)
	}
	if len(inputs) > 1 {
		list["allOf"] = all
	}
	schema := a.variant("ModelRequest", object{"inputs": list})
	schema["title"] = "tensors"
	return a.define(a.in.key+".request"+f.suffix, schema)
}

// answer describes a success: the document in either form, or its only blob alone. Where no
// outputs are known it is the answer of any pipeline.
func (a operations) answer() response {
	out, outputs := a.document.infer.Responses["200"], a.out.outputs()
	if outputs == nil {
		return out
	}
	plain, compact := []any{a.answerDocument(outputs, asJSON())}, []any{a.answerDocument(outputs, asPacked())}
	blobs := without(outputs, part.isTensor)
	chunked := a.out.spec.GetStream()
	var others content
	for _, p := range blobs {
		for _, media := range p.types() {
			switch {
			case chunked && (payload.IsJSON(media) || msgpack.Is(media)):
			case media == jsonType:
				plain = append(plain, a.jsonSchema(p))
			case media == msgpack.Type:
				compact = append(compact, a.jsonSchema(p))
			default:
				others.add(media, object{"schema": a.blobSchema(p, media)})
			}
			if isUnspecific(media) {
				compact = append(compact, object{"title": "one output alone, which is MessagePack"})
			}
		}
	}
	if chunked {
		plain = append(plain, object{"title": "one output alone, which is JSON"})
		compact = append(compact, object{"title": "one output alone, which is MessagePack"})
		others.add(anyType, object{"schema": object{"type": "string", "contentMediaType": payload.OctetStream}})
	}
	all := content{{jsonType, object{"schema": oneOf(plain)}}}
	all.add(msgpack.Type, object{"schema": packed(oneOf(compact))})
	for _, one := range others {
		all.add(one.contentType, one.object)
	}
	if out.Content = all.raw(); len(blobs) == 0 && !chunked {
		out.Description = "The answer as a JSON document; in MessagePack where `Accept` lists that before JSON, or the body was tensors in it."
	}
	return out
}

// answerDocument refers to the schema of the response document. A host validates the chunks of
// a chunked response by the stage's spec, and not its final outputs: these are any.
func (a operations) answerDocument(outputs []part, f form) object {
	if a.out.spec.GetStream() {
		return schemaRef(f.prefix + "Answer")
	}
	schema := a.variant(f.prefix+"Answer", object{"outputs": object{"type": "array", "items": anyOf(outputs, func(p part) object { return a.outputSchema(p, f) })}})
	if example, ok := answerExample(string(a.pipeline.Name), outputs); ok && f.suffix == "" {
		schema["examples"] = []any{example}
	}
	return a.define(a.out.key+".answer"+f.suffix, schema)
}

// chunk refers to the schema of a chunk. Parts named like an output follow the stage's
// spec; a chunk may have more parts.
func (a operations) chunk() object {
	outputs := a.out.outputs()
	if outputs == nil {
		return schemaRef("Chunk")
	}
	either, names := []any{}, []any{}
	for _, p := range outputs {
		either, names = append(either, a.outputSchema(p, asJSON())), append(names, p.name)
	}
	either = append(either, object{
		"title": "more", "anyOf": []any{schemaRef("Tensor"), schemaRef("Blob")},
		"properties": object{"name": object{"not": object{"enum": names}}},
	})
	return a.define(a.out.key+".chunk", a.variant("Chunk", object{"outputs": object{"type": "array", "items": object{"anyOf": either}}}))
}

// oneOf is one schema for one or several alternatives.
func oneOf(either []any) object {
	if len(either) == 1 {
		return either[0].(object)
	}
	return object{"anyOf": either}
}

// anyOf returns one schema for the alternatives of the parts.
func anyOf(parts []part, schema func(part) object) object {
	out := make([]any, len(parts))
	for i, p := range parts {
		out[i] = schema(p)
	}
	return oneOf(out)
}

// without returns the parts that do not match.
func without(parts []part, matches func(part) bool) []part {
	return slices.DeleteFunc(slices.Clone(parts), matches)
}

// content maps media types to the schemas of a body. It keeps its order, because
// viewers offer the first.
type content []media

type media struct {
	contentType string
	object
}

// add adds a media type, unless it is present.
func (c *content) add(contentType string, of object) {
	if !slices.ContainsFunc(*c, func(one media) bool { return one.contentType == contentType }) {
		*c = append(*c, media{contentType, of})
	}
}

// raw returns the content as JSON, and nothing if a part of it is not JSON.
func (c content) raw() json.RawMessage {
	var out []byte
	for _, one := range c {
		key, _ := json.Marshal(one.contentType)
		value, err := json.Marshal(one.object)
		if err != nil {
			return nil
		}
		out = append(append(append(append(out, ','), key...), ':'), value...)
	}
	out = append(out, '}')
	out[0] = '{'
	return out
}
