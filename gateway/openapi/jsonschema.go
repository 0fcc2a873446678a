package openapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// dialect is the JSON Schema dialect of stages' schemas.
const dialect = "https://json-schema.org/draft/2020-12/schema"

// ownID begins the $id of a schema that is embedded unchanged.
const ownID = "urn:stagemesh:schema:"

// embed returns a stage's JSON Schema as the document's component of that key. It
// makes pointers relative to the document's root instead of the schema's. It returns
// false if the text is not a schema in the known dialect.
func embed(text, key string) (any, bool) {
	root, ok := decode(text)
	if !ok {
		return nil, false
	}
	schema, ok := root.(object)
	if !ok {
		_, ok = root.(bool)
		return root, ok
	}
	if declared, there := schema["$schema"]; there {
		if uri, _ := declared.(string); strings.TrimSuffix(uri, "#") != dialect {
			return nil, false
		}
	}
	e := embedding{base: schemaRef(key)["$ref"].(string), anchors: map[string]string{}}
	e.id, _ = schema["$id"].(string)
	e.id = strings.TrimSuffix(e.id, "#")
	e.walk(schema, "")
	if e.hasResources || !e.isSelfContained() {
		if e.id == "" {
			schema["$id"] = ownID + key
		}
		return schema, true
	}
	e.rewrite()
	for _, name := range []string{"$id", "$schema", "$vocabulary"} {
		delete(schema, name)
	}
	return schema, true
}

// decode reads one JSON value and keeps the text of its numbers.
func decode(text string) (out any, ok bool) {
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	if err := decoder.Decode(&out); err != nil {
		return nil, false
	}
	_, err := decoder.Token()
	return out, errors.Is(err, io.EOF)
}

// embedding is a schema that is being embedded in a document.
type embedding struct {
	// base is the pointer to the schema in the document; id is its own $id.
	base, id string
	// anchors are the pointers of named schemas within it.
	anchors map[string]string
	// refs are the schemas that refer to others.
	refs []object
	// hasResources is true if there are resources of their own within it.
	hasResources bool
}

// Keywords whose value is a schema, a list of schemas, or schemas by name.
var (
	oneSchema = []string{
		"additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
		"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
	}
	listOfSchemas  = []string{"allOf", "anyOf", "oneOf", "prefixItems"}
	schemasByName  = []string{"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
	anchorKeywords = []string{"$anchor", "$dynamicAnchor"}
	refKeywords    = []string{"$ref", "$dynamicRef"}
)

// walk visits a schema, which is at the pointer, and all schemas below it.
func (e *embedding) walk(value any, pointer string) {
	schema, ok := value.(object)
	if !ok {
		return
	}
	if _, own := schema["$id"]; own && pointer != "" {
		e.hasResources = true
	}
	for _, keyword := range anchorKeywords {
		if name, ok := schema[keyword].(string); ok {
			e.anchors[name] = pointer
		}
	}
	if slices.ContainsFunc(refKeywords, func(k string) bool { _, ok := schema[k].(string); return ok }) {
		e.refs = append(e.refs, schema)
	}
	for _, keyword := range oneSchema {
		e.walk(schema[keyword], pointer+"/"+keyword)
	}
	for _, keyword := range listOfSchemas {
		members, _ := schema[keyword].([]any)
		for i, member := range members {
			e.walk(member, pointer+"/"+keyword+"/"+strconv.Itoa(i))
		}
	}
	for _, keyword := range schemasByName {
		members, _ := schema[keyword].(object)
		for _, name := range slices.Sorted(maps.Keys(members)) {
			e.walk(members[name], pointer+"/"+keyword+"/"+escape(name))
		}
	}
}

// isSelfContained reports whether every reference is to within the schema.
func (e *embedding) isSelfContained() bool {
	for _, schema := range e.refs {
		for _, keyword := range refKeywords {
			if ref, ok := schema[keyword].(string); ok {
				if _, ok := e.target(ref); !ok {
					return false
				}
			}
		}
	}
	return true
}

// target returns the pointer in the document that replaces a reference.
func (e *embedding) target(ref string) (string, bool) {
	if e.id != "" {
		ref = strings.TrimPrefix(ref, e.id)
	}
	fragment, ok := strings.CutPrefix(ref, "#")
	switch {
	case !ok && ref != "":
		return "", false
	case fragment == "" || strings.HasPrefix(fragment, "/"):
		return e.base + fragment, true
	}
	pointer, ok := e.anchors[fragment]
	return e.base + pointer, ok
}

// rewrite points all references into the document. Within one resource a dynamic
// reference acts like any other.
func (e *embedding) rewrite() {
	for _, schema := range e.refs {
		static, both := schema["$ref"].(string)
		dynamic, isDynamic := schema["$dynamicRef"].(string)
		if both {
			schema["$ref"], _ = e.target(static)
		}
		if !isDynamic {
			continue
		}
		delete(schema, "$dynamicRef")
		to, _ := e.target(dynamic)
		if !both {
			schema["$ref"] = to
			continue
		}
		also, _ := schema["allOf"].([]any)
		schema["allOf"] = append(also[:len(also):len(also)], object{"$ref": to})
	}
}

// escape encodes a member's name for a pointer in a URL fragment.
func escape(name string) string {
	var b bytes.Buffer
	for i := range len(name) {
		switch c := name[i]; {
		case c == '~':
			b.WriteString("~0")
		case c == '/':
			b.WriteString("~1")
		case c <= ' ' || c > '~' || strings.IndexByte(`"#%<>[\]^{|}`+"`", c) >= 0:
			const digits = "0123456789ABCDEF"
			b.Write([]byte{'%', digits[c>>4], digits[c&15]})
		default:
			b.WriteByte(c)
		}
	}
	return b.String()
}
