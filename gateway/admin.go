package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/stagemesh/stagemesh/gateway/adminapi"
	"github.com/stagemesh/stagemesh/gateway/front/port"
	"github.com/stagemesh/stagemesh/mesh/config"
	"github.com/stagemesh/stagemesh/mesh/store"
)

// Admin configures the port for operators.
type Admin struct {
	// Listen is its address. If it is empty, there is no admin port.
	Listen string `yaml:"listen"`
	// Access configures its TLS and tokens. Without a TokenFile the port listens on a
	// loopback address only.
	Access
}

// Validate checks the settings without reading the files. Errors begin with the key
// that they are about.
func (a Admin) Validate() error {
	errs := []error{config.Address("listen", a.Listen)}
	if errs[0] == nil && a.Listen != "" && a.TokenFile == "" && port.Exposed(a.Listen) {
		errs = append(errs, fmt.Errorf("listen: other machines can reach %s; name a file with a token in token_file, or listen on 127.0.0.1", a.Listen))
	}
	return errors.Join(append(errs, a.Access.Validate())...)
}

// adminKey is the section of the admin port in a mesh file.
const adminKey = "gateway.admin"

// listenAdmin opens the admin port.
func (g *Gateway) listenAdmin(ctx context.Context) (*server, error) {
	admin := g.settings.Admin
	if admin.Listen == "" {
		return &server{}, nil
	}
	at := address{listen: admin.Listen, key: adminKey + ".listen", tls: g.operators.tls}
	return g.listen(ctx, at, g.closeWhenStopping(g.adminHandler()))
}

func (g *Gateway) adminHandler() http.Handler {
	s := adminapi.Settings{
		DeadLetters: store.NewDeadLetters(g.bus, store.Settings{}), Health: g.Ready, Logger: g.log,
		Pipelines: g.pipelines, Traffic: g.service, MaxPayload: g.settings.MaxPayload, Stopping: g.stopped,
		Tokens: g.operators.tokens,
	}
	if g.membership != nil {
		s.Membership = g.membership
	}
	return adminapi.Handler(s)
}
