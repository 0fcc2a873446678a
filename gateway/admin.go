package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"

	"github.com/stagemesh/stagemesh/gateway/adminapi"
	"github.com/stagemesh/stagemesh/mesh/deadletter"
)

// Admin is the port for operators. Its files are read when the gateway starts.
type Admin struct {
	// Listen is its address; empty means that there is no such port.
	Listen string
	// TokenFile holds the token that callers have to know. Without one the port
	// listens on a loopback address only.
	TokenFile string
	// CertFile and KeyFile hold a certificate chain and its key, in PEM; without
	// them the port is plain HTTP.
	CertFile, KeyFile string
}

// Validate checks what can be told without reading the files. Errors begin with
// the key that they are about.
func (a Admin) Validate() error {
	var errs []error
	if a.Listen != "" && a.TokenFile == "" && adminapi.Exposed(a.Listen) {
		errs = append(errs, fmt.Errorf("listen: other machines can reach %s; name a file with a token in token_file, or listen on 127.0.0.1", a.Listen))
	}
	if a.CertFile != "" && a.KeyFile == "" {
		errs = append(errs, errors.New("cert_file: has no key; name its file in key_file"))
	}
	if a.KeyFile != "" && a.CertFile == "" {
		errs = append(errs, errors.New("key_file: has no certificate; name its file in cert_file"))
	}
	return errors.Join(errs...)
}

// adminKey is where the admin port is in a mesh's file.
const adminKey = "gateway.admin"

// adminErrors puts the key before each of what Validate says.
func adminErrors(err error) error {
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		var errs []error
		for _, one := range several.Unwrap() {
			errs = append(errs, adminErrors(one))
		}
		return errors.Join(errs...)
	}
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s.%w", adminKey, err)
}

// listenAdmin opens the admin port.
func (g *Gateway) listenAdmin(ctx context.Context) (*server, error) {
	admin := g.settings.Admin
	if admin.Listen == "" {
		return &server{}, nil
	}
	handler, err := g.adminHandler()
	if err != nil {
		return nil, adminErrors(err)
	}
	at := where{listen: admin.Listen, key: adminKey + ".listen"}
	if at.tls, err = admin.tls(); err != nil {
		return nil, adminErrors(err)
	}
	return g.listen(ctx, at, g.lettingGo(handler))
}

func (g *Gateway) adminHandler() (http.Handler, error) {
	s := adminapi.Settings{
		Letters: deadletter.New(g.bus, deadletter.Settings{}), Health: g.Ready, Logger: g.log,
		Pipelines: g.pipelines, Traffic: g.service, MaxPayload: g.settings.Call.MaxPayload, Stopping: g.stopped,
	}
	if g.roster != nil {
		s.Roster = g.roster
	}
	if file := g.settings.Admin.TokenFile; file != "" {
		token, err := adminapi.ReadToken(file)
		if err != nil {
			return nil, fmt.Errorf("token_file: %w", err)
		}
		s.Token = token
	}
	return adminapi.Handler(s), nil
}

// tls is nil where the port is plain.
func (a Admin) tls() (*tls.Config, error) {
	if a.CertFile == "" {
		return nil, nil
	}
	certificate, err := tls.LoadX509KeyPair(a.CertFile, a.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("cert_file: %w", err)
	}
	return &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}, nil
}
