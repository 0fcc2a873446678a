package natskv

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

// Store is a registry and a table on a broker.
type Store struct {
	settings  Settings
	names     names
	link      *link
	table     jetstream.StreamConfig
	instances jetstream.StreamConfig
	markerTTL time.Duration
	own       *own
}

var (
	_ discovery.Registry = (*Store)(nil)
	_ discovery.Table    = (*Store)(nil)
)

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
		settings: s, names: names{s.Mesh}, link: newLink(s.Logger), markerTTL: markerTTL,
		table: s.tableConfig(), instances: s.instancesConfig(), own: newOwn(),
	}, nil
}

// Run holds the connection until the context ends. It is called once. It ends early,
// with discovery.ErrInvalid, only where no connection can ever come of the settings.
func (s *Store) Run(ctx context.Context) error { return s.link.run(ctx, s.settings) }

// reach asks the store what needs its stream, and again for a while where it is away.
func (s *Store) reach(ctx context.Context, stream jetstream.StreamConfig, ask func(ctx context.Context, on *session) error) error {
	for late := time.Now().Add(patience); ; {
		err := s.once(ctx, stream, ask)
		if !errors.Is(err, discovery.ErrUnavailable) {
			return err
		}
		if time.Now().After(late) {
			return err
		}
		if !pause(ctx) {
			return ended(ctx)
		}
	}
}

// once asks once.
func (s *Store) once(ctx context.Context, stream jetstream.StreamConfig, ask func(ctx context.Context, on *session) error) error {
	if ctx.Err() != nil {
		return ended(ctx)
	}
	on, err := s.link.wait(ctx)
	if err == nil {
		err = on.ensure(ctx, stream)
	}
	if err == nil {
		err = ask(ctx, on)
	}
	if errors.Is(err, errMissing) {
		on.forget(stream)
	}
	return err
}
