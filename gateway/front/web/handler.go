package web

import (
	"context"
	"fmt"
	"net/http"

	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/gateway/front/docs"
	"github.com/stagemesh/stagemesh/gateway/front/failure"
	"github.com/stagemesh/stagemesh/gateway/front/oip"
	"github.com/stagemesh/stagemesh/gateway/front/port"
	"github.com/stagemesh/stagemesh/gateway/front/procedure"
	"github.com/stagemesh/stagemesh/gateway/front/rest"
	"github.com/stagemesh/stagemesh/gateway/front/rpc"
)

// Settings are what Handler is made of.
type Settings struct {
	// Caller does the work: gateway/call's service.
	Caller rpc.Caller
	// Models are the pipelines to clients of the Open Inference Protocol; nil serves
	// none.
	Models oip.Models
	// Docs has the document that describes all this; nil serves none, nor the page that
	// shows it.
	Docs docs.Source
	// MaxMessageBytes bounds one request on every protocol; 0 is the fronts'
	// own default of 64 MiB.
	MaxMessageBytes int
	// MaxPayload bounds what is made of one request's inputs, in bytes, before the
	// Caller has them; 0 leaves it to the Caller.
	MaxPayload int
	// Budget bounds the bytes of all requests together; nil means that nothing
	// does.
	Budget body.Budget
	// Health says whether the gateway ("") or a pipeline can be used; nil says
	// that all can.
	Health port.Health
	// Origins are the origins whose pages may call, as scheme://host[:port], or
	// "*" alone for all. Empty allows none but the gateway's own.
	Origins []string
	// Tokens are what callers have to know one of; without any they need none.
	// TokensKey names the file with them in messages.
	Tokens    port.Tokens
	TokensKey string
	// Stopping is closed when the gateway stops; nil never is.
	Stopping <-chan struct{}
}

// Handler returns the handler of everything on the gateway's port.
func Handler(s Settings) (http.Handler, error) {
	if s.Health == nil {
		s.Health = func(context.Context, string) error { return nil }
	}
	mux := http.NewServeMux()
	bounds := procedure.Settings{MaxMessageBytes: s.MaxMessageBytes, MaxPayload: s.MaxPayload, Stopping: s.Stopping}
	mux.Handle(rpc.New(s.Caller, bounds))
	services := []string{inferencev1connect.InferenceServiceName}
	forms := port.Forms{}
	if s.Models != nil {
		mux.Handle(oip.New(s.Caller, s.Models, bounds))
		services = append(services, oip.ServiceName)
		tensors := oip.NewREST(s.Caller, s.Models, oip.RESTSettings{MaxBodyBytes: s.MaxMessageBytes, MaxPayload: s.MaxPayload})
		mux.Handle(oip.Root, tensors)
		mux.Handle(oip.Root+"/", tensors)
		forms[oip.Root] = oip.Fail
	}
	mux.Handle(rest.Prefix, rest.New(s.Caller, rest.Settings{MaxBodyBytes: s.MaxMessageBytes, MaxPayload: s.MaxPayload}))
	var readable []string
	if s.Docs != nil {
		docs.Mount(mux, s.Docs, docs.Settings{})
		readable = docs.Open()
	}
	port.MountHealth(mux, s.Health, services...)
	port.MountReflection(mux, services...)
	mux.HandleFunc("/", nothing(s.Docs != nil))
	// A browser asks whether it may call before it gives a token.
	guard := port.Guard{Tokens: s.Tokens, Key: s.TokensKey, Open: readable, Services: services, Forms: forms}
	out, err := port.CrossOrigin(guard.Before(mux), port.Origins{Listed: s.Origins, Key: "allow_origins", Forms: forms})
	if err != nil {
		return nil, fmt.Errorf("origins: %w", err)
	}
	if s.Budget == nil {
		return out, nil
	}
	return body.Budgeted(out, s.Budget), nil
}

// nothing answers for paths at which there is nothing. Where there is a document of
// those at which there is something it says so.
func nothing(described bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		f := rest.Nothing(r.URL.Path)
		if described {
			f.Message += "; GET " + docs.DocumentPath + " describes all that there is"
		}
		failure.Write(w, f)
	}
}
