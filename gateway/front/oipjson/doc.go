// Package oipjson reads and writes tensors in the JSON of the Open Inference
// Protocol: {"inputs": [{"name", "datatype", "shape", "data"}]} in,
// {"outputs": [...]} out.
//
//	request, err := oipjson.Decode(text, memory)
//	parts, err := request.Parts()
//	...
//	answer, err := oipjson.AppendTensor(nil, part)
//
// DecodeFields and AppendValue are for the generate extension, whose members are
// inputs and outputs by their names.
//
// # What JSON can say
//
// data is flat, row-major, or nested exactly as the shape is. Integers are
// digits alone (no 1.0, no 1e3) and exact up to 64 bits; what does not fit the
// datatype is refused, never wrapped or rounded. BOOL is true or false. BYTES
// elements are strings, in UTF-8; half a surrogate pair becomes U+FFFD, as
// encoding/json has it. FP32 and FP64 are read to the nearest value and
// written with the fewest digits that read back to it.
//
// JSON has no FP16, no BF16, no NaN, no infinity and no bytes that are not
// text. In a request such tensors are INVALID_INPUT. In an answer FP16, BF16
// and BYTES that are not UTF-8 are NOT_SUPPORTED, and NaN or an infinity is
// RUNNER_OUTPUT_INVALID: null would be a value that the runner did not give.
// The answer is there for whoever asks by gRPC or Connect.
//
// Request.Unpack takes the data of a tensor from a list in MessagePack, without a detour
// through text, and holds it against the same rules.
//
// # Bounds
//
// The body is in memory already. A tensor may take a few times the size of its text (a
// zero and its comma are eight bytes of FP64), so there must be room for it, in a
// body.Room, before it is made. Nesting ends at MaxDepth,
// inputs at payload.MaxParts. Members that the protocol does not have are
// ignored; those it has may come once and in any order, and the optional ones
// of the request may be null.
//
// Everything is a pure function, safe for concurrent use. Errors are
// *fault.Fault and name the input and the element.
package oipjson
