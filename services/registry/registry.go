// Package registry opens the registry that a mesh's file selects: Consul, or the mesh's
// own broker.
//
//	r, err := registry.New(registry.Settings{Mesh: "digits", Consul: &consul.Settings{Address: "127.0.0.1:8500"}})
//	go r.Run(ctx)                // the connection, until the context ends
//	settings.Registry = r.Host() // of a stagehost
package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/consul"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/mesh/credentials"
	"github.com/stagemesh/stagemesh/stagehost"
)

// Settings select the registry: either Consul or NATS is set. Mesh and Logger replace
// theirs.
type Settings struct {
	Mesh   string
	Consul *consul.Settings
	// TokenFile has the token for Consul; empty means none.
	TokenFile string
	NATS      *natskv.Settings
	Logger    *slog.Logger
}

// Registry is a mesh's registry.
type Registry struct {
	discovery.Registry
	run func(ctx context.Context) error
}

// New returns a registry. It does not connect.
func New(s Settings) (*Registry, error) {
	if s.Consul == nil {
		return newNATS(s)
	}
	settings := *s.Consul
	settings.Mesh, settings.Logger = s.Mesh, s.Logger
	if s.TokenFile != "" {
		var err error
		if settings.Token, err = credentials.Token(s.TokenFile); err != nil {
			return nil, fmt.Errorf("registry.consul.token_file: %w", err)
		}
	}
	if err := checkTLS(settings.TLS); err != nil {
		return nil, err
	}
	c, err := consul.New(settings)
	if err != nil {
		return nil, err
	}
	return &Registry{Registry: c, run: func(ctx context.Context) error {
		<-ctx.Done()
		c.Close()
		return nil
	}}, nil
}

// checkTLS reads the client's files: the client's own errors name no setting.
func checkTLS(t consul.TLS) error {
	if t.CAFile != "" {
		if _, err := credentials.Roots(t.CAFile); err != nil {
			return fmt.Errorf("registry.consul.ca_file: %w", err)
		}
	}
	if t.CertFile == "" {
		return nil
	}
	_, err := credentials.Pair{CertFile: t.CertFile, KeyFile: t.KeyFile}.Load("registry.consul.")
	return err
}

func newNATS(s Settings) (*Registry, error) {
	if s.NATS == nil {
		return nil, errors.New("registry: neither consul nor nats is set")
	}
	settings := *s.NATS
	settings.Mesh, settings.Logger = s.Mesh, s.Logger
	store, err := natskv.New(settings)
	if err != nil {
		return nil, err
	}
	return &Registry{Registry: store, run: store.Run}, nil
}

// Run holds the connection until the context ends.
func (r *Registry) Run(ctx context.Context) error { return r.run(ctx) }

// Around holds the connection while work runs, also after the context has ended, so that
// work can remove what it has registered. A nil registry has no connection.
func (r *Registry) Around(ctx context.Context, work func() error) error {
	if r == nil {
		return work()
	}
	ctx, end := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() { ended <- r.run(ctx) }()
	err := work()
	end()
	return errors.Join(err, <-ended)
}

// Host returns the part that a host needs, nil of a nil registry.
func (r *Registry) Host() *stagehost.Registry {
	if r == nil {
		return nil
	}
	return &stagehost.Registry{Announcer: r, Table: r}
}
