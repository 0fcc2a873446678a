package admit

import (
	"cmp"
	"sync/atomic"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// DefaultMaxPayload bounds the inputs of a request, in bytes.
const DefaultMaxPayload = 4 << 20

const bodyPerPayload = 4

// BodyOf is how many bytes the body of a request may have whose inputs are
// bounded so, by default; JSON takes about that much.
func BodyOf(maxPayload int) int {
	return bodyPerPayload * cmp.Or(maxPayload, DefaultMaxPayload)
}

// RequestOf is how many bytes of a Budget a request may need whose inputs are
// bounded so: for its body as it came, and for the inputs in it.
func RequestOf(maxPayload int) int {
	return BodyOf(maxPayload) + cmp.Or(maxPayload, DefaultMaxPayload)
}

// Budget bounds the bytes that all requests together have in the gateway.
type Budget struct {
	bound int64
	taken atomic.Int64
}

// NewBudget returns a budget of so many bytes.
func NewBudget(bound int64) *Budget { return &Budget{bound: bound} }

// Take takes bytes, which must be given back, or returns the fault that refuses
// them.
func (b *Budget) Take(n int64) *fault.Fault {
	if b.taken.Add(n) <= b.bound {
		return nil
	}
	b.taken.Add(-n)
	return fault.Newf(fault.Overloaded, "the gateway has %d bytes of requests in hand, as many as gateway.max_in_flight_bytes allows", b.bound).WithRetryAfter(retryAfter)
}

// Give gives bytes back that were taken.
func (b *Budget) Give(n int64) { b.taken.Add(-n) }

// Taken returns how many bytes are taken.
func (b *Budget) Taken() int64 { return b.taken.Load() }
