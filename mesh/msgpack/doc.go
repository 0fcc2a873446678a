// Package msgpack turns MessagePack into JSON and JSON into MessagePack, for
// bodies and blobs that come in the one and are wanted in the other.
//
//	text, err := msgpack.ToJSON(data, 16<<20)
//	data, err = msgpack.AppendJSON(nil, text)
//
// Members, Elements and Binary look into a document without turning it into anything,
// and what begins with Append writes one.
//
// # What JSON cannot say
//
// Binary strings, extensions and timestamps, maps with keys that are no strings,
// NaN, infinities, and strings that are not UTF-8 have no form in JSON. ToJSON
// refuses them, as an *Error that names their place. Numbers keep their kind: a
// float is written with a point or an exponent even where it is whole, and whole
// numbers are exact up to 64 bits. The order of a map's keys is kept.
//
// # Bounds
//
// Nothing is allocated because a header claims a length: what is read is there. A
// document nests at most MaxDepth deep, and ToJSON ends at its limit. What
// AppendJSON writes takes at most about five times the JSON: an empty list is two
// bytes of it, and five here.
//
// Everything is a pure function, safe for concurrent use.
package msgpack
