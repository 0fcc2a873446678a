// Package msgpack converts MessagePack into JSON and JSON into MessagePack, for bodies and blobs
// that arrive in the one and are needed in the other.
//
//	text, err := msgpack.ToJSON(data, 16<<20)
//	data, err = msgpack.AppendJSON(nil, text)
//
// Members, Elements and Binary read a document without converting it, and the Append functions
// write one.
//
// # Unsupported values
//
// JSON has no binary strings, extensions and timestamps, maps with keys that are not strings,
// NaN, infinities, and strings that are not UTF-8. ToJSON rejects them with an *Error that names
// their place. Numbers keep their kind: a float is written with a point or an exponent even where
// it is whole, and whole numbers are exact up to 64 bits. The order of a map's keys is preserved.
//
// # Bounds
//
// No allocation depends on a length in a header: only bytes that are present count. A document
// nests at most MaxDepth deep, and ToJSON stops at its limit. The output of AppendJSON takes at
// most about five times the JSON: an empty list is two bytes of JSON, and five here.
//
// Everything is a pure function, safe for concurrent use.
package msgpack
