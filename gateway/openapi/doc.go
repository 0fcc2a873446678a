// Package openapi describes a gateway's plain HTTP interface as an OpenAPI 3.1 document:
// every pipeline by name, with the inputs of its first stage and the outputs of its last
// stage, and all other paths below /v1, /v2 and the probes. The latter are embedded
// (static.json), and the operations of a pipeline are copies of the embedded ones for any
// pipeline, with its own bodies and responses.
//
//	text, err := openapi.Build(openapi.Settings{Mesh: "digits", Pipelines: pipelines})
//
// Build is a pure function: the same settings give the same bytes. Unknown inputs and
// outputs are described as anything, never as nothing. The tests of services/meshtest
// validate the gateway's own responses against the document.
//
// # Schemas of stages
//
// A part's JSON Schema becomes a component of the document. Pointers within it are
// rewritten to their place in the document, because few tools support a schema as a
// resource of its own. A schema with anchors, with resources below its root, or with
// references to others is embedded unchanged, with an $id. A schema in another dialect than
// 2020-12 is described as anything.
//
// # Bodies that are not JSON
//
// MessagePack and server-sent events are strings with a contentMediaType, and their
// contentSchema describes the content. For MessagePack that is the document, in which
// binary strings are strings. For events it is a list of events whose fields are strings
// and whose data has a schema of its own. The final outputs of a chunked response are
// described as anything, because a host does not validate them against the stage's spec.
//
// # Bounds
//
// The document has at most Settings.MaxBytes of pipelines, in the order of their names.
// Its description counts the omitted pipelines, and the path of any pipeline describes
// them.
package openapi
