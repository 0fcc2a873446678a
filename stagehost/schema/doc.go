// Package schema validates a request's parts against the inputs and outputs of a
// stage. It picks the parts that feed each input, checks type and shape, lifts a
// single row to a batch of one, and returns outputs in the rank that the caller sent.
// It validates JSON against the JSON Schema of its part, if the part has one.
//
//	spec, err := schema.Complete(runner.Spec(), inputs, outputs) // adds the operator's parts
//	contract, err := schema.Compile(spec)
//	fitted, err := contract.Fit(parts, kept, rename)
//	...
//	parts, err = contract.Outputs(outputs, fitted)
//
// # JSON Schemas
//
// A schema uses draft 2020-12, or the older draft that its "$schema" names, and is
// compiled once. It may not refer to another document: nothing is loaded. "format" is
// an annotation that is not checked, patterns are Go's RE2, and numbers are compared
// exactly. A document has at most 100,000 values, nested 64 deep, and numbers of at
// most 400 digits.
//
// The cost of validating a document depends on its schema too: alternatives that reach
// themselves double it at each level. The package counts the work as it is done, in
// steps: one for each visit of a schema to a value, and more for expensive keywords. It
// rejects a document that takes more than 250,000 steps, within a few tens of
// milliseconds. A schema that refers to itself without a step into the document does
// not compile.
//
// MessagePack is validated as the JSON that it represents. If an input accepts JSON and
// not MessagePack, MessagePack is converted to JSON. Values that JSON cannot represent
// are rejected.
//
// # Failures
//
// An error about an input is a *fault.Fault that names it. It is SCHEMA_VIOLATION if
// JSON violates its schema, with at most five places, each by its path, such as
// inputs.order.items[3].price. Otherwise it is INVALID_INPUT. An error about an output
// is RUNNER_OUTPUT_INVALID. Every error is about one item; other items of its batch have
// no effect on it.
//
// # Chunked responses
//
// The spec of a stage that streams describes its chunks. Each part of a chunk is
// validated against the output of its name, except the number of its rows. A chunk may
// omit outputs. The final outputs of a chunked response may combine all chunks, so only
// the kind and the datatype of their parts are checked.
//
// Everything is a pure function, and a Contract is safe for concurrent use. Documents
// that are validated against the same schema at the same time take turns.
package schema
