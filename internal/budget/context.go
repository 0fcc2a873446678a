package budget

import "context"

type (
	tenantKey  struct{}
	accountKey struct{}
)

// WithTenant returns the context of a tenant's work, a name as stages have: the idempotency keys,
// results and requests of others are not the tenant's. Those without one are one tenant too.
func WithTenant(ctx context.Context, tenant string) context.Context {
	if tenant == "" {
		return ctx
	}
	return context.WithValue(ctx, tenantKey{}, tenant)
}

// TenantOf returns the tenant of a context; empty for none.
func TenantOf(ctx context.Context) string {
	tenant, _ := ctx.Value(tenantKey{}).(string)
	return tenant
}

// NewContext returns a context with the account of its request.
func NewContext(ctx context.Context, a *Account) context.Context {
	return context.WithValue(ctx, accountKey{}, a)
}

// FromContext returns the account of a context, or nil.
func FromContext(ctx context.Context) *Account {
	a, _ := ctx.Value(accountKey{}).(*Account)
	return a
}

// WithScope returns a context whose account is a part of the request's, which release closes:
// for one of many messages of a request.
func WithScope(ctx context.Context) (_ context.Context, release func()) {
	part := FromContext(ctx).Part()
	return NewContext(ctx, part), part.Close
}
