package adminapi

import (
	"net"
	"net/http"
	"strings"

	"connectrpc.com/connect"
	"connectrpc.com/grpchealth"

	"github.com/stagemesh/stagemesh/gateway/front/procedure"
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

// guarded lets those call next who may.
func guarded(next http.Handler, t Token) http.Handler {
	refusals := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f := refusal(r, t); f != nil {
			w.Header().Set("WWW-Authenticate", "Bearer")
			// The caller may be gone; it is not served in any case.
			_ = refusals.Write(w, r, procedure.Failure(f))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// refusal says why a request may not pass, or nothing.
func refusal(r *http.Request, t Token) *fault.Fault {
	switch {
	case probe(r.URL.Path):
		return nil
	case !t.set && !local(r.Host):
		return fault.Newf(fault.Unauthenticated, "without gateway.admin.token_file this port answers those who call it by a loopback address, not %.*q", shown, r.Host)
	case !t.set:
		return nil
	}
	text, ok := bearer(r.Header.Get("Authorization"))
	switch {
	case !ok:
		return fault.New(fault.Unauthenticated, `this port needs a token, as "Authorization: Bearer TOKEN"; it is in the gateway's gateway.admin.token_file`)
	case !t.is(text):
		return fault.New(fault.Unauthenticated, "this is not the token in the gateway's gateway.admin.token_file")
	}
	return nil
}

// probe reports whether the path tells no more than whether the gateway works.
func probe(path string) bool {
	return path == "/livez" || path == "/readyz" || strings.HasPrefix(path, "/"+grpchealth.HealthV1ServiceName+"/")
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
