package transport

import (
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// Budget bounds the bytes of all requests together. gateway/admission.ByteBudget implements it.
type Budget interface {
	// Reserve reserves bytes, or returns the fault that rejects them.
	Reserve(n int64) *fault.Fault
	// Release releases reserved bytes.
	Release(n int64)
}

// budgetKey is the context key of the account of a request.
type budgetKey struct{}

// account is what a request has reserved of the budget.
type account struct {
	budget   Budget
	reserved atomic.Int64
}

var _ Budget = (*account)(nil)

// Reserve implements Budget.
func (a *account) Reserve(n int64) *fault.Fault {
	if f := a.budget.Reserve(n); f != nil {
		return f
	}
	a.reserved.Add(n)
	return nil
}

// Release implements Budget.
func (a *account) Release(n int64) {
	a.reserved.Add(-n)
	a.budget.Release(n)
}

func (a *account) releaseAll() { a.budget.Release(a.reserved.Swap(0)) }

// withAccount returns a context whose reservations are those of one message of a stream, and
// what releases them.
func withAccount(ctx context.Context) (_ context.Context, release func()) {
	outer, ok := ctx.Value(budgetKey{}).(*account)
	if !ok {
		return ctx, func() {}
	}
	inner := &account{budget: outer.budget}
	return context.WithValue(ctx, budgetKey{}, inner), inner.releaseAll
}

// WithBudget returns a handler that reserves budget for request bodies as they are read,
// and releases it when next has returned. A rejected read fails with the budget's fault.
// Reservations of such a request, and ReservingCaller, use the same budget; nil is no bound.
// A response over HTTP/1 does not wait for a body that next leaves unread.
func WithBudget(next http.Handler, budget Budget) http.Handler {
	if budget == nil {
		budget = admission.NewByteBudget(math.MaxInt64)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		from := &requestBody{ReadCloser: r.Body, account: &account{budget: budget}}
		defer from.account.releaseAll()
		hasBody := r.Body != nil && r.Body != http.NoBody
		// A copy, because net/http decides by the original's body whether the
		// connection can carry another request.
		bounded := r.WithContext(context.WithValue(r.Context(), budgetKey{}, from.account))
		if hasBody {
			bounded.Body = from
		}
		if hasBody && r.ProtoMajor == 1 {
			from.header, from.conn = w.Header(), *http.NewResponseController(w)
			from.onDemand = strings.EqualFold(r.Header.Get("Expect"), "100-continue")
			w = &responseAfterBody{w, from}
			defer from.discard()
		}
		next.ServeHTTP(w, bounded)
	})
}

// requestBody is a body that reserves budget as it is read.
type requestBody struct {
	io.ReadCloser
	account *account
	// reserved is what the body has of the account.
	reserved atomic.Int64

	// These are for HTTP/1. onDemand is true until a body is read that is sent only then,
	// and ended once there is nothing to discard.
	header          http.Header
	conn            http.ResponseController
	onDemand, ended bool
}

func (b *requestBody) release() { b.account.Release(b.reserved.Swap(0)) }

// Read implements io.Reader.
func (b *requestBody) Read(buf []byte) (int, error) {
	b.onDemand = false
	n, err := b.ReadCloser.Read(buf)
	b.ended = b.ended || err != nil
	if f := b.account.Reserve(int64(n)); f != nil {
		return 0, f
	}
	b.reserved.Add(int64(n))
	return n, err
}

// Close implements io.Closer. Over HTTP/1 net/http reads the rest.
func (b *requestBody) Close() error {
	b.discard()
	return b.ReadCloser.Close()
}

// What is read of a body that nobody needs: so much, in so much time.
const (
	discardBytes   = 256 << 10
	discardTimeout = time.Second
)

// discard reads the rest of a body before the response over HTTP/1. A client that sends on, or
// sends nothing, loses its connection: net/http would wait for it without end.
func (b *requestBody) discard() {
	if b.ended || b.header == nil {
		return
	}
	b.ended = true
	until := time.Now()
	if !b.onDemand {
		until = until.Add(discardTimeout)
	}
	_ = b.conn.SetReadDeadline(until) // without deadlines, in tests, there is no connection
	if !b.onDemand {
		if _, err := io.CopyN(io.Discard, b.ReadCloser, discardBytes); errors.Is(err, io.EOF) {
			_ = b.conn.SetReadDeadline(time.Time{})
			return
		}
	}
	b.header.Set("Connection", "close")
}

// responseAfterBody is a response over HTTP/1 that begins once the body is discarded.
type responseAfterBody struct {
	http.ResponseWriter

	body *requestBody
}

var _ http.Flusher = (*responseAfterBody)(nil)

// WriteHeader implements http.ResponseWriter.
func (w *responseAfterBody) WriteHeader(status int) {
	w.body.discard()
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *responseAfterBody) Write(data []byte) (int, error) {
	w.body.discard()
	return w.ResponseWriter.Write(data)
}

// Flush implements http.Flusher.
func (w *responseAfterBody) Flush() { _ = w.FlushError() }

// FlushError is Flush with an error; http.ResponseController prefers it.
func (w *responseAfterBody) FlushError() error {
	w.body.discard()
	return w.body.conn.Flush()
}

// Unwrap lets http.ResponseController reach the connection.
func (w *responseAfterBody) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// EnableFullDuplex lets the response begin before the body's end; http.ResponseController finds it.
func (w *responseAfterBody) EnableFullDuplex() error {
	w.body.ended = true
	return w.body.conn.EnableFullDuplex()
}

