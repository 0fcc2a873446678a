// Package clientgen writes clients of a mesh in other languages, with a function for each pipeline
// that is typed by its spec, and compares the specs that a client was made from with a mesh.
//
//	mesh, err := clientgen.Read(document) // a gateway's /openapi.json
//	mesh, err = mesh.Select("digits")
//	text, err := clientgen.Python(mesh, true)
//	...
//	specs, err := clientgen.Specs(text)
//	changes := clientgen.Compare(specs, mesh)
//
// Everything is a pure function: the same mesh gives the same bytes. Names and descriptions come from
// stages, so they reach the code only as identifiers, as escaped literals, and as printable text in
// comments.
package clientgen

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/internal/openapi"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Mesh is what callers see of a mesh. The pipelines are sorted by their names.
type Mesh struct {
	// Title is the document's: "mesh digits".
	Title     string
	Pipelines []openapi.Spec
}

// Read returns the mesh that a gateway's OpenAPI document describes.
func Read(document []byte) (Mesh, error) {
	var doc struct {
		Info  struct{ Title string }
		Paths map[string]struct {
			Post struct {
				Spec *openapi.Spec `json:"x-stagemesh"`
			}
		}
	}
	if err := json.Unmarshal(document, &doc); err != nil {
		return Mesh{}, fmt.Errorf("%s: %w", openapi.DocumentPath, err)
	}
	out := Mesh{Title: doc.Info.Title}
	for _, path := range doc.Paths {
		if path.Post.Spec == nil {
			continue
		}
		if err := pipeline.ValidPipelineName(path.Post.Spec.Pipeline); err != nil {
			return Mesh{}, fmt.Errorf("%s: %w", openapi.DocumentPath, err)
		}
		out.Pipelines = append(out.Pipelines, *path.Post.Spec)
	}
	if len(out.Pipelines) == 0 {
		return Mesh{}, errors.New("the gateway describes no pipeline: it has none, or it is older than this program")
	}
	slices.SortFunc(out.Pipelines, func(a, b openapi.Spec) int { return cmp.Compare(a.Pipeline, b.Pipeline) })
	return out, nil
}

// Select returns the mesh with the named pipelines only; with all of them if none is named.
func (m Mesh) Select(names ...string) (Mesh, error) {
	if len(names) == 0 {
		return m, nil
	}
	out := Mesh{Title: m.Title}
	for _, name := range slices.Compact(slices.Sorted(slices.Values(names))) {
		spec, ok := m.find(name)
		if !ok {
			return Mesh{}, fmt.Errorf("there is no pipeline %q; there is %s", name, m.names())
		}
		out.Pipelines = append(out.Pipelines, spec)
	}
	return out, nil
}

func (m Mesh) find(name string) (openapi.Spec, bool) {
	at := slices.IndexFunc(m.Pipelines, func(s openapi.Spec) bool { return s.Pipeline == name })
	if at < 0 {
		return openapi.Spec{}, false
	}
	return m.Pipelines[at], true
}

func (m Mesh) names() string {
	var out []string
	for _, spec := range m.Pipelines {
		out = append(out, spec.Pipeline)
	}
	return strings.Join(out, ", ")
}

// Specs returns the specs from which a client was made. It has each as a comment.
func Specs(client []byte) ([]openapi.Spec, error) {
	var out []openapi.Spec
	for number, line := range strings.Split(string(client), "\n") {
		sign, text, ok := strings.Cut(line, " stagemesh-spec: ")
		if !ok || sign != "#" && sign != "//" {
			continue
		}
		var spec openapi.Spec
		if err := json.Unmarshal([]byte(text), &spec); err != nil {
			return nil, fmt.Errorf("line %d: %w", number+1, err)
		}
		out = append(out, spec)
	}
	if len(out) == 0 {
		return nil, errors.New(`no line has the spec of a pipeline; only files that "stagemesh client" made can be checked`)
	}
	return out, nil
}
