package schema

import (
	"slices"

	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// jsonType is what MessagePack becomes.
const jsonType = payload.JSONType

// takesType reports whether one of a blob's content types means this one.
func takesType(want runner.PartSpec, contentType string) bool {
	return slices.ContainsFunc(want.ContentTypes, func(pattern string) bool { return payload.AcceptsType(pattern, contentType) })
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
