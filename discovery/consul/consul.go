package consul

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/stagemesh/stagemesh/discovery"
)

const (
	// DefaultAddress is the agent on this machine.
	DefaultAddress = "127.0.0.1:8500"
	// DefaultWaitTime is how long a blocking query waits for a change.
	DefaultWaitTime = 10 * time.Second
	// criticalAfter is when Consul removes an instance whose check fails; a minute is
	// its least.
	criticalAfter = time.Minute

	// requestTimeout bounds a request that does not block.
	requestTimeout = 5 * time.Second
	// waitSlack is the time that an answer may take after a blocking query. The agent adds
	// up to a sixteenth to the query's own wait.
	waitSlack = 3 * time.Second
)

// Settings select and configure Consul. Empty fields have defaults.
type Settings struct {
	// Mesh is the name of the mesh, which is part of every key.
	Mesh string
	// Address of the agent: host:port, or unix:///path.
	Address string `yaml:"address"`
	// Token is sent with every request; it is a secret.
	Token string
	// Datacenter, Namespace and Partition default to the agent's own.
	Datacenter string `yaml:"datacenter"`
	Namespace  string `yaml:"namespace"`
	Partition  string `yaml:"partition"`
	TLS
	// Stale lets any server answer reads, which may then be older than earlier reads.
	Stale bool `yaml:"stale"`
	// WaitTime is how long a blocking query waits for a change.
	WaitTime time.Duration
	// Logger receives connection events; nil discards them.
	Logger *slog.Logger
}

// TLS configures TLS to the agent; the zero value is plain text.
type TLS struct {
	// Enabled is for agents whose certificate the system trusts. A CAFile enables TLS
	// too.
	Enabled bool `yaml:"tls"`
	// CAFile has the authority of the agent's certificate, CertFile and KeyFile the
	// client's own certificate.
	CAFile   string `yaml:"ca_file,path"`
	CertFile string `yaml:"cert_file,path"`
	KeyFile  string `yaml:"key_file,path"`
	// ServerName is the name in the agent's certificate.
	ServerName string `yaml:"server_name"`
}

// Registry implements discovery.Registry on Consul.
type Registry struct {
	settings Settings
	client   *api.Client
	http     *http.Transport
	log      *slog.Logger
	// prefix is above all keys of the table.
	prefix string
}

var _ discovery.Registry = (*Registry)(nil)

// New returns a registry, or what is wrong with the settings. It does not connect.
func New(s Settings) (*Registry, error) {
	if s.Mesh == "" {
		return nil, errors.New("mesh: the name is missing")
	}
	s.Address = cmp.Or(s.Address, DefaultAddress)
	s.WaitTime = cmp.Or(s.WaitTime, DefaultWaitTime)
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	r := &Registry{settings: s, log: s.Logger, prefix: "stagemesh/" + string(discovery.KeyOf(s.Mesh)) + "/"}
	r.http = &http.Transport{
		DialContext:         (&net.Dialer{Timeout: requestTimeout, KeepAlive: requestTimeout}).DialContext,
		TLSHandshakeTimeout: requestTimeout,
		// Each watch has a connection of its own.
		MaxIdleConnsPerHost: 16, IdleConnTimeout: time.Minute,
	}
	config := &api.Config{
		Address: s.Address, Scheme: "http", Token: s.Token, Transport: r.http,
		Datacenter: s.Datacenter, Namespace: s.Namespace, Partition: s.Partition,
	}
	if s.TLS.Enabled || s.TLS.CAFile != "" {
		config.Scheme = "https"
		config.TLSConfig = api.TLSConfig{CAFile: s.TLS.CAFile, CertFile: s.TLS.CertFile, KeyFile: s.TLS.KeyFile, Address: s.TLS.ServerName}
	}
	var err error
	if r.client, err = r.newClient(config); err != nil {
		return nil, err
	}
	return r, nil
}

