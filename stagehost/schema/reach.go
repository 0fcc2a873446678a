package schema

import (
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// appliedSchemas returns the schemas that a schema applies to its own value, except
// references that are only resolved during validation.
func appliedSchemas(s *jsonschema.Schema) []*jsonschema.Schema {
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
	return slices.DeleteFunc(out, func(s *jsonschema.Schema) bool { return s == nil })
}

// schemaOf returns the schema of a keyword whose value may be something else, or nil.
func schemaOf(v any) *jsonschema.Schema {
	s, _ := v.(*jsonschema.Schema)
	return s
}

// referredSchemas returns all schemas that one refers to directly.
func referredSchemas(s *jsonschema.Schema) []*jsonschema.Schema {
	out := append(appliedSchemas(s), s.RecursiveRef, s.PropertyNames, s.UnevaluatedProperties, s.Contains,
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
	return slices.DeleteFunc(out, func(s *jsonschema.Schema) bool { return s == nil })
}

// reachableSchemas returns all schemas that validation from the root can reach. Dynamic
// references have no edge to their targets, so it finds the targets by their places.
func reachableSchemas(compiler *jsonschema.Compiler, root *jsonschema.Schema, doc any) []*jsonschema.Schema {
	seen := map[*jsonschema.Schema]bool{}
	var out []*jsonschema.Schema
	add := func(s *jsonschema.Schema) {
		if !seen[s] {
			seen[s] = true
			out = append(out, s)
		}
	}
	add(root)
	for _, place := range appendDynamicAnchors(nil, here+"#", doc) {
		if s, err := compiler.Compile(place); err == nil {
			add(s)
		}
	}
	documents := map[string]bool{here: true}
	for i := 0; i < len(out); i++ {
		for _, to := range referredSchemas(out[i]) {
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

// appendDynamicAnchors appends the places below that have a dynamic anchor.
func appendDynamicAnchors(to []string, place string, doc any) []string {
	switch doc := doc.(type) {
	case []any:
		for i, one := range doc {
			to = appendDynamicAnchors(to, fmt.Sprintf("%s/%d", place, i), one)
		}
	case map[string]any:
		if _, ok := doc["$dynamicAnchor"].(string); ok {
			to = append(to, place)
		}
		for name, one := range doc {
			to = appendDynamicAnchors(to, place+"/"+url.PathEscape(escapeToken.Replace(name)), one)
		}
	}
	return to
}

var (
	escapeToken   = strings.NewReplacer("~", "~0", "/", "~1")
	unescapeToken = strings.NewReplacer("~1", "/", "~0", "~")
)

// placeOf returns a schema's place in its document.
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

// longestChain returns the length of the longest chain of schemas that apply to one value.
// A schema that refers to itself without a step into the document is an error: no
// document could ever be valid.
func longestChain(doc any, all []*jsonschema.Schema) (int, error) {
	// The length of the chain from each schema, and 0 while the schema is being walked.
	lengths := map[*jsonschema.Schema]int{}
	var walk func(s *jsonschema.Schema) (int, error)
	walk = func(s *jsonschema.Schema) (int, error) {
		if length, ok := lengths[s]; ok {
			if length == 0 {
				return 0, fmt.Errorf("%s leads back to itself without a step into the document, so nothing keeps to it", placeOf(doc, s.Location))
			}
			return length, nil
		}
		lengths[s] = 0
		longest := 0
		for _, to := range appliedSchemas(s) {
			length, err := walk(to)
			if err != nil {
				return 0, err
			}
			longest = max(longest, length)
		}
		lengths[s] = longest + 1
		return longest + 1, nil
	}
	out := 0
	for _, s := range all {
		length, err := walk(s)
		if err != nil {
			return 0, err
		}
		out = max(out, length)
	}
	return out, nil
}
