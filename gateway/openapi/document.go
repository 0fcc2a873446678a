package openapi

import (
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

	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Settings describe what Build documents.
type Settings struct {
	// Mesh and Version are the document's title and version. Version is that of the
	// gateway.
	Mesh, Version string
	// Pipelines are those that are served, in any order.
	Pipelines []Pipeline
	// MaxPayload bounds the inputs of a request and MaxBody its body, in bytes. The
	// document omits a bound of 0.
	MaxPayload, MaxBody int
	// Tokens is true if callers need a token.
	Tokens bool
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
	// First is the spec of its first stage, and Last that of its last stage; nil if it
	// is not known.
	First, Last *stagev1.Spec
}

// object is a JSON object; its members are written sorted.
type object = map[string]any

// version of OpenAPI that documents are of.
const version = "3.1.0"

//go:embed static.json
var staticJSON []byte

// static is the part of the document that no pipeline changes: the paths, the components that
// they refer to, and the tags. Its parts keep the order of their members, since viewers offer
// the first media type.
type static struct {
	Tags                                []json.RawMessage
	Paths, Schemas, Parameters, Headers map[string]json.RawMessage
}

// Build returns the document as JSON. Its errors do not depend on what a caller of the
// gateway, or a stage, sends.
func Build(s Settings) ([]byte, error) {
	d := &document{left: cmp.Or(s.MaxBytes, DefaultMaxBytes)}
	if err := json.Unmarshal(staticJSON, &d.static); err != nil {
		return nil, err
	}
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

// document is a document being built.
type document struct {
	static
	pipelineTags []any
	// left is how many bytes may still be added for pipelines, and omitted how many
	// pipelines did not fit.
	left, omitted int
}

// add describes a pipeline, and reports false where that exceeds the bytes left.
func (d *document) add(p Pipeline) (fits bool, err error) {
	made := describe(p)
	size := 0
	paths, schemas := map[string]json.RawMessage{}, map[string]json.RawMessage{}
	for _, members := range []struct {
		from object
		to   map[string]json.RawMessage
	}{{made.paths, paths}, {made.schemas, schemas}} {
		for key, value := range members.from {
			if d.Schemas[key] != nil {
				// Another pipeline of the same stage has it.
				continue
			}
			text, err := json.Marshal(value)
			if err != nil {
				return false, err
			}
			members.to[key] = text
			size += len(key) + len(text)
		}
	}
	if size > d.left {
		return false, nil
	}
	d.left -= size
	maps.Copy(d.Paths, paths)
	maps.Copy(d.Schemas, schemas)
	d.pipelineTags = append(d.pipelineTags, made.tag)
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
		"openapi": version,
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
		components["securitySchemes"] = object{tokenScheme: object{
			"type": "http", "scheme": "bearer",
			"description": "One of the tokens in the gateway's `gateway.token_file`.",
		}}
		out["security"] = []any{object{tokenScheme: []any{}}}
	}
	return out
}

// tokenScheme names the security scheme.
const tokenScheme = "token"

// description is the document's description, in Markdown.
func (d *document) description(s Settings) string {
	var b strings.Builder
	b.WriteString("Each pipeline of this mesh has a path of its own, as of now. A pipeline of one stage alone, `stage:<name>`, is asked by the path of any pipeline.")
	if s.MaxPayload > 0 {
		fmt.Fprintf(&b, " The inputs of a request have at most %s", bytesOf(s.MaxPayload))
		if s.MaxBody > 0 {
			fmt.Fprintf(&b, ", and its body %s", bytesOf(s.MaxBody))
		}
		b.WriteString(".")
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

// byStatus returns the reasons of faults on the public port, by their HTTP status.
func byStatus() map[int][]fault.Reason {
	// The public port never returns these.
	admin := []fault.Reason{fault.NotReplayable, fault.RevisionMismatch, fault.PipelineDoesNotFit}
	out := map[int][]fault.Reason{}
	for _, reason := range fault.Reasons() {
		if !slices.Contains(admin, reason) {
			status := fault.Classify(reason).HTTP
			out[status] = append(out[status], reason)
		}
	}
	return out
}

// withFaults adds the faults of an inference to its successful response.
func withFaults(success object) object {
	out := object{"200": success}
	for status := range byStatus() {
		out[strconv.Itoa(status)] = component("responses", faultKey(status))
	}
	return out
}

func faultKey(status int) string { return "Fault" + strconv.Itoa(status) }

// faultResponses returns the response of each status. Without tokens it notes that the gateway
// does not ask for any.
func faultResponses(tokens bool) object {
	out := object{}
	for status, reasons := range byStatus() {
		out[faultKey(status)] = faultResponse(status, reasons, tokens)
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
