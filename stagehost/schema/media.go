package schema

import (
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// jsonType is what MessagePack becomes.
const jsonType = "application/json"

// accepts reports whether a content type, perhaps with parameters, is one that
// the pattern means, in any case: "image/png", "image/*" or "*/*". A type that ends
// in +json is JSON too, whatever else it is.
func accepts(pattern, contentType string) bool {
	got, pattern := bare(contentType), bare(pattern)
	if family, ok := strings.CutSuffix(pattern, "*"); ok {
		return family == "*/" || strings.HasPrefix(got, family)
	}
	return got == pattern || pattern == jsonType && strings.HasSuffix(got, "+json")
}

// bare is a media type without its parameters.
func bare(contentType string) string {
	out, _, _ := strings.Cut(contentType, ";")
	return strings.ToLower(strings.TrimSpace(out))
}

// takesType reports whether one of a blob's content types means this one.
func takesType(want runner.PartSpec, contentType string) bool {
	return slices.ContainsFunc(want.ContentTypes, func(pattern string) bool { return accepts(pattern, contentType) })
}

// takesMessagePack reports whether a blob may be MessagePack, under any of its names.
func takesMessagePack(want runner.PartSpec) bool {
	return takesType(want, msgpack.Type) || slices.ContainsFunc(want.ContentTypes, msgpack.Is)
}

// becomesJSON reports whether a blob of that type is to become JSON: it is
// MessagePack, and the part may be JSON and not MessagePack.
func becomesJSON(want runner.PartSpec, contentType string) bool {
	if !msgpack.Is(contentType) {
		return false
	}
	if len(want.ContentTypes) == 0 {
		return len(want.Schema) > 0
	}
	return takesType(want, jsonType) && !takesMessagePack(want)
}

// asTaken turns MessagePack into the JSON that the runner takes, in place.
func asTaken(want runner.PartSpec, part *payload.Part) error {
	if !becomesJSON(want, part.Blob.ContentType) {
		return nil
	}
	text, err := msgpack.ToJSON(part.Blob.Data, maxConverted)
	if err != nil {
		return err
	}
	part.Blob = payload.Blob{ContentType: jsonType, Data: text}
	return nil
}
