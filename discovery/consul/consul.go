package consul

import (
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
	// DefaultAddress is the agent's of this machine.
	DefaultAddress = "127.0.0.1:8500"
	// DefaultWaitTime is how long a blocking query waits for a change.
	DefaultWaitTime = 10 * time.Second
	// DefaultCriticalAfter is after how long Consul removes what does not pass.
	DefaultCriticalAfter = time.Minute

	// askTime bounds a question that does not wait.
	askTime = 5 * time.Second
	// waitSlack is what an agent adds to the time that a query waits, at most a
	// sixteenth, and what the answer takes.
	waitSlack = 3 * time.Second
)

// Settings say where Consul is. What is empty has its default.
type Settings struct {
	// Mesh is what the table is kept below.
	Mesh string
	// Address is an agent's: host:port, or unix:///path.
	Address string `yaml:"address"`
	// Token is sent with every request; it is a secret.
	Token string
	// Datacenter, Namespace and Partition are the agent's own where empty.
	Datacenter string `yaml:"datacenter"`
	Namespace  string `yaml:"namespace"`
	Partition  string `yaml:"partition"`
	TLS
	// Stale lets any server answer reads, which may then be older, also than what was
	// read before.
	Stale bool `yaml:"stale"`
	// WaitTime is how long a blocking query waits.
	WaitTime time.Duration
	// CriticalAfter is after how long Consul removes what does not pass; Consul
	// takes a minute at least.
	CriticalAfter time.Duration
	// Logger takes what happens to connections; nil discards it.
	Logger *slog.Logger
}

// TLS says how the agent is spoken to; the zero value is without TLS.
type TLS struct {
	// Enabled is for agents whose certificate the system trusts; a CAFile enables
	// it too.
	Enabled bool `yaml:"tls"`
	// CAFile has the certificates that the agent's is signed by, CertFile and
	// KeyFile the client's own.
	CAFile   string `yaml:"ca_file,path"`
	CertFile string `yaml:"cert_file,path"`
	KeyFile  string `yaml:"key_file,path"`
	// ServerName is the name in the agent's certificate.
	ServerName string `yaml:"server_name"`
}

// Registry is Consul. It implements discovery.Registry and discovery.Table.
type Registry struct {
	settings Settings
	client   *api.Client
	http     *http.Transport
	log      *slog.Logger
	// prefix is what the table is below.
	prefix string
}

var (
	_ discovery.Registry = (*Registry)(nil)
	_ discovery.Table    = (*Registry)(nil)
)

// New returns a registry, or what is wrong with the settings. It dials nothing.
func New(s Settings) (*Registry, error) {
	if s.Mesh == "" {
		return nil, errors.New("mesh: it is missing")
	}
	setDefault(&s.Address, DefaultAddress)
	setDefault(&s.WaitTime, DefaultWaitTime)
	setDefault(&s.CriticalAfter, DefaultCriticalAfter)
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	r := &Registry{settings: s, log: s.Logger, prefix: "stagemesh/" + discovery.Escape(s.Mesh) + "/"}
	r.http = &http.Transport{
		DialContext:         (&net.Dialer{Timeout: askTime, KeepAlive: askTime}).DialContext,
		TLSHandshakeTimeout: askTime,
		// Each watch has a connection for itself.
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

// newClient returns a client of which the environment says nothing: the library would
// have it switch verification off, and name files, tokens and partitions.
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
	config.HttpClient.Transport = own{r.http, r.settings}
	// The token is for the agent alone.
	config.HttpClient.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	// Without one the library would look for another.
	setDefault(&config.Token, "none")
	return api.NewClient(config)
}

// own sends what the settings say of who asks, and nothing else.
type own struct {
	*http.Transport
	settings Settings
}

// RoundTrip implements http.RoundTripper.
func (o own) RoundTrip(r *http.Request) (*http.Response, error) {
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

func setDefault[T comparable](value *T, to T) {
	if *value == *new(T) {
		*value = to
	}
}

// Close ends the connections that are idle. It is called when nothing runs any more.
func (r *Registry) Close() { r.http.CloseIdleConnections() }

// query returns the options of a read, or of a write.
func (r *Registry) query(ctx context.Context) *api.QueryOptions {
	return (&api.QueryOptions{AllowStale: r.settings.Stale}).WithContext(ctx)
}

// latest returns the options of a read of all that was committed before it. A server
// that has just begun to lead would answer others with less.
func (r *Registry) latest(ctx context.Context) *api.QueryOptions {
	q := r.query(ctx)
	q.RequireConsistent = !r.settings.Stale
	return q
}

// failure returns an error of the client's as package discovery has it.
func failure(err error) error {
	var status api.StatusError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &status) && (status.Code == http.StatusForbidden || status.Code == http.StatusUnauthorized):
		return fmt.Errorf("%w: %s", discovery.ErrDenied, firstLine(status.Body))
	case errors.As(err, &status) && status.Code == http.StatusBadRequest && strings.HasPrefix(status.Body, wantsTLS):
		return fmt.Errorf("%w: the agent's port speaks TLS, and was asked without: say registry.consul.tls, or name its authority in registry.consul.ca_file", discovery.ErrUnavailable)
	case errors.As(err, &status) && status.Code < http.StatusInternalServerError && status.Code != http.StatusTooManyRequests:
		return fmt.Errorf("consul answers %d: %s", status.Code, firstLine(status.Body))
	case errors.As(err, &status):
		return fmt.Errorf("%w: consul answers %d: %s", discovery.ErrUnavailable, status.Code, firstLine(status.Body))
	default:
		return fmt.Errorf("%w: %w", discovery.ErrUnavailable, advised(err))
	}
}

// wantsTLS is what Go's server says to who speaks without TLS.
const wantsTLS = "Client sent an HTTP request to an HTTPS server."

// advised is an error of the connection with what is to be done about it, where it
// does not mend by itself.
func advised(err error) error {
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	switch {
	case errors.Is(err, http.ErrSchemeMismatch):
		return fmt.Errorf("%w; the agent's port has no TLS, which registry.consul.tls and registry.consul.ca_file ask for", err)
	case errors.As(err, &unknown):
		return fmt.Errorf("%w; registry.consul.ca_file names a file with the certificate of who vouches for the agent", err)
	case errors.As(err, &name):
		return fmt.Errorf("%w; registry.consul.server_name is the name in the agent's certificate", err)
	}
	return err
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return line
}

// refused reports whether a request has not reached a server.
func refused(err error) bool {
	var op *net.OpError
	var status api.StatusError
	return errors.As(err, &op) && op.Op == "dial" || errors.As(err, &status) && status.Code == http.StatusTooManyRequests
}
