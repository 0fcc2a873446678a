// Package schema holds a request's parts against what a stage takes and gives: it
// picks the parts that feed each input, checks type and shape, lifts a single row
// to a batch of one, and gives outputs back in the rank that the caller sent. JSON
// is held against the JSON Schema of its part, where that has one.
//
//	spec, err := schema.Complete(runner.Spec(), inputs, outputs) // what an operator adds
//	contract, err := schema.Compile(spec)
//	fitted, err := contract.Fit(parts, kept, rename)
//	...
//	parts, err = contract.Outputs(outputs, fitted)
//
// # JSON Schemas
//
// They are of the draft 2020-12, or of the older one that their "$schema" names, and
// are compiled once. None refers to another document: nothing is loaded from
// anywhere. "format" is a note and checked by nothing, patterns are Go's RE2, and
// numbers are compared exactly. A document that is held against one has at most
// 100,000 values, nested 64 deep, and numbers of at most 400 digits.
//
// How much work a document is depends on its schema too: alternatives that reach
// themselves double it at each level. It is counted as it is done, a step for each
// look of a schema at a value and more for what is dearer, and a document that takes
// more than 250,000 steps is refused, within a few tens of milliseconds. A schema
// that leads back to itself without a step into the document does not compile.
//
// MessagePack is held against a schema as the JSON that it stands for. An input that
// may be JSON, and may not be MessagePack, is turned from the one into the other;
// what JSON cannot say is refused.
//
// # Failures
//
// An error about an input is a *fault.Fault that names it: SCHEMA_VIOLATION where
// JSON breaks its schema, with at most five places, each by its path, such as
// inputs.order.items[3].price; INVALID_INPUT otherwise. One about an output is
// RUNNER_OUTPUT_INVALID. All of it is about one item, and its neighbours do not
// matter.
//
// # Answers in chunks
//
// A stage that answers in chunks says in its spec what a chunk is: each part of one
// is held against the output of its name, but for the number of its rows, and may
// leave outputs out. What ends such an answer may be all chunks in one, so its parts
// have the kind and the datatype that the spec says, and no more is asked of them.
//
// Everything is a pure function, and a Contract is safe for concurrent use; documents
// that are held against the same schema at the same time take turns.
package schema
