package budget

import (
	"context"
	"errors"
	"strconv"
	"sync"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Account is what one request holds of a pool. A port makes it as soon as it knows the caller,
// the context passes it down, and whoever is about to allocate memory for the request reserves
// that here first. The port closes it when the answer is written. nil bounds nothing.
type Account struct {
	// whole is the account of which this is a part; it holds what its parts hold. The others have a
	// pool, which is nil where nothing is bounded.
	whole  *Account
	pool   *Pool
	tenant string
	// ctx is nil where it does not matter whether the caller left.
	ctx   context.Context
	limit int64

	mu           sync.Mutex
	held, inputs int64
	// hasMany is true for a request of many messages, and inParts is what its parts hold.
	hasMany, closed bool
	inParts         int64
}

// NewAccount returns an account of a tenant. The pool may be nil.
func NewAccount(p *Pool, tenant string) *Account { return &Account{pool: p, tenant: tenant} }

// Of returns a part of the context's account for the inputs of its request, of at most limit
// bytes; 0 is no limit. Nothing can be reserved after the context ended.
func Of(ctx context.Context, limit int) *Account {
	out := FromContext(ctx).Part()
	out.ctx, out.limit = ctx, int64(limit)
	return out
}

// Part returns an account for a part of the request, such as one message of a stream. It may be
// closed before the whole, and is closed with it.
func (a *Account) Part() *Account { return &Account{whole: a} }

// HasMany is called for a request of many messages, each of which may be sent again by itself: one is
// too large by what its own part and the request itself hold.
func (a *Account) HasMany() {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.hasMany = true
}

// Reserve reserves n bytes of a request, or returns the fault that rejects them: OVERLOADED, or
// PAYLOAD_TOO_LARGE if it would not fit without others either. A closed account takes nothing: the
// request that asks has been answered.
func (a *Account) Reserve(n int64) error { return a.reserve(n, 0, true) }

// ReserveOutput is Reserve for what is sent, for whose size no request is blamed.
func (a *Account) ReserveOutput(n int64) error { return a.reserve(n, 0, false) }

// reserve reserves n bytes. For a part, it would hold so much with them; 0 is for no part.
func (a *Account) reserve(n, part int64, isRequest bool) error {
	if a == nil {
		return nil
	}
	if a.ctx != nil {
		switch err := a.ctx.Err(); {
		case errors.Is(err, context.DeadlineExceeded):
			return fault.New(fault.DeadlineExceeded, "the deadline passed before the inputs were read").Caused(err)
		case err != nil:
			return fault.New(fault.Cancelled, "the caller disconnected").Caused(err)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return fault.New(fault.Cancelled, "the request has ended")
	}
	alone := a.held + n
	if a.hasMany {
		alone = a.held - a.inParts + max(n, part)
	}
	if err := a.whole.reserve(n, alone, isRequest); err != nil {
		return err
	}
	if a.pool != nil {
		if f := a.pool.Reserve(a.tenant, n); f != nil {
			if isRequest {
				f = a.pool.checkAlone(alone, f)
			}
			return f
		}
	}
	a.held += n
	if part > 0 {
		a.inParts += n
	}
	return nil
}

// Held returns how many bytes are reserved.
func (a *Account) Held() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.held
}

// Release returns n reserved bytes. After Close it does nothing.
func (a *Account) Release(n int64) { a.giveBack(n, 0) }

// giveBack is Release of n bytes, of which parts held inParts.
func (a *Account) giveBack(n, inParts int64) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.closed {
		a.inParts -= inParts
		a.release(n)
	}
}

func (a *Account) release(n int64) {
	n = min(n, a.held) // ReleaseAllBut may have returned what a part holds
	a.held -= n
	a.whole.giveBack(n, n)
	if a.pool != nil {
		a.pool.Release(a.tenant, n)
	}
}

// responseFactor is how often an answer counts: as received, as encoded, and for what the
// collector leaves. maxResponsePart is the most that one counts, so that a large one fits: one
// part in so many.
const responseFactor, maxResponsePart = 3, 4

// ReserveResponse reserves what it takes to write an answer of n bytes.
func (a *Account) ReserveResponse(n int64) error {
	n *= responseFactor
	root := a
	for root != nil && root.whole != nil {
		root = root.whole
	}
	if root != nil && root.pool != nil {
		n = min(n, root.pool.settings.Limit/maxResponsePart)
	}
	return a.ReserveOutput(n)
}

// ReleaseAllBut returns what is held beyond n bytes.
func (a *Account) ReleaseAllBut(n int64) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.closed && a.held > n {
		a.release(a.held - n)
	}
}

// Close returns all that is held, by parts as well.
func (a *Account) Close() {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.release(a.held)
	a.closed = true
}

// Input reserves n bytes for the input of that field, within the limit of Of. On an error the
// caller must not allocate them. One goroutine calls it.
func (a *Account) Input(field string, n int64) error {
	if a == nil {
		return nil
	}
	if a.limit > 0 && n > a.limit-a.inputs {
		before := ""
		if a.inputs > 0 {
			before = " for all inputs, of which " + strconv.FormatInt(a.inputs, 10) + " are taken"
		}
		return fault.Newf(fault.PayloadTooLarge, "%s takes %d bytes, gateway.max_payload is %d%s", field, n, a.limit, before).
			WithViolation(field, "takes %d bytes", n).
			WithMetadata("limit_bytes", strconv.FormatInt(a.limit, 10))
	}
	if err := a.Reserve(n); err != nil {
		return err
	}
	a.inputs += n
	return nil
}

// owner is whose work a context is of: one value, because each request asks for it many times.
type owner struct {
	account *Account
	tenant  string
}

type ownerKey struct{}

func ownerOf(ctx context.Context) owner {
	out, _ := ctx.Value(ownerKey{}).(owner)
	return out
}

// WithTenant returns the context of a tenant's work, a name as stages have: the idempotency keys,
// results and requests of others are not the tenant's. Those without one are one tenant too.
func WithTenant(ctx context.Context, tenant string) context.Context {
	if tenant == "" {
		return ctx
	}
	return context.WithValue(ctx, ownerKey{}, owner{FromContext(ctx), tenant})
}

// TenantOf returns the tenant of a context; empty for none.
func TenantOf(ctx context.Context) string { return ownerOf(ctx).tenant }

// NewContext returns a context with the account of its request.
func NewContext(ctx context.Context, a *Account) context.Context {
	return context.WithValue(ctx, ownerKey{}, owner{a, TenantOf(ctx)})
}

// FromContext returns the account of a context, or nil.
func FromContext(ctx context.Context) *Account { return ownerOf(ctx).account }

// WithScope returns a context whose account is a part of the request's, which release closes:
// for one of many messages of a request.
func WithScope(ctx context.Context) (_ context.Context, release func()) {
	part := FromContext(ctx).Part()
	return NewContext(ctx, part), part.Close
}
