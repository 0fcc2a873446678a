// Package oipjson reads and writes tensors in the JSON of the Open Inference Protocol:
// {"inputs": [{"name", "datatype", "shape", "data"}]} in, {"outputs": [...]} out.
//
//	request, err := oipjson.Decode(text, memory)
//	parts, err := request.Parts()
//	...
//	text, err := oipjson.AppendTensor(nil, part)
//
// DecodeFields and AppendValue are for the generate extension, whose members are inputs and
// outputs by name. Request.Unpack decodes the data of a tensor from a list in MessagePack by the
// same rules, without a detour through text.
//
// # Values
//
// data is flat and row-major, or nested exactly as the shape. Integers are digits alone (no 1.0,
// no 1e3) and exact up to 64 bits; values beyond the datatype are rejected, never wrapped or
// rounded. BOOL is true or false. BYTES elements are strings in UTF-8; half a surrogate pair
// becomes U+FFFD, as in encoding/json. FP32 and FP64 are read to the nearest value and written
// with the fewest digits that read back to it.
//
// JSON has no FP16, BF16, NaN, infinity, or bytes that are not text. In a request such tensors
// are INVALID_INPUT. In a response FP16, BF16 and BYTES that are not UTF-8 are NOT_SUPPORTED, and
// NaN or an infinity is RUNNER_OUTPUT_INVALID: null would be a value that the runner did not
// return. Callers get the response over gRPC or Connect.
//
// # Bounds
//
// The body is in memory already. A tensor may take a few times the size of its text (a zero and
// its comma are eight bytes of FP64), so its bytes are reserved in a transport.Reservation before
// they are allocated. Nesting ends at MaxDepth, inputs at payload.MaxParts. Members that the
// protocol does not have are ignored. Members that it has may come once and in any order, and the
// optional ones of the request may be null.
//
// The scanner is our own because encoding/json would build an interface for each of a million
// numbers, accept duplicate members, and match their names in any case. The jsontext package of
// github.com/go-json-experiment/json is strict and reads tokens as fast, but it would scan the
// data twice, because an input's name and shape may come after it, and its API is not stable
// yet. Strings with escapes are left to encoding/json.
//
// Everything is a pure function, safe for concurrent use. Errors are *fault.Fault and name the
// input and the element.
package oipjson
