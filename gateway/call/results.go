package call

import (
	"context"
	"log/slog"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/store"
)

// results is where requests have their answers stored.
type results struct {
	store      *store.Results
	reconnects *bell
	place      *place
}

func newResults(b *bus.Bus, s store.Settings, log *slog.Logger) *results {
	r := &results{store: store.NewResults(b, s), reconnects: newBell()}
	r.place = newPlace("the broker keeps no answers", r.store.Ensure, r.reconnects, log)
	return r
}

// ensure returns nil when answers can be stored.
func (r *results) ensure(ctx context.Context) *fault.Fault { return r.place.ensure(ctx) }

// watch wakes the calls that look for their answers after every reconnect, until the context ends.
func (r *results) watch(ctx context.Context, reconnects <-chan struct{}) {
	for {
		select {
		case <-reconnects:
			r.reconnects.ring()
		case <-ctx.Done():
			return
		}
	}
}
