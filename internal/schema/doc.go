// Package schema validates a request's parts against the inputs and outputs of a
// stage. It picks the parts that feed each input, checks type and shape, lifts a
// single row to a batch of one, and returns outputs in the rank that the caller sent.
// It validates JSON against the JSON Schema of its part, if the part has one;
// docs/configuration.md has the limits of schemas and documents.
//
//	spec, err := schema.Complete(runner.Spec(), inputs, outputs) // adds the operator's parts
//	contract, err := schema.Compile(spec)
//	fitted, err := contract.Fit(parts, kept, rename)
//	...
//	parts, err = contract.Outputs(outputs, fitted)
//
// The cost of validating a document depends on its schema too: alternatives that reach
// themselves double it at each level. When a schema is compiled, the package computes the
// most that a value costs at each depth, in steps: one for each visit of a schema to it, and
// more for expensive keywords. A document whose values may take more than 250,000 steps, some
// tens of milliseconds, is rejected before it is validated. A schema that refers to itself
// without a step into the document does not compile, nor does one that applies too many schemas
// to one value, or has dynamic references.
//
// An error about an input is a *fault.Fault that names it; one about an output is
// RUNNER_OUTPUT_INVALID. Every error is about one item; other items of its batch have
// no effect on it.
//
// The spec of a stage that streams describes its chunks, except the number of their rows. The
// final outputs may combine all chunks, so only the kind and the datatype of their parts are
// checked.
//
// Everything is a pure function, and a Contract is safe for concurrent use.
package schema
