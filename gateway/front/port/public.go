package port

import (
	"context"
	"net/http"

	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/gateway/front/oip"
	"github.com/stagemesh/stagemesh/gateway/front/rest"
	"github.com/stagemesh/stagemesh/gateway/front/rpc"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/gateway/openapi"
)

// PublicSettings are the settings of PublicHandler.
type PublicSettings struct {
	// Settings bound what a caller may cost, on every protocol.
	transport.Settings
	// Caller runs the requests: gateway/call's service.
	Caller transport.Caller
	// Models are the pipelines to clients of the Open Inference Protocol; nil serves none.
	Models oip.Models
	// Docs has the OpenAPI document; nil serves neither it nor the page that shows it.
	Docs openapi.Source
	// Budget bounds the bytes of all requests together; nil is no bound.
	Budget transport.Budget
	// Health reports whether the gateway ("") or a pipeline can be used; nil is always
	// healthy.
	Health Health
	// Origins are the origins whose pages may call, as scheme://host[:port], or "*" alone
	// for all. Empty allows only the gateway's own.
	Origins []string
	// Tokens are what callers need one of; the zero Tokens admit everyone. TokensKey names
	// the file with them in messages.
	Tokens    Tokens
	TokensKey string
}

// PublicHandler returns the handler of everything on the public port.
func PublicHandler(s PublicSettings) (http.Handler, error) {
	if s.Health == nil {
		s.Health = func(context.Context, string) error { return nil }
	}
	mux := http.NewServeMux()
	mux.Handle(rpc.New(s.Caller, s.Settings))
	services := []string{inferencev1connect.InferenceServiceName}
	forms := Forms{}
	if s.Models != nil {
		mux.Handle(oip.New(s.Caller, s.Models, s.Settings))
		services = append(services, oip.ServiceName)
		tensors := oip.NewREST(s.Caller, s.Models, s.Settings)
		mux.Handle(oip.Root, tensors)
		mux.Handle(oip.Root+"/", tensors)
		forms[oip.Root] = oip.WriteFault
	}
	mux.Handle(rest.Prefix, rest.New(s.Caller, s.Settings))
	var open []string
	if s.Docs != nil {
		openapi.Mount(mux, s.Docs)
		open = openapi.OpenPaths()
	}
	MountHealth(mux, s.Health, services...)
	MountReflection(mux, services...)
	mux.HandleFunc("/", notFound(s.Docs != nil))
	// CORS comes first: a preflight request has no token.
	guard := Guard{Tokens: s.Tokens, Key: s.TokensKey, Open: open, Services: services, Forms: forms}
	out, err := CrossOrigin(guard.Before(mux), Origins{Listed: s.Origins, Key: "allow_origins", Forms: forms})
	if err != nil || s.Budget == nil {
		return out, err
	}
	return transport.WithBudget(out, s.Budget), nil
}

// notFound answers for paths that nothing serves.
func notFound(documented bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		f := rest.NotFound(r.URL.Path)
		if documented {
			f.Message += "; GET " + openapi.DocumentPath + " describes all that there is"
		}
		transport.WriteFault(w, f)
	}
}
