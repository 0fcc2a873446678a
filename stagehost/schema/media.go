package schema

import (
	"slices"

	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// jsonType is the content type of converted MessagePack.
const jsonType = payload.JSONType

// takesType reports whether one of the part's content types matches this one.
func takesType(want runner.PartSpec, contentType string) bool {
	return slices.ContainsFunc(want.ContentTypes, func(pattern string) bool { return payload.AcceptsType(pattern, contentType) })
}

// takesMessagePack reports whether a blob may be MessagePack, under any of its names.
func takesMessagePack(want runner.PartSpec) bool {
	return takesType(want, msgpack.Type) || slices.ContainsFunc(want.ContentTypes, msgpack.Is)
}

// needsJSON reports whether to convert a blob of that type to JSON: it is
// MessagePack, and the part accepts JSON and not MessagePack.
func needsJSON(want runner.PartSpec, contentType string) bool {
	if !msgpack.Is(contentType) {
		return false
	}
	if len(want.ContentTypes) == 0 {
		return len(want.Schema) > 0
	}
	return takesType(want, jsonType) && !takesMessagePack(want)
}

// convertToJSON converts MessagePack to the JSON that the runner accepts, in place.
func convertToJSON(want runner.PartSpec, part *payload.Part) error {
	if !needsJSON(want, part.Blob.ContentType) {
		return nil
	}
	text, err := msgpack.ToJSON(part.Blob.Data, maxConverted)
	if err != nil {
		return err
	}
	part.Blob = payload.Blob{ContentType: jsonType, Data: text}
	return nil
}
