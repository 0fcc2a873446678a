package schema

import (
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
)

// applied are the schemas that a schema holds against the very value that it is held
// against itself, but for references that only a walk resolves.
func applied(s *jsonschema.Schema) []*jsonschema.Schema {
	out := slices.Concat(s.AllOf, s.AnyOf, s.OneOf)
	out = append(out, s.Ref, s.Not, s.If, s.Then, s.Else)
	if to := s.RecursiveRef; to != nil && !to.RecursiveAnchor {
		out = append(out, to)
	}
	if to := s.DynamicRef; to != nil && (to.Anchor == "" || to.Ref.DynamicAnchor != to.Anchor) {
		out = append(out, to.Ref)
	}
	for _, to := range s.DependentSchemas {
		out = append(out, to)
	}
	for _, to := range s.Dependencies {
		out = append(out, schemaOf(to))
	}
	return slices.DeleteFunc(out, isNone)
}

func isNone(s *jsonschema.Schema) bool { return s == nil }

// schemaOf is for keywords that may have something else than a schema.
func schemaOf(v any) *jsonschema.Schema {
	s, _ := v.(*jsonschema.Schema)
	return s
}

// reached are all schemas that one leads to in one step.
func reached(s *jsonschema.Schema) []*jsonschema.Schema {
	out := append(applied(s), s.RecursiveRef, s.PropertyNames, s.UnevaluatedProperties, s.Contains,
		s.Items2020, s.UnevaluatedItems, s.ContentSchema, schemaOf(s.AdditionalProperties), schemaOf(s.Items), schemaOf(s.AdditionalItems))
	if s.DynamicRef != nil {
		out = append(out, s.DynamicRef.Ref)
	}
	if list, ok := s.Items.([]*jsonschema.Schema); ok {
		out = append(out, list...)
	}
	out = append(out, s.PrefixItems...)
	for _, to := range s.Properties {
		out = append(out, to)
	}
	for _, to := range s.PatternProperties {
		out = append(out, to)
	}
	return slices.DeleteFunc(out, isNone)
}

// everything returns all schemas that a walk from the root can come to. Those that a
// dynamic reference may find have no edge to them, and are sought by their places.
func everything(compiler *jsonschema.Compiler, root *jsonschema.Schema, doc any) []*jsonschema.Schema {
	seen := map[*jsonschema.Schema]bool{}
	var out []*jsonschema.Schema
	add := func(s *jsonschema.Schema) {
		if !seen[s] {
			seen[s] = true
			out = append(out, s)
		}
	}
	add(root)
	for _, place := range anchored(nil, here+"#", doc) {
		if s, err := compiler.Compile(place); err == nil {
			add(s)
		}
	}
	documents := map[string]bool{here: true}
	for i := 0; i < len(out); i++ {
		for _, to := range reached(out[i]) {
			add(to)
		}
		document, _, _ := strings.Cut(out[i].Location, "#")
		if documents[document] {
			continue
		}
		documents[document] = true // one of the metaschemas, which the library has
		if s, err := compiler.Compile(document); err == nil {
			add(s)
		}
	}
	return out
}

// anchored appends the places below at which there is a dynamic anchor.
func anchored(to []string, place string, doc any) []string {
	switch doc := doc.(type) {
	case []any:
		for i, one := range doc {
			to = anchored(to, fmt.Sprintf("%s/%d", place, i), one)
		}
	case map[string]any:
		if _, ok := doc["$dynamicAnchor"].(string); ok {
			to = append(to, place)
		}
		for name, one := range doc {
			to = anchored(to, place+"/"+url.PathEscape(escapeToken.Replace(name)), one)
		}
	}
	return to
}

var (
	escapeToken   = strings.NewReplacer("~", "~0", "/", "~1")
	unescapeToken = strings.NewReplacer("~1", "/", "~0", "~")
)

// placeOf is a schema's place in the document that it is in.
func placeOf(doc any, location string) string {
	_, fragment, _ := strings.Cut(location, "#")
	pointer, err := url.PathUnescape(fragment)
	if err != nil || pointer == "" {
		return "schema"
	}
	tokens := strings.Split(pointer, "/")[1:]
	for i, token := range tokens {
		tokens[i] = unescapeToken.Replace(token)
	}
	return pathOf("schema", doc, tokens)
}

// descent finds circles among schemas that are held against one value.
type descent struct {
	// below is how many schemas lie one below the other from one on; zero while it is
	// being walked.
	below map[*jsonschema.Schema]int
}

// walk returns how deep schemas go from one on, or the schema that leads to itself.
func (d *descent) walk(s *jsonschema.Schema) (depth int, circle *jsonschema.Schema) {
	if depth, ok := d.below[s]; ok {
		if depth == 0 {
			return 0, s
		}
		return depth, nil
	}
	d.below[s] = 0
	for _, to := range applied(s) {
		below, circle := d.walk(to)
		if circle != nil {
			return 0, circle
		}
		depth = max(depth, below)
	}
	d.below[s] = depth + 1
	return depth + 1, nil
}

// deepest returns how many schemas at most are held against one value, each by the
// one before it. That a schema leads to itself without a step into the document is an
// error: nothing could ever keep to it.
func deepest(doc any, all []*jsonschema.Schema) (int, error) {
	d, out := descent{below: map[*jsonschema.Schema]int{}}, 0
	for _, s := range all {
		depth, circle := d.walk(s)
		if circle != nil {
			return 0, fmt.Errorf("%s leads back to itself without a step into the document, so nothing keeps to it", placeOf(doc, circle.Location))
		}
		out = max(out, depth)
	}
	return out, nil
}

// turnsInCircles is true where the library came back to a schema: dynamic references
// may lead there, which only a walk resolves.
func turnsInCircles(e *jsonschema.ValidationError) bool {
	if _, ok := e.ErrorKind.(*kind.RefCycle); ok {
		return true
	}
	return slices.ContainsFunc(e.Causes, turnsInCircles)
}
