package port

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"connectrpc.com/grpchealth"

	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/credentials"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Exposed reports whether an address to listen on can be reached from other
// machines, as far as it says: a name other than localhost may mean anything.
func Exposed(listen string) bool {
	host, _, err := net.SplitHostPort(listen)
	return err != nil || !loopback(host)
}

func loopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return ip != nil && ip.IsLoopback()
}

// Guard says who may call a port. Probes always may: /livez, /readyz and gRPC
// health tell no more than whether the gateway works, and whether there is a pipeline
// of a name that the caller knows.
type Guard struct {
	// Tokens are what callers may know; without any they need none.
	Tokens Tokens
	// Key names the file with the tokens in messages.
	Key string
	// Near says that without Tokens the callers have to name the port by a loopback
	// address.
	Near bool
	// Open are paths that need no token, for what everybody may read; one that ends in
	// "/" is what paths begin with that need none.
	Open []string
	// Services are the names of the RPC services on the port, beside those of health
	// and reflection: refusals to their paths are of the protocol that calls.
	Services []string
	// Forms write the refusals to other paths.
	Forms Forms
}

// Before lets those call next who may.
func (g Guard) Before(next http.Handler) http.Handler {
	if g.Tokens.none() && !g.Near {
		return next
	}
	refusals := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f := g.refusal(r)
		if f == nil {
			next.ServeHTTP(w, r)
			return
		}
		w.Header().Set("WWW-Authenticate", "Bearer")
		if !g.called(r) {
			g.Forms.write(w, r, f)
			return
		}
		// The caller may be gone; it is not served in any case.
		_ = refusals.Write(w, r, transport.RPCError(f))
	})
}

// called reports whether a request is an RPC: it is to a service, or cannot be anything
// else by its type.
func (g Guard) called(r *http.Request) bool {
	service, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	if slices.Contains(known(g.Services), service) {
		return true
	}
	contentType := r.Header.Get("Content-Type")
	return strings.HasPrefix(contentType, "application/grpc") || strings.HasPrefix(contentType, "application/connect+")
}

// refusal says why a request may not pass, or nothing.
func (g Guard) refusal(r *http.Request) *fault.Fault {
	switch {
	case probe(r.URL.Path), g.open(r.URL.Path):
		return nil
	case g.Tokens.none() && local(r.Host):
		return nil
	case g.Tokens.none():
		return fault.Newf(fault.Unauthenticated, "without %s this port answers those who call it by a loopback address, not %.*q", g.Key, shown, r.Host)
	}
	text, ok := bearer(r.Header.Get("Authorization"))
	switch {
	case !ok:
		return fault.Newf(fault.Unauthenticated, `this port needs a token, as "Authorization: Bearer TOKEN"; it is in the gateway's %s`, g.Key)
	case !g.Tokens.has(text):
		return fault.Newf(fault.Unauthenticated, "this is not a token in the gateway's %s", g.Key)
	}
	return nil
}

// open reports whether the path is one that everybody may read.
func (g Guard) open(path string) bool {
	return slices.ContainsFunc(g.Open, func(open string) bool {
		return path == open || strings.HasSuffix(open, "/") && strings.HasPrefix(path, open)
	})
}

// probe reports whether the path is one that needs no token.
func probe(path string) bool {
	switch path {
	case "/livez", "/readyz", "/v2/health/live", "/v2/health/ready":
		return true
	}
	return strings.HasPrefix(path, "/"+grpchealth.HealthV1ServiceName+"/")
}

// local reports whether the caller named this port by a loopback address.
func local(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return loopback(host)
}

func bearer(authorization string) (token string, ok bool) {
	scheme, token, ok := strings.Cut(authorization, " ")
	return strings.TrimSpace(token), ok && strings.EqualFold(scheme, "Bearer")
}

// Tokens are what callers may know; any of them will do, so that one can replace
// another while both are taken. The zero Tokens are none. They are kept as digests,
// so that nothing can print them and all comparisons take the same time.
type Tokens struct{ digests [][sha256.Size]byte }

// NewTokens returns the tokens of a text, one a line; white space around them, and
// empty lines, do not count. There is at least one, and each is visible ASCII.
func NewTokens(text string) (Tokens, error) {
	var out Tokens
	for line := range strings.Lines(text) {
		token := strings.TrimSpace(line)
		if token == "" {
			continue
		}
		if strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return Tokens{}, errors.New("a token is one word of visible ASCII")
		}
		out.digests = append(out.digests, sha256.Sum256([]byte(token)))
	}
	if len(out.digests) == 0 {
		return Tokens{}, errors.New("there is no token in it")
	}
	return out, nil
}

// ReadTokens reads tokens from a file, one a line.
func ReadTokens(path string) (Tokens, error) {
	data, err := credentials.Read(path)
	if err != nil {
		return Tokens{}, err
	}
	tokens, err := NewTokens(string(data))
	if err != nil {
		return Tokens{}, fmt.Errorf("%s: %w", path, err)
	}
	return tokens, nil
}

// none reports whether callers need not know any.
func (t Tokens) none() bool { return len(t.digests) == 0 }

// has reports whether the text is one of the tokens. All are compared, so that the
// time tells nothing about which.
func (t Tokens) has(text string) bool {
	digest := sha256.Sum256([]byte(text))
	found := 0
	for i := range t.digests {
		found |= subtle.ConstantTimeCompare(digest[:], t.digests[i][:])
	}
	return found == 1
}

// Forms write refusals, each those to a path and to all below it. Other paths have
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
