package target

import (
	"context"
	"sync/atomic"

	"github.com/stagemesh/stagemesh/services/bench/load"
)

// Target is a mesh that is asked.
type Target struct {
	settings Settings
	client   client
	next     atomic.Uint64
}

var _ load.Target = (*Target)(nil)

// client asks in one protocol, for one of the prepared requests.
type client interface {
	ask(ctx context.Context, request int, into *load.Answer) error
	close()
}

// New returns a target. It connects to nothing before it is asked.
func New(s Settings) (*Target, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	out := &Target{settings: s}
	var err error
	switch s.Protocol {
	case HTTP:
		out.client, err = newPlain(s)
	case OIP:
		out.client, err = newModel(s)
	default:
		out.client = newRPC(s)
	}
	return out, err
}

// Do implements load.Target.
func (t *Target) Do(ctx context.Context, into *load.Answer) error {
	ctx, cancel := context.WithTimeout(ctx, t.settings.patience())
	defer cancel()
	turn := (t.next.Add(1) - 1) % uint64(len(t.settings.Inputs))
	return t.client.ask(ctx, int(turn), into)
}

// Close gives the connections back. It is called when no request is in flight.
func (t *Target) Close() { t.client.close() }
