package web

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	connectcors "connectrpc.com/cors"
	"github.com/rs/cors"

	"github.com/stagemesh/stagemesh/gateway/front/failure"
	"github.com/stagemesh/stagemesh/gateway/front/header"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// preflightAge is how long a browser may remember what it may call.
const preflightAge = 2 * time.Hour

const anyOrigin = "*"

// shown is how much of an origin is repeated to its caller, in runes.
const shown = 80

// crossOrigin lets pages of the listed origins call next, and refuses those of
// others. An empty list must not reach the cors package, to which it means all.
func crossOrigin(next http.Handler, origins []string) (http.Handler, error) {
	if slices.Contains(origins, anyOrigin) {
		if len(origins) > 1 {
			return nil, errors.New(`"*" stands alone`)
		}
		return withCORS(next, origins), nil
	}
	protection := http.NewCrossOriginProtection()
	protection.SetDenyHandler(http.HandlerFunc(refuseOrigin))
	for _, origin := range origins {
		if strings.Contains(origin, anyOrigin) {
			return nil, fmt.Errorf("%q: list each origin by itself", origin)
		}
		if err := protection.AddTrustedOrigin(origin); err != nil {
			return nil, err
		}
	}
	protected := protection.Handler(next)
	if len(origins) == 0 {
		return protected, nil
	}
	return withCORS(protected, origins), nil
}

func refuseOrigin(w http.ResponseWriter, r *http.Request) {
	failure.Write(w, fault.Newf(fault.PermissionDenied, "pages of the origin %.*q may not call this gateway; its operator has to list it in allow_origins", shown, r.Header.Get("Origin")))
}

func withCORS(next http.Handler, origins []string) http.Handler {
	return cors.New(cors.Options{
		AllowedOrigins: origins,
		AllowedMethods: slices.Concat(connectcors.AllowedMethods(), []string{http.MethodDelete}),
		AllowedHeaders: slices.Concat(connectcors.AllowedHeaders(), []string{
			header.Timeout, header.Priority, header.Durability, header.IdempotencyKey,
			header.TraceParent, header.TraceState, "Authorization",
		}),
		ExposedHeaders: slices.Concat(connectcors.ExposedHeaders(), []string{
			header.RequestID, header.ServerTiming, "Trailer-" + header.ServerTiming, "Retry-After",
		}),
		MaxAge: int(preflightAge / time.Second),
	}).Handler(next)
}
