package meshfile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/consul"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/jobs/dispatch"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
)

// RegistryConfig is where hosts register and pipelines are kept: one of the three, or the
// mesh's own broker if none is set.
type RegistryConfig struct {
	// None is true when there is no registry.
	None   bool             `yaml:"none"`
	Consul *Consul          `yaml:"consul"`
	NATS   *natskv.Settings `yaml:"nats"`
}

// Consul is a Consul agent.
type Consul struct {
	// TokenFile holds the ACL token.
	TokenFile string `yaml:"token_file,path"`
	consul.Settings
}

// kv returns the settings of a registry in the broker.
func (r RegistryConfig) kv() natskv.Settings {
	if r.NATS == nil {
		return natskv.Settings{}
	}
	return *r.NATS
}

func (r RegistryConfig) validate() error {
	if r.Consul != nil && r.NATS != nil {
		return errors.New("consul and nats; a mesh has one registry")
	}
	if r.None && (r.Consul != nil || r.NATS != nil) {
		return errors.New("none: and there is one; leave out one of them")
	}
	if c := r.Consul; c != nil {
		return c.validate()
	}
	if n := r.NATS; n != nil {
		return config.NotNegative("nats.replicas", n.Replicas)
	}
	return nil
}

func (c Consul) validate() error {
	errs := []error{credentials.Pair{CertFile: c.CertFile, KeyFile: c.KeyFile}.Check("consul.")}
	if secure := c.Enabled || c.CAFile != ""; !secure {
		const reason = "is for TLS; say tls: true, or name the agent's authority in ca_file"
		errs = append(errs, unset("consul.cert_file", c.CertFile, reason), unset("consul.server_name", c.ServerName, reason))
	}
	return errors.Join(errs...)
}

// Registry is a mesh's registry: Consul, or the mesh's own broker.
type Registry struct {
	discovery.Registry
	run func(ctx context.Context) error
}

// NewRegistry returns the mesh's registry; nil means that it has none. It reads files
// and dials nothing.
func NewRegistry(mesh string, c RegistryConfig, broker bus.Settings, log *slog.Logger) (*Registry, error) {
	switch {
	case c.None:
		return nil, nil
	case c.Consul != nil:
		return newConsul(mesh, *c.Consul, log)
	}
	settings := c.kv()
	settings.Mesh, settings.URL, settings.Server, settings.Auth, settings.Logger = mesh, broker.URL, broker.Server, broker.Auth, log
	settings.Full = broker.Store
	store, err := natskv.New(settings)
	if err != nil {
		return nil, err
	}
	return &Registry{Registry: store, run: store.Run}, nil
}

func newConsul(mesh string, c Consul, log *slog.Logger) (*Registry, error) {
	settings := c.Settings
	settings.Mesh, settings.Logger = mesh, log
	if c.TokenFile != "" {
		var err error
		if settings.Token, err = credentials.Token(c.TokenFile); err != nil {
			return nil, fmt.Errorf("registry.consul.token_file: %w", err)
		}
	}
	// The client reads these files too, but its errors name no key.
	if c.CAFile != "" {
		if _, err := credentials.Roots(c.CAFile); err != nil {
			return nil, fmt.Errorf("registry.consul.ca_file: %w", err)
		}
	}
	if c.CertFile != "" {
		if _, err := (credentials.Pair{CertFile: c.CertFile, KeyFile: c.KeyFile}).Load("registry.consul."); err != nil {
			return nil, err
		}
	}
	client, err := consul.New(settings)
	if err != nil {
		return nil, err
	}
	return &Registry{Registry: client, run: func(ctx context.Context) error {
		<-ctx.Done()
		client.Close()
		return nil
	}}, nil
}

// Passing returns how many instances of a service pass their checks in Consul: the mesh's
// registry, or else the agent on this machine.
func (r *Registry) Passing(ctx context.Context, service string) (int, error) {
	if r != nil {
		if of, ok := r.Registry.(*consul.Registry); ok {
			return of.Passing(ctx, service)
		}
	}
	agent, err := consul.New(consul.Settings{Mesh: "any"})
	if err != nil {
		return 0, err
	}
	defer agent.Close()
	return agent.Passing(ctx, service)
}

// Run holds the connection until the context ends.
func (r *Registry) Run(ctx context.Context) error { return r.run(ctx) }

// Around holds the connection while a function works, also after the context has ended,
// so that the function can still deregister. A nil registry has no connection.
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

// Host returns the registry of a host's settings, with the table of its models, which may be
// nil; nil without a registry.
func (r *Registry) Host(models *Registry) *stagehost.Registry {
	if r == nil {
		return nil
	}
	out := &stagehost.Registry{Announcer: r, Table: r}
	if models != nil {
		out.Models, out.Watcher = models, r
	}
	return out
}

// ModelTable returns the registry of models, which is always on the broker: Consul sends all
// entries again for each change. It is this one if that is there, too.
func (r *Registry) ModelTable(mesh string, broker bus.Settings, log *slog.Logger) (*Registry, error) {
	if r == nil || !r.isConsul() {
		return r, nil
	}
	return NewRegistry(mesh, RegistryConfig{}, broker, log)
}

func (r *Registry) isConsul() bool {
	_, ok := r.Registry.(*consul.Registry)
	return ok
}

// Gateway returns the registry of a gateway's settings, with the table of its models; nil
// without one.
func (r *Registry) Gateway(models *Registry) *gateway.Registry {
	if r == nil {
		return nil
	}
	out := &gateway.Registry{Watcher: r, Table: r, Models: models}
	if r.isConsul() {
		// Prometheus asks Consul where gateways are; nobody asks a registry on the broker.
		out.Announcer = r
	}
	return out
}

// Reserve is what a broker sets aside for a mesh, in bytes.
type Reserve struct {
	Memory int64
	Store  int64
}

// ReserveOf returns what a mesh with these queues reserves. Where none of them is
// on file there are no dead letters; requests with an idempotency key have their
// answers stored all the same.
func ReserveOf(queues []stagehost.QueueSettings, results, deadLetters, keys store.Settings) Reserve {
	var out Reserve
	for _, q := range queues {
		size := cmp.Or(q.MaxBytes, stagehost.DefaultMaxBytes)
		if has(q.Durabilities, pipeline.Memory) {
			out.Memory += size
		}
		if has(q.Durabilities, pipeline.File) {
			out.Store += size
		}
	}
	if out.Store > 0 {
		out.Store += cmp.Or(deadLetters.MaxBytes, store.DefaultMaxBytes)
	}
	if len(queues) > 0 {
		out.Store += store.DefaultRunMaxBytes + cmp.Or(results.MaxBytes, store.DefaultMaxBytes) + cmp.Or(keys.MaxBytes, store.DefaultMaxBytes)
	}
	return out
}

// Registry adds the reservation of a registry on the broker.
func (r Reserve) Registry(c RegistryConfig) Reserve {
	if c.None {
		return r
	}
	memory, store := c.kv().Reserves()
	if c.Consul != nil {
		memory = 0 // only models are on the broker
	}
	return Reserve{Memory: r.Memory + memory, Store: r.Store + store}
}

// Jobs adds the reservation of queues of jobs.
func (r Reserve) Jobs(c dispatch.Config) Reserve {
	if len(c.Queues) > 0 {
		r.Store += c.Reserves()
	}
	return r
}

// has reports whether a stage has a queue of that durability; one that lists
// none has all.
func has(durabilities []pipeline.Durability, d pipeline.Durability) bool {
	return len(durabilities) == 0 || slices.Contains(durabilities, d)
}
