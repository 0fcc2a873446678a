package openapi

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Settings are what a document is made of.
type Settings struct {
	// Mesh and Version, that of the gateway, are the document's title and version.
	Mesh, Version string
	// Pipelines are those that are served, in any order.
	Pipelines []Pipeline
	// MaxPayload bounds the inputs of a request and MaxBody its body, in bytes; 0 says
	// nothing of them.
	MaxPayload, MaxBody int
	// Tokens says that callers need one.
	Tokens bool
	// MaxBytes bounds what is said of pipelines; 0 means DefaultMaxBytes.
	MaxBytes int
}

// DefaultMaxBytes is room for some thousand pipelines.
const DefaultMaxBytes = 16 << 20

// Pipeline is one pipeline to describe.
type Pipeline struct {
	pipeline.Pipeline
	// Timeout is the longest that a request may take, the gateway's where the pipeline
	// has none.
	Timeout time.Duration
	// First is what its first stage takes, and Last what its last one gives; nil where
	// that is not known.
	First, Last *stagev1.Spec
}

// object is a JSON object; its members are written sorted.
type object = map[string]any

// version of OpenAPI that documents are of.
const version = "3.1.0"

// Build returns the document as JSON. Its errors are about nothing that a caller of
// the gateway, or a stage, can say.
func Build(s Settings) ([]byte, error) {
	d := &document{
		paths:   fixedPaths(),
		schemas: fixedSchemas(),
		room:    cmp.Or(s.MaxBytes, DefaultMaxBytes),
	}
	sorted := slices.SortedFunc(slices.Values(s.Pipelines), func(a, b Pipeline) int { return cmp.Compare(a.Name, b.Name) })
	for i, p := range sorted {
		fits, err := d.add(p)
		if err != nil {
			return nil, fmt.Errorf("pipeline %s: %w", p.Name, err)
		}
		if !fits {
			d.left = len(sorted) - i
			break
		}
	}
	return json.Marshal(d.whole(s))
}

// document is one that is being made.
type document struct {
	paths, schemas object
	tags           []any
	// room is how many bytes there still are for pipelines, and left how many of those
	// had none.
	room, left int
}

// add describes a pipeline, unless there is no room for it.
func (d *document) add(p Pipeline) (fits bool, err error) {
	made := describe(p)
	size := 0
	for _, members := range []object{made.paths, made.schemas} {
		for key, value := range members {
			if d.schemas[key] != nil {
				// Another pipeline of the same stage has it.
				continue
			}
			text, err := json.Marshal(value)
			if err != nil {
				return false, err
			}
			members[key] = json.RawMessage(text)
			size += len(key) + len(text)
		}
	}
	if size > d.room {
		return false, nil
	}
	d.room -= size
	for key, value := range made.paths {
		d.paths[key] = value
	}
	for key, value := range made.schemas {
		if d.schemas[key] == nil {
			d.schemas[key] = value
		}
	}
	d.tags = append(d.tags, made.tag)
	return true, nil
}

// whole puts the document together.
func (d *document) whole(s Settings) object {
	components := object{
		"schemas": d.schemas, "parameters": sharedParameters(), "headers": sharedHeaders(),
		"responses": sharedResponses(s.Tokens),
	}
	out := object{
		"openapi": version,
		"info": object{
			"title": "mesh " + s.Mesh, "version": cmp.Or(s.Version, "unknown"),
			"summary":     "Inference through the pipelines of a mesh",
			"description": d.about(s),
		},
		// Of where the document is.
		"servers":    []any{object{"url": "/", "description": "this gateway"}},
		"paths":      d.paths,
		"components": components,
		"tags":       append(d.tags, fixedTags()...),
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

// about is the document's description, in Markdown.
func (d *document) about(s Settings) string {
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
	if d.left > 0 {
		fmt.Fprintf(&b, "\n\n%d pipelines more are served than are described here, the last by their names: ask them by the path of any pipeline.", d.left)
	}
	return b.String()
}

// bytesOf is a size as people write it.
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
