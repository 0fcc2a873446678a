package port

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"connectrpc.com/connect"

	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Port is what a port has around its services. Probes need no token: /livez, /readyz and gRPC
// health reveal only whether the gateway works, and whether a pipeline of a known name exists.
type Port struct {
	Health Health
	// Services are the RPC services on the port, beside health and reflection: errors on their
	// paths are in the protocol of the caller.
	Services []string
	// Tokens are the tokens that callers may send; without any they need none.
	Tokens credentials.Tokens
	// TokensKey names the file with the tokens in messages.
	TokensKey string
	// IsPrivate is true where callers without Tokens must use a loopback address.
	IsPrivate bool
	// Open are paths that need no token; one that ends in "/" is a prefix, except "/" itself.
	Open []string
	// Origins are those whose pages may call, as scheme://host[:port], or "*" alone for all.
	// Empty allows only the port's own.
	Origins []string
	// Forms write the errors on paths outside Services.
	Forms Forms
	// Memory is what the callers of the port may hold; nil bounds only those without a token.
	Memory *transport.Memory
}

// Handler returns the handler of the port: the services of the mux, with probes and
// reflection. Errors come from CheckOrigins.
func (p *Port) Handler(mux *http.ServeMux) (http.Handler, error) {
	p.mountHealth(mux)
	p.mountReflection(mux)
	// CORS comes before tokens: a preflight request has none.
	out, err := p.protectOrigins(p.authenticate(withNames(mux)))
	if err != nil {
		return nil, err
	}
	memory := p.Memory
	if memory == nil {
		memory = transport.NewMemory(nil)
	}
	return transport.WithMemory(out, memory, p.identify, p.rejector()), nil
}

// identify returns who sends a request, or why it may not.
func (p *Port) identify(h transport.Head) (transport.Caller, error) {
	isProbe, isOpen, withTokens := isProbe(h.Path), p.isOpen(h.Path), !p.Tokens.IsEmpty()
	switch {
	case isProbe, isOpen, !withTokens && (!p.IsPrivate || config.IsLoopback(h.Host)):
		return transport.Caller{IsAnonymous: isProbe || isOpen && withTokens}, nil
	case !withTokens:
		return transport.Caller{}, fault.Newf(fault.Unauthenticated, "without %s this port answers those who call it by a loopback address, not %.*q", p.TokensKey, fault.MaxQuoted, h.Host)
	}
	token, ok := credentials.BearerToken(h.Header("authorization"))
	if !ok {
		return transport.Caller{}, fault.Newf(fault.Unauthenticated, `this port needs a token, as "Authorization: Bearer TOKEN"; it is in the gateway's %s`, p.TokensKey)
	}
	holder, ok := p.Tokens.Holder(token)
	if !ok {
		return transport.Caller{}, fault.Newf(fault.Unauthenticated, "this is not a token in the gateway's %s", p.TokensKey)
	}
	return transport.Caller{Tenant: holder.Tenant, IsReader: holder.IsReader}, nil
}

// authenticate passes authenticated requests to next.
func (p *Port) authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := transport.Denied(r.Context()); err != nil {
			p.Tokens.DelayRefusal(r.Context(), r.Header.Get("Authorization"))
			w.Header().Set("WWW-Authenticate", "Bearer")
			p.reject(w, r, err)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// guardCalls is protectOrigins and identify for calls.
func (p *Port) guardCalls(protection *http.CrossOriginProtection) transport.Guard {
	return func(h transport.Head) (transport.Caller, error) {
		origin, site := h.Header("origin"), h.Header("sec-fetch-site")
		if protection != nil && origin+site != "" {
			r := http.Request{
				Method: http.MethodPost, Host: h.Host, URL: &url.URL{Path: h.Path},
				Header: http.Header{"Origin": {origin}, "Sec-Fetch-Site": {site}},
			}
			if protection.Check(&r) != nil {
				return transport.Caller{}, foreignOrigin(origin)
			}
		}
		return p.identify(h)
	}
}

// rpcErrors writes errors in the protocol of the caller.
var rpcErrors = connect.NewErrorWriter()

// reject answers a request with a fault, in the form of its path or protocol.
func (p *Port) reject(w http.ResponseWriter, r *http.Request, err error) {
	if !p.isRPC(r) {
		p.Forms.write(w, r, err)
		return
	}
	// A failed write is not an error: the caller has disconnected.
	_ = rpcErrors.Write(w, r, transport.RPCError(err))
}

// isRPC reports whether a request is an RPC, by its path or its content type.
func (p *Port) isRPC(r *http.Request) bool {
	service, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	return slices.Contains(p.allServices(), service) || transport.IsEnveloped(r.Header.Get("Content-Type"))
}

// isOpen reports whether the path needs no token.
func (p *Port) isOpen(path string) bool {
	return slices.ContainsFunc(p.Open, func(open string) bool {
		return path == open || open != "/" && strings.HasSuffix(open, "/") && strings.HasPrefix(path, open)
	})
}

// isProbe reports whether the path is a probe's.
func isProbe(path string) bool {
	switch path {
	case "/livez", "/readyz", "/v2/health/live", "/v2/health/ready":
		return true
	}
	return strings.HasPrefix(path, "/"+healthName+"/")
}

// Forms write errors by path, each for a path and all below it. Other paths use
// transport.WriteFault.
type Forms map[string]func(w http.ResponseWriter, err error)

func (f Forms) write(w http.ResponseWriter, r *http.Request, err error) {
	for root, write := range f {
		if r.URL.Path == root || strings.HasPrefix(r.URL.Path, root+"/") {
			write(w, err)
			return
		}
	}
	transport.WriteFault(w, err)
}
