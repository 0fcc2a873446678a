// Package openapi describes what a gateway serves on plain HTTP, as a document of
// OpenAPI 3.1: every pipeline by name, with what its first stage takes and its last
// one gives, and everything else below /v1, /v2 and at the probes.
//
//	text, err := openapi.Build(openapi.Settings{Mesh: "digits", Pipelines: pipelines})
//
// Build is a pure function: the same settings make the same bytes. What is not known
// of a stage is described as anything, and never as nothing. The document is held
// against the gateway's own answers by the tests of services/meshtest.
//
// # Schemas of stages
//
// A part's JSON Schema becomes a component of the document, and pointers within it
// are rewritten to where it is there, for few tools know that a schema may be a
// resource of its own. One that has resources of its own below its root, or refers to
// others, stands as it is, with an $id. One in another dialect than 2020-12 is
// described as anything.
//
// # Bodies that are not JSON
//
// MessagePack and server-sent events are strings with a contentMediaType, whose
// contentSchema is that of what they contain: of the document, in which binary strings
// are strings, and of the list of events, whose fields are strings and whose data has
// a schema of its own. What ends an answer in chunks is described as anything, for a
// host does not hold it against what its stage says.
//
// # Bounds
//
// The document has at most Settings.MaxBytes of pipelines, in the order of their
// names. Pipelines beyond that are counted in the document's description, and
// described together by the path of any pipeline.
package openapi