// newClient returns a client that ignores the environment: the library would let it
// switch verification off, and name files, tokens and partitions.
func (r *Registry) newClient(config *api.Config) (*api.Client, error) {
	if path, ok := strings.CutPrefix(config.Address, "unix://"); ok {
		dial := r.http.DialContext
		r.http.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx, "unix", path) }
		config.Address = "localhost"
	}
	var err error
	if config.HttpClient, err = api.NewHttpClient(r.http, config.TLSConfig); err != nil {
		return nil, err
	}
	config.HttpClient.Transport = explicitTransport{r.http, r.settings}
	// The token is for the agent alone.
	config.HttpClient.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	// Without a token the library would look for one.
	config.Token = cmp.Or(config.Token, "none")
	return api.NewClient(config)
}

// explicitTransport sends the credentials and scopes of the settings, and no others.
type explicitTransport struct {
	*http.Transport
	settings Settings
}

// RoundTrip implements http.RoundTripper.
func (o explicitTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Del("Authorization")
	if o.settings.Token == "" {
		r.Header.Del("X-Consul-Token")
	}
	query := r.URL.Query()
	for key, value := range map[string]string{"ns": o.settings.Namespace, "partition": o.settings.Partition} {
		if value == "" {
			query.Del(key)
		}
	}
	r.URL.RawQuery = query.Encode()
	return o.Transport.RoundTrip(r)
}

// Close closes idle connections. Call it when nothing else runs any more.
func (r *Registry) Close() { r.http.CloseIdleConnections() }

// options returns the options of a read, or of a write.
func (r *Registry) options(ctx context.Context) *api.QueryOptions {
	return (&api.QueryOptions{AllowStale: r.settings.Stale}).WithContext(ctx)
}

// consistentRead returns the options of a read of everything that was committed before. A
// server that has just begun to lead would answer other reads with less.
func (r *Registry) consistentRead(ctx context.Context) *api.QueryOptions {
	q := r.options(ctx)
	q.RequireConsistent = !r.settings.Stale
	return q
}

// classify returns an error of the client as one of package discovery.
func classify(err error) error {
	var status api.StatusError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &status) && (status.Code == http.StatusForbidden || status.Code == http.StatusUnauthorized):
		return fmt.Errorf("%w: %s", discovery.ErrDenied, firstLine(status.Body))
	case errors.As(err, &status) && status.Code == http.StatusBadRequest && strings.HasPrefix(status.Body, plainToTLS):
		return fmt.Errorf("%w: the agent's port needs TLS: set registry.consul.tls, or name its authority in registry.consul.ca_file", discovery.ErrUnavailable)
	case errors.As(err, &status) && status.Code < http.StatusInternalServerError && status.Code != http.StatusTooManyRequests:
		return fmt.Errorf("consul answers %d: %s", status.Code, firstLine(status.Body))
	case errors.As(err, &status):
		return fmt.Errorf("%w: consul answers %d: %s", discovery.ErrUnavailable, status.Code, firstLine(status.Body))
	default:
		return fmt.Errorf("%w: %w", discovery.ErrUnavailable, withAdvice(err))
	}
}

// plainToTLS is how Go's server answers plain text on a port with TLS.
const plainToTLS = "Client sent an HTTP request to an HTTPS server."

// withAdvice adds to an error of the connection what an operator has to do about it, if
// it does not mend by itself.
func withAdvice(err error) error {
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	switch {
	case errors.Is(err, http.ErrSchemeMismatch):
		return fmt.Errorf("%w; the agent's port has no TLS, which registry.consul.tls and registry.consul.ca_file turn on", err)
	case errors.As(err, &unknown):
		return fmt.Errorf("%w; registry.consul.ca_file names a file with the certificate of the agent's authority", err)
	case errors.As(err, &name):
		return fmt.Errorf("%w; registry.consul.server_name is the name in the agent's certificate", err)
	}
	return err
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return line
}

// wasNotSent reports whether a request has not reached a server.
func wasNotSent(err error) bool {
	var op *net.OpError
	var status api.StatusError
	return errors.As(err, &op) && op.Op == "dial" || errors.As(err, &status) && status.Code == http.StatusTooManyRequests
}
