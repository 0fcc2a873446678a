package target

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
)

// traceParent returns a W3C traceparent of a trace that begins here and is recorded:
// version 00, fresh ids of 16 and of 8 bytes, and the flag 01, sampled.
//
// The ids are only to be told apart, so Go's own random numbers do, which take no lock.
// The text is the one allocation. Safe for concurrent use.
func traceParent() string {
	var ids [24]byte
	for at := 0; at < len(ids); at += 8 {
		binary.BigEndian.PutUint64(ids[at:], nonZero())
	}
	var room [55]byte
	text := append(room[:0], "00-"...)
	text = hex.AppendEncode(text, ids[:16])
	text = append(text, '-')
	text = hex.AppendEncode(text, ids[16:])
	return string(append(text, "-01"...))
}

// nonZero returns a random number; ids of zeros are none.
func nonZero() uint64 {
	for {
		if n := rand.Uint64(); n != 0 {
			return n
		}
	}
}
