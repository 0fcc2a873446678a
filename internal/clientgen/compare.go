package clientgen

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/internal/openapi"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// Change is a difference between the specs of a client and a mesh.
type Change struct {
	// Breaks is true if calls that worked may fail, or answers may have other types.
	Breaks bool
	// Text is a sentence, with the place before it.
	Text string
}

// Compare returns how the pipelines of a client differ from those of the mesh now. Pipelines that
// the client does not have are no difference. Descriptions may change.
func Compare(client []openapi.Spec, now Mesh) (out []Change) {
	for _, old := range client {
		place := "pipeline " + old.Pipeline
		spec, ok := now.find(old.Pipeline)
		if !ok {
			out = append(out, Change{true, fmt.Sprintf("%s: is no longer there; there is %s", place, now.names())})
			continue
		}
		if old.Stream != spec.Stream {
			out = append(out, Change{old.Stream, place + map[bool]string{true: ": no longer streams its answer", false: ": streams its answer now"}[old.Stream]})
		}
		out = append(out, compareParts(place, "input", old.Inputs, spec.Inputs)...)
		out = append(out, compareParts(place, "output", old.Outputs, spec.Outputs)...)
	}
	return out
}

// compareParts compares inputs or outputs. Without any they are not known. The mesh has to take each
// input that it took, and to give only outputs that the client expects.
func compareParts(place, kind string, old, now []openapi.Part) (out []Change) {
	if len(old) == 0 && len(now) > 0 {
		return []Change{{false, fmt.Sprintf("%s: its %ss are declared now; make the client again for their types", place, kind)}}
	}
	if len(old) > 0 && len(now) == 0 {
		return []Change{{true, fmt.Sprintf("%s: its %ss are not declared now, so they cannot be compared; does each stage have a host?", place, kind)}}
	}
	add := func(breaks bool, name, format string, arguments ...any) {
		out = append(out, Change{breaks, fmt.Sprintf("%s, %s %q: ", place, kind, name) + fmt.Sprintf(format, arguments...)})
	}
	find := func(parts []openapi.Part, name string) int {
		return slices.IndexFunc(parts, func(p openapi.Part) bool { return p.Name == name })
	}
	for _, was := range old {
		at := find(now, was.Name)
		if at < 0 {
			add(true, was.Name, "is no longer there")
			continue
		}
		is := now[at]
		breaks := !within(was, is)
		if kind == "output" {
			breaks = !within(is, was)
		}
		if describe(was) != describe(is) {
			add(breaks, was.Name, "is %s now, and was %s", describe(is), describe(was))
		} else if !sameSchema(was, is) {
			add(breaks, was.Name, "has another JSON Schema")
		}
	}
	for _, is := range now {
		if find(old, is.Name) < 0 {
			add(kind == "input" && !is.Optional, is.Name, "is new: %s", describe(is))
		}
	}
	return out
}

// within reports whether all that a may be is something that b may be. Of JSON Schemas it knows only
// whether they are the same.
func within(a, b openapi.Part) bool {
	switch {
	case a.Optional && !b.Optional, a.Datatype != b.Datatype, a.Any != b.Any, a.Rows && !b.Rows:
		return false
	case !slices.EqualFunc(a.Shape, b.Shape, func(x, y int64) bool { return y < 0 || x == y }):
		return false
	case len(b.Schema) > 0 && !sameSchema(a, b):
		return false
	case len(b.ContentTypes) == 0:
		return true
	}
	return len(a.ContentTypes) > 0 && !slices.ContainsFunc(a.ContentTypes, func(one string) bool {
		return !slices.ContainsFunc(b.ContentTypes, func(pattern string) bool { return payload.AcceptsType(pattern, one) })
	})
}

// sameSchema compares JSON Schemas as JSON, without texts for people at their top.
func sameSchema(a, b openapi.Part) bool {
	return canonical(a.Schema) == canonical(b.Schema)
}

func canonical(schema string) string {
	var out any
	from := json.NewDecoder(strings.NewReader(schema))
	from.UseNumber()
	if from.Decode(&out) != nil {
		return schema
	}
	if members, ok := out.(map[string]any); ok {
		for _, annotation := range []string{"title", "description", "examples", "$comment"} {
			delete(members, annotation)
		}
	}
	text, _ := json.Marshal(out) // it came from JSON
	return string(text)
}
