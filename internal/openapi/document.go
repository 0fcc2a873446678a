// Package openapi describes a gateway's plain HTTP interface as an OpenAPI 3.1 document:
// every pipeline by name, with the inputs of its first stage and the outputs of its last
// stage, and all other paths below /v1, /v2 and the probes. The latter are embedded
// (static.json), and the operations of a pipeline are copies of the embedded ones for any
// pipeline, with its own bodies and responses.
//
//	text, err := openapi.Build(openapi.Settings{Mesh: "digits", Pipelines: pipelines})
//
// Build is a pure function: the same settings give the same bytes. Unknown inputs and
// outputs are described as anything, never as nothing. The tests of test/meshtest
// validate the gateway's own responses against the document.
//
// A part's JSON Schema becomes a component of the document. Pointers within it are
// rewritten to their place in the document, because few tools support a schema as a
// resource of its own. A schema with anchors, with resources below its root, or with
// references to others is embedded unchanged, with an $id. A schema in another dialect than
// 2020-12 is described as anything.
//
// MessagePack and server-sent events are strings with a contentMediaType, and their
// contentSchema describes the content. For MessagePack that is the document, in which
// binary strings are strings. For events it is a list of events whose fields are strings
// and whose data has a schema of its own. The final outputs of a chunked response are
// described as anything, because a host does not validate them against the stage's spec.
//
// The operation of a pipeline has its Spec as the member x-stagemesh: its inputs and outputs in a
// form from which programs write clients, as internal/clientgen does.
//
// The document has at most Settings.MaxBytes of pipelines, in the order of their names.
// Its description counts the omitted pipelines, and the path of any pipeline describes
// them.
package openapi

