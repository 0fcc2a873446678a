package port

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	connectcors "connectrpc.com/cors"
	"github.com/rs/cors"

	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// preflightAge is how long a browser may remember what it may call.
const preflightAge = 2 * time.Hour

const anyOrigin = "*"

// CheckOrigins returns what is wrong with a list of origins, each error with its index in
// allow_origins.
func CheckOrigins(origins []string) []error {
	var errs []error
	for i, origin := range origins {
		switch {
		case origin == anyOrigin && len(origins) == 1:
		case origin == anyOrigin:
			errs = append(errs, fmt.Errorf("allow_origins[%d]: %q allows every origin, so it stands alone; leave out it or the others", i, origin))
		case strings.Contains(origin, anyOrigin) || http.NewCrossOriginProtection().AddTrustedOrigin(origin) != nil:
			errs = append(errs, fmt.Errorf(`allow_origins[%d]: %q is not an origin such as https://app.example.com or http://localhost:5173: write scheme://host[:port], without a path, or "*" alone for all`, i, origin))
		}
	}
	return errs
}

// protectOrigins passes requests of pages of the listed origins to next, and rejects those
// of others.
func (p *Port) protectOrigins(next http.Handler) (http.Handler, error) {
	protection, err := p.originProtection()
	if err != nil {
		return nil, err
	}
	if protection != nil {
		protection.SetDenyHandler(http.HandlerFunc(p.rejectOrigin))
		next = protection.Handler(next)
	}
	// An empty list must not reach the cors package, to which it means all.
	if len(p.Origins) == 0 {
		return next, nil
	}
	return newCORS(p.Origins).Handler(next), nil
}

// rejector returns reject, whose errors pages of the listed origins can read.
func (p *Port) rejector() func(http.ResponseWriter, *http.Request, error) {
	if len(p.Origins) == 0 {
		return p.reject
	}
	c := newCORS(p.Origins)
	return func(w http.ResponseWriter, r *http.Request, err error) {
		c.ServeHTTP(w, r, func(w http.ResponseWriter, r *http.Request) { p.reject(w, r, err) })
	}
}

// originProtection returns nil where pages of every origin may call.
func (p *Port) originProtection() (*http.CrossOriginProtection, error) {
	if errs := CheckOrigins(p.Origins); len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	if slices.Contains(p.Origins, anyOrigin) {
		return nil, nil
	}
	out := http.NewCrossOriginProtection()
	for _, origin := range p.Origins {
		if err := out.AddTrustedOrigin(origin); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (p *Port) rejectOrigin(w http.ResponseWriter, r *http.Request) {
	p.Forms.write(w, r, foreignOrigin(r.Header.Get("Origin")))
}

func foreignOrigin(origin string) *fault.Fault {
	return fault.Newf(fault.PermissionDenied, "pages of the origin %.*q may not call this port; on the public port gateway.allow_origins lists those that may", fault.MaxQuoted, origin)
}

// openAIHeaders are the headers that OpenAI's client for browsers adds to its calls. Nobody reads them,
// but a browser sends none that the answer to its preflight does not list.
var openAIHeaders = []string{
	"OpenAI-Organization", "OpenAI-Project", "User-Agent", "X-Stainless-Arch", "X-Stainless-Custom-Poll-Interval", "X-Stainless-Helper-Method", "X-Stainless-Lang",
	"X-Stainless-OS", "X-Stainless-Package-Version", "X-Stainless-Poll-Helper", "X-Stainless-Retry-Count", "X-Stainless-Runtime", "X-Stainless-Runtime-Version", "X-Stainless-Timeout",
}

func newCORS(origins []string) *cors.Cors {
	return cors.New(cors.Options{
		AllowedOrigins: origins,
		AllowedMethods: slices.Concat(connectcors.AllowedMethods(), []string{http.MethodHead, http.MethodDelete}),
		AllowedHeaders: slices.Concat(connectcors.AllowedHeaders(), openAIHeaders, []string{
			transport.HeaderTimeout, transport.HeaderPriority, transport.HeaderDurability, transport.HeaderIdempotencyKey, transport.HeaderWaitForCapacity, transport.HeaderComplete,
			transport.HeaderTraceParent, transport.HeaderTraceState, transport.HeaderJSONLength, "Authorization", "If-None-Match", "Last-Event-ID", "Prefer",
		}),
		ExposedHeaders: slices.Concat(connectcors.ExposedHeaders(), []string{
			transport.HeaderRequestID, transport.HeaderPartial, transport.HeaderActivating, transport.HeaderServerTiming, "Trailer-" + transport.HeaderServerTiming, transport.HeaderJSONLength, "Retry-After", "ETag", "Location", "Preference-Applied", "Stagemesh-Job-State", "X-Request-Id",
		}),
		MaxAge: int(preflightAge / time.Second),
	})
}
