package natskv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/credentials"
)

// Settings select the broker, the credentials and the space to use.
type Settings struct {
	// Mesh is the name of the mesh: [a-z0-9-].
	Mesh string
	// URL of the broker, or several, separated by commas.
	URL string
	// Server, if set, is a broker in this process; URL is then ignored.
	Server nats.InProcessConnProvider
	// Full, if set, returns why that broker stores nothing in files; nil where it does.
	Full func() error
	// Name is the name of the connection on the broker.
	Name string
	// Auth has the files with credentials and certificates.
	Auth credentials.Broker
	// Replicas is the number of servers that store both streams; 0 means 1.
	Replicas int `yaml:"replicas"`
	// MaxTableBytes bounds the table, where each entry takes its key and 100 bytes more
	// than its value. The broker reserves it. 0 means 64 MiB. MaxInstancesBytes bounds
	// the instances, in memory; 0 means 8 MiB.
	MaxTableBytes     int64
	MaxInstancesBytes int64
	Logger            *slog.Logger
}

const (
	maxReplicas          = 5
	defaultMaxTable      = 64 << 20
	defaultMaxInstances  = 8 << 20
	smallestMaxTable     = 1 << 20
	smallestMaxInstances = 64 << 10
)

// Reserves returns what the broker reserves for a registry with these settings, in bytes
// of memory and on file, for each replica.
func (s Settings) Reserves() (memory, store int64) {
	s = s.withDefaults()
	return s.MaxInstancesBytes, s.MaxTableBytes
}

func (s Settings) withDefaults() Settings {
	s.Replicas = max(1, s.Replicas)
	s.MaxTableBytes = cmp.Or(s.MaxTableBytes, defaultMaxTable)
	s.MaxInstancesBytes = cmp.Or(s.MaxInstancesBytes, defaultMaxInstances)
	return s
}

func (s Settings) validate() error {
	if err := discovery.ValidateService(s.Mesh); err != nil {
		return fmt.Errorf("mesh: %w", err)
	}
	if s.Logger == nil {
		return fmt.Errorf("%w: the logger is missing", discovery.ErrInvalid)
	}
	if s.Replicas > maxReplicas {
		return fmt.Errorf("%w: %d replicas, at most %d are possible", discovery.ErrInvalid, s.Replicas, maxReplicas)
	}
	if s.MaxTableBytes < smallestMaxTable || s.MaxInstancesBytes < smallestMaxInstances {
		return fmt.Errorf("%w: a table of %d bytes and instances of %d, at least %d and %d are needed",
			discovery.ErrInvalid, s.MaxTableBytes, s.MaxInstancesBytes, smallestMaxTable, smallestMaxInstances)
	}
	if s.Server != nil {
		return nil
	}
	for text := range strings.SplitSeq(s.URL, ",") {
		if err := validateURL(strings.TrimSpace(text)); err != nil {
			return fmt.Errorf("%w: the broker's URL: %w", discovery.ErrInvalid, err)
		}
	}
	return nil
}

// validateURL checks a URL. Its errors quote nothing of it: it may have a password.
func validateURL(text string) error {
	if !strings.Contains(text, "://") {
		text = "nats://" + text
	}
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return errors.New("unreadable") // the error quotes the URL
	case u.Hostname() == "":
		return errors.New("the host is missing")
	}
	return nil
}

// Store is a registry on a broker.
type Store struct {
	settings   Settings
	names      names
	connection *connection
	table      jetstream.StreamConfig
	instances  jetstream.StreamConfig
	markerTTL  time.Duration
}

var _ discovery.Registry = (*Store)(nil)

// New returns a store that connects when it runs.
func New(s Settings) (*Store, error) {
	s = s.withDefaults()
	if err := s.validate(); err != nil {
		return nil, err
	}
	if _, err := s.Auth.Options(); err != nil {
		return nil, fmt.Errorf("%w: %w", discovery.ErrInvalid, err)
	}
	return &Store{
		settings: s, names: names{s.Mesh}, connection: newConnection(s.Logger), markerTTL: markerTTL,
		table: s.tableConfig(), instances: s.instancesConfig(),
	}, nil
}

// Run holds the connection until the context ends. Call it once. It returns early, with
// discovery.ErrInvalid, only if no connection is possible with the settings.
func (s *Store) Run(ctx context.Context) error { return s.connection.run(ctx, s.settings) }

// retry runs a request that needs a stream, and repeats it while the store is unavailable.
func (s *Store) retry(ctx context.Context, stream jetstream.StreamConfig, request func(ctx context.Context, on *session) error) error {
	for tried := newAttempts(); ; pause(ctx) {
		err := s.once(ctx, stream, request)
		if !errors.Is(err, discovery.ErrUnavailable) || ctx.Err() != nil || tried.areOver(err) {
			return err
		}
	}
}

// once runs a request once; where the stream is missing, it creates it and runs the
// request again.
func (s *Store) once(ctx context.Context, stream jetstream.StreamConfig, request func(ctx context.Context, on *session) error) error {
	if ctx.Err() != nil {
		return timeoutError(ctx)
	}
	on, err := s.connection.await(ctx)
	if err == nil {
		err = request(ctx, on)
	}
	if errors.Is(err, errMissing) {
		if _, err = on.stream(ctx, stream); err == nil {
			err = request(ctx, on)
		}
	}
	return err
}