import (
	"bytes"
	"cmp"
	_ "embed" // static.json
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Settings describe what Build documents.
type Settings struct {
	// Mesh and Version are the document's title and version. Version belongs to the
	// gateway.
	Mesh, Version string
	// Pipelines are those that are served, in any order.
	Pipelines []Pipeline
	// Port bounds the requests. The document omits the bounds if MaxPayload is 0.
	Port transport.Settings
	// Tokens is true if callers need a token, NoStages if they cannot call single stages.
	Tokens, NoStages bool
	// Jobs is true if the mesh has queues of jobs, Batches if one of them takes batches.
	Jobs, Batches bool
	// OpenAI is true if there are models for calls of the OpenAI API.
	OpenAI bool
	// MaxBytes bounds the description of pipelines; 0 means DefaultMaxBytes.
	MaxBytes int
}

// DefaultMaxBytes is space for some thousand pipelines.
const DefaultMaxBytes = 16 << 20

// Pipeline is one pipeline to describe.
type Pipeline struct {
	pipeline.Pipeline
	// Timeout is the longest time that a request may take: the gateway's if the
	// pipeline has none.
	Timeout time.Duration
	// Specs has the specs of its stages, where they are known, by stage.
	Specs map[string]*stagev1.Spec
	// Inputs are what callers send, nil where that is not known. The bodies of the document follow the
	// first stage, and Spec follows them.
	Inputs []pipelines.Input
	// Outputs are what a pipeline with blocks answers with, nil where that is not known.
	Outputs []*stagev1.PartSpec
}

// object is a JSON object; its members are written sorted.
type object = map[string]any

//go:embed static.json
var staticJSON []byte

// document is a document being built. It begins as the static part: the paths that no pipeline
// changes, the components that they refer to, and the tags. The parts keep the order of their
// members, because viewers offer the first media type.
type document struct {
	Tags                                []json.RawMessage
	Paths, Schemas, Parameters, Headers map[string]json.RawMessage

	// infer and stream are the operations of any pipeline. Those of a pipeline are copies with
	// other members.
	infer, stream operation
	pipelineTags  []any
	// left is how many bytes may still be added for pipelines, and omitted how many
	// pipelines did not fit.
	left, omitted int
}

// operation is an operation of the static part.
type operation struct {
	ID          string              `json:"operationId"`
	Tags        []string            `json:"tags"`
	Summary     string              `json:"summary"`
	Description string              `json:"description"`
	Parameters  []any               `json:"parameters"`
	Body        body                `json:"requestBody"`
	Responses   map[string]response `json:"responses"`
	Spec        *Spec               `json:"x-stagemesh,omitempty"`
}

type body struct {
	Required    bool            `json:"required"`
	Description string          `json:"description,omitempty"`
	Content     json.RawMessage `json:"content"`
}

// response is a reference, or else a description.
type response struct {
	Ref         string          `json:"$ref,omitempty"`
	Description string          `json:"description,omitempty"`
	Headers     json.RawMessage `json:"headers,omitempty"`
	Content     json.RawMessage `json:"content,omitempty"`
}

// newDocument returns the static part.
func newDocument() (*document, error) {
	d := &document{}
	if err := json.Unmarshal(staticJSON, d); err != nil {
		return nil, err
	}
	for path, to := range map[string]*operation{inferPath("{pipeline}"): &d.infer, streamPath("{pipeline}"): &d.stream} {
		if err := json.Unmarshal(d.Paths[path], &struct{ Post *operation }{to}); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// Build returns the document as JSON. Its errors do not depend on what a caller of the
// gateway, or a stage, sends.
func Build(s Settings) ([]byte, error) {
	d, err := newDocument()
	if err != nil {
		return nil, err
	}
	if !s.Jobs {
		d.remove("Jobs")
	}
	if !s.Batches {
		d.remove("Batches")
	}
	if !s.OpenAI {
		d.remove("OpenAI")
	}
	d.left = cmp.Or(s.MaxBytes, DefaultMaxBytes)
	sorted := slices.SortedFunc(slices.Values(s.Pipelines), func(a, b Pipeline) int { return cmp.Compare(a.Name, b.Name) })
	for i, p := range sorted {
		fits, err := d.add(p)
		if err != nil {
			return nil, fmt.Errorf("pipeline %s: %w", p.Name, err)
		}
		if !fits {
			d.omitted = len(sorted) - i
			break
		}
	}
	return json.Marshal(d.assemble(s))
}

// remove removes a tag and the paths that have it.
func (d *document) remove(name string) {
	isOf := func(text json.RawMessage) bool { return bytes.Contains(text, []byte(`"`+name+`"`)) }
	d.Tags = slices.DeleteFunc(d.Tags, isOf)
	maps.DeleteFunc(d.Paths, func(_ string, text json.RawMessage) bool { return isOf(text) })
}

// add describes a pipeline, and reports false where that exceeds the bytes left.
func (d *document) add(p Pipeline) (fits bool, err error) {
	paths, schemas, err := describe(d, p)
	if err != nil {
		return false, err
	}
	size := 0
	// Another pipeline of the same stage may have a schema already.
	maps.DeleteFunc(schemas, func(key string, _ json.RawMessage) bool { return d.Schemas[key] != nil })
	for _, members := range []map[string]json.RawMessage{paths, schemas} {
		for key, text := range members {
			size += len(key) + len(text)
		}
	}
	if size > d.left {
		return false, nil
	}
	d.left -= size
	maps.Copy(d.Paths, paths)
	maps.Copy(d.Schemas, schemas)
	d.pipelineTags = append(d.pipelineTags, object{"name": string(p.Name), "description": route(p)})
	return true, nil
}

// assemble returns the whole document.
func (d *document) assemble(s Settings) object {
	tags := d.pipelineTags
	for _, tag := range d.Tags {
		tags = append(tags, tag)
	}
	components := object{
		"schemas": d.Schemas, "parameters": d.Parameters, "headers": d.Headers,
		"responses": faultResponses(s.Tokens),
	}
	out := object{
		"openapi": "3.1.0",
		"info": object{
			"title": "mesh " + s.Mesh, "version": cmp.Or(s.Version, "unknown"),
			"summary":     "Inference through the pipelines of a mesh",
			"description": d.description(s),
		},
		// Relative to the document.
		"servers":    []any{object{"url": "/", "description": "this gateway"}},
		"paths":      d.Paths,
		"components": components,
		"tags":       tags,
	}
	if s.Tokens {
		const scheme = "token"
		components["securitySchemes"] = object{scheme: object{
			"type": "http", "scheme": "bearer",
			"description": "One of the tokens in the gateway's `gateway.token_file`.",
		}}
		out["security"] = []any{object{scheme: []any{}}}
	}
	return out
}

// description is the document's description, in Markdown.
func (d *document) description(s Settings) string {
	var b strings.Builder
	b.WriteString("Each pipeline of this mesh has a path of its own, as of now.")
	if !s.NoStages {
		b.WriteString(" A pipeline of one stage alone, `stage:<name>`, is asked by the path of any pipeline.")
	}
	if s.Port.MaxPayload > 0 {
		fmt.Fprintf(&b, " The inputs of a request have at most %s, and its body %s.", bytesOf(s.Port.MaxPayload), bytesOf(s.Port.MaxMessageBytes))
	}
	b.WriteString(" Bodies are sent uncompressed. MessagePack is also `application/x-msgpack` and `application/vnd.msgpack`.")
	if s.Tokens {
		b.WriteString(" Every call but a probe needs a token.")
	}
	if d.omitted > 0 {
		fmt.Fprintf(&b, "\n\n%d pipelines more are served than are described here, the last by their names: ask them by the path of any pipeline.", d.omitted)
	}
	return b.String()
}

// bytesOf formats a size for people.
func bytesOf(n int) string {
	const mebi, kibi = 1 << 20, 1 << 10
	switch {
	case n >= mebi && n%mebi == 0:
		return fmt.Sprintf("%d MiB", n/mebi)
	case n >= kibi && n%kibi == 0:
		return fmt.Sprintf("%d KiB", n/kibi)
	}
	return fmt.Sprintf("%d bytes", n)
}

// component returns a reference to a component of a kind.
func component(kind, key string) object { return object{"$ref": "#/components/" + kind + "/" + key} }

func schemaRef(key string) object { return component("schemas", key) }

// faultResponses returns a response for each status of a fault on the public port. Without
// tokens it notes that the gateway does not ask for any.
func faultResponses(tokens bool) object {
	byStatus := map[int][]fault.Reason{}
	for _, reason := range fault.Reasons() {
		if class := fault.Classify(reason); !class.AdminOnly {
			byStatus[class.HTTP] = append(byStatus[class.HTTP], reason)
		}
	}
	out := object{}
	for status, reasons := range byStatus {
		out["Fault"+strconv.Itoa(status)] = faultResponse(status, reasons, tokens)
	}
	return out
}

func faultResponse(status int, reasons []fault.Reason, tokens bool) object {
	var about strings.Builder
	headers := object{transport.HeaderRequestID: component("headers", "RequestID"), transport.HeaderServerTiming: component("headers", "ServerTiming")}
	for i, reason := range reasons {
		class := fault.Classify(reason)
		if i > 0 {
			about.WriteString("\n")
		}
		fmt.Fprintf(&about, "- `%s`: %s", reason, class.Meaning)
		if class.Retryable {
			about.WriteString("; may succeed later")
			headers["Retry-After"] = component("headers", "RetryAfter")
		}
	}
	if status == http.StatusUnauthorized && !tokens {
		about.WriteString(", which this gateway asks nobody for")
	}
	first := fault.Classify(reasons[0])
	return object{
		"description": about.String(), "headers": headers,
		"content": object{jsonType: object{
			"schema": schemaRef("Fault"),
			"example": object{"error": object{
				"code": first.Code.String(), "reason": reasons[0], "message": first.Meaning, "request_id": exampleID,
			}},
		}},
	}
}
