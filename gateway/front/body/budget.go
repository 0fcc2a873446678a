package body

import (
	"context"
	"io"
	"net/http"
	"sync/atomic"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Budget bounds the bytes of all bodies together: gateway/admission's ByteBudget.
type Budget interface {
	// Take takes bytes, or returns the fault that refuses them.
	Take(n int64) *fault.Fault
	// Give gives back what was taken.
	Give(n int64)
}

// Budgeted returns a handler whose requests' bodies take from the budget as they
// are read, and give it back when next has returned. A body that is refused fails
// with the budget's fault. What a Room of such a request makes comes from it too.
func Budgeted(next http.Handler, budget Budget) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body == nil || r.Body == http.NoBody {
			next.ServeHTTP(w, r)
			return
		}
		from := &budgeted{ReadCloser: r.Body, budget: budget}
		defer func() { budget.Give(from.taken.Swap(0)) }()
		// A copy, because net/http decides by the original's body whether the
		// connection can carry another request.
		bounded := r.WithContext(context.WithValue(r.Context(), budgetKey{}, budget))
		bounded.Body = from
		next.ServeHTTP(w, bounded)
	})
}

type budgeted struct {
	io.ReadCloser
	budget Budget
	taken  atomic.Int64
}

// Settle gives back at once what the request's body has taken from its budget
// so far. It is for bodies that go on for as long as their caller likes, of which
// only the latest piece is kept. Where there is no budget it does nothing.
func Settle(r *http.Request) {
	if from, ok := r.Body.(*budgeted); ok {
		from.budget.Give(from.taken.Swap(0))
	}
}

// Read implements io.Reader.
func (b *budgeted) Read(buf []byte) (int, error) {
	n, err := b.ReadCloser.Read(buf)
	if f := b.budget.Take(int64(n)); f != nil {
		return 0, f
	}
	b.taken.Add(int64(n))
	return n, err
}
