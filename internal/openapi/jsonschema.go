package openapi

import (
	"encoding/json"
	"slices"
	"strings"
)

// embed returns a stage's JSON Schema as the document's component of that key. Its
// references to places in itself become references to places in the document. A schema with
// other references, or with resources of its own, is embedded as it is, with an $id. embed
// returns false if the text is not a schema of draft 2020-12.
func embed(text, key string) (any, bool) {
	decode := func() (out any, err error) {
		decoder := json.NewDecoder(strings.NewReader(text))
		decoder.UseNumber()
		return out, decoder.Decode(&out)
	}
	root, err := decode()
	if err != nil || !json.Valid([]byte(text)) {
		return nil, false
	}
	schema, ok := root.(object)
	if !ok {
		_, ok = root.(bool)
		return root, ok
	}
	if declared, ok := schema["$schema"]; ok {
		if uri, _ := declared.(string); strings.TrimSuffix(uri, "#") != "https://json-schema.org/draft/2020-12/schema" {
			return nil, false
		}
	}
	id, _ := schema["$id"].(string)
	for _, name := range []string{"$id", "$schema", "$vocabulary"} {
		delete(schema, name)
	}
	if r := (relocation{id: strings.TrimSuffix(id, "#"), base: schemaRef(key)["$ref"].(string)}); r.move(schema) {
		return schema, true
	}
	original, _ := decode()
	if id == "" {
		original.(object)["$id"] = "urn:stagemesh:schema:" + key
	}
	return original, true
}

// Keywords whose value is a schema or a list of schemas, and keywords whose value has schemas
// by name. References elsewhere, such as in a const, are values.
var (
	keywordsOfSchemas = []string{
		"additionalProperties", "contains", "contentSchema", "else", "if", "items", "not", "propertyNames", "then",
		"unevaluatedItems", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "prefixItems",
	}
	keywordsOfNamedSchemas = []string{"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)

// relocation moves a schema of that id to the place base of a document.
type relocation struct{ id, base string }

// move moves the references of a schema or a list of schemas. It returns false if one of them
// is not a pointer within the schema.
func (r relocation) move(value any) bool {
	switch value := value.(type) {
	case []any:
		return !slices.ContainsFunc(value, func(one any) bool { return !r.move(one) })
	case object:
		for _, name := range []string{"$id", "$anchor", "$dynamicAnchor"} {
			if _, ok := value[name]; ok {
				return false
			}
		}
		if ref, ok := value["$ref"].(string); ok {
			pointer := strings.TrimPrefix(ref, r.id)
			if pointer != "" && pointer != "#" && !strings.HasPrefix(pointer, "#/") {
				return false
			}
			value["$ref"] = r.base + strings.TrimPrefix(pointer, "#")
		}
		for _, keyword := range keywordsOfSchemas {
			if !r.move(value[keyword]) {
				return false
			}
		}
		for _, keyword := range keywordsOfNamedSchemas {
			named, _ := value[keyword].(object)
			for _, one := range named {
				if !r.move(one) {
					return false
				}
			}
		}
	}
	return true
}