// ReleaseBody releases the budget that the request's body has reserved so far. Streams of
// messages call it before each message, because only the latest is kept.
func ReleaseBody(r *http.Request) {
	if from, ok := r.Body.(*requestBody); ok {
		from.release()
	}
}

// Reservation reserves the memory of one request's decoded inputs before it is allocated,
// within the limit of the request and its budget. It belongs to one goroutine. A nil
// Reservation bounds nothing.
type Reservation struct {
	ctx   context.Context
	limit int64
	// budget is nil where there is none.
	budget Budget
	// inputs are the bytes reserved for inputs, reserved all bytes reserved from the budget.
	inputs, reserved int64
}

// NewReservation returns a reservation of at most limit bytes of inputs; 0 is no limit. The
// context is the request's: it carries the budget of WithBudget, and nothing can be reserved
// after it ended. The caller releases the reservation.
func NewReservation(ctx context.Context, limit int) *Reservation {
	out := &Reservation{ctx: ctx, limit: int64(limit)}
	if account, ok := ctx.Value(budgetKey{}).(*account); ok {
		out.budget = account
	}
	return out
}

// Input reserves n bytes for the input of that field. On an error the caller must not
// allocate them.
func (r *Reservation) Input(field string, n int64) error {
	if r == nil {
		return nil
	}
	if r.limit > 0 && n > r.limit-r.inputs {
		return r.tooLarge(field, n)
	}
	if err := r.ReserveTemporary(n); err != nil {
		return err
	}
	r.inputs += n
	return nil
}

func (r *Reservation) tooLarge(field string, n int64) error {
	before := ""
	if r.inputs > 0 {
		before = " for all inputs, of which " + strconv.FormatInt(r.inputs, 10) + " are taken"
	}
	return fault.Newf(fault.PayloadTooLarge, "%s takes %d bytes, gateway.max_payload is %d%s", field, n, r.limit, before).
		WithViolation(field, "takes %d bytes", n).
		WithMetadata("limit_bytes", strconv.FormatInt(r.limit, 10))
}

// ReserveTemporary reserves n bytes of temporary memory, which count against the budget only.
func (r *Reservation) ReserveTemporary(n int64) error {
	if r == nil {
		return nil
	}
	switch err := r.ctx.Err(); {
	case errors.Is(err, context.DeadlineExceeded):
		return fault.New(fault.DeadlineExceeded, "the deadline passed before the inputs were read").Caused(err)
	case err != nil:
		return fault.New(fault.Cancelled, "the caller disconnected").Caused(err)
	}
	if r.budget != nil {
		if f := r.budget.Reserve(n); f != nil {
			return f
		}
	}
	r.reserved += n
	return nil
}

// ReleaseTemporary releases n bytes that ReserveTemporary reserved.
func (r *Reservation) ReleaseTemporary(n int64) {
	if r == nil {
		return
	}
	r.reserved -= n
	if r.budget != nil {
		r.budget.Release(n)
	}
}

// Inputs returns the bytes that are reserved for inputs.
func (r *Reservation) Inputs() int {
	if r == nil {
		return 0
	}
	return int(r.inputs)
}

// Release releases everything. The inputs must not be used after it.
func (r *Reservation) Release() {
	if r != nil {
		r.ReleaseTemporary(r.reserved)
	}
}

// ReservingCaller is a Caller whose responses count against the budget of their request until
// they are written: three times, as received, as encoded, and for what the collector leaves.
// One that does not fit is dropped, and its caller gets the budget's fault.
type ReservingCaller struct {
	Caller
	// Most is the most that one response counts, so that a large one fits into the budget.
	Most int64
}

const responseFactor = 3

// Infer implements Caller.
func (c ReservingCaller) Infer(ctx context.Context, r *call.Request) (*call.Response, error) {
	out, err := c.Caller.Infer(ctx, r)
	return c.reserve(ctx, out, err)
}

// Result implements Caller.
func (c ReservingCaller) Result(ctx context.Context, requestID string, wait time.Duration) (*call.Response, error) {
	out, err := c.Caller.Result(ctx, requestID, wait)
	return c.reserve(ctx, out, err)
}

// Stream implements Caller. A chunk counts while emit writes it.
func (c ReservingCaller) Stream(ctx context.Context, r *call.Request, emit func(call.Chunk) error) (*call.Response, error) {
	out, err := c.Caller.Stream(ctx, r, func(chunk call.Chunk) error {
		chunkCtx, release := withAccount(ctx)
		defer release()
		if err := c.reserveOutputs(chunkCtx, chunk.Outputs); err != nil {
			return err
		}
		return emit(chunk)
	})
	return c.reserve(ctx, out, err)
}

func (c ReservingCaller) reserve(ctx context.Context, r *call.Response, err error) (*call.Response, error) {
	if err != nil {
		return nil, err
	}
	if err := c.reserveOutputs(ctx, r.Outputs); err != nil {
		return nil, WithRequestID(err, r.RequestID)
	}
	return r, nil
}

func (c ReservingCaller) reserveOutputs(ctx context.Context, outputs []payload.Part) error {
	if account, ok := ctx.Value(budgetKey{}).(*account); ok {
		if f := account.Reserve(min(responseFactor*int64(payload.Size(outputs)), c.Most)); f != nil {
			return f
		}
	}
	return nil
}
