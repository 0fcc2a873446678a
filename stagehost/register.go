package stagehost

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/roster"
)

// Registry is where a host says that it is there.
type Registry struct {
	Announcer discovery.Announcer
	Table     discovery.Table
}

// ErrNotRegistered is why a host is not ready that the registry has not heard of yet.
var ErrNotRegistered = errors.New("the mesh's registry has not heard of it yet")

// registration is whether the registry has heard of the host.
type registration struct {
	mu sync.Mutex
	// err is why it has not, nil where it has ever been.
	err error
	// changed is closed when it has for the first time; nil where nobody waits.
	changed chan struct{}
}

func registrationIn(r *Registry) registration {
	if r == nil {
		return registration{}
	}
	return registration{err: ErrNotRegistered, changed: make(chan struct{})}
}

func (r *registration) get() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// heard books what the registry says. A host that was registered serves on while the
// registry is away: nobody needs it for that.
func (r *registration) heard(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err == nil && r.err != nil:
		r.err = nil
		close(r.changed)
	case err != nil && r.err != nil:
		r.err = fmt.Errorf("%w: %w", ErrNotRegistered, err)
	}
}

// register keeps the host in the registry, if there is one, from when it serves
// until the context ends.
func (h *Host) register(ctx context.Context) error {
	r := h.settings.Registry
	if r == nil || h.served(ctx) != nil {
		return nil //nolint:nilerr // see above
	}
	saying, said := errgroup.WithContext(ctx)
	saying.Go(func() error { return h.announce(said) })
	saying.Go(func() error {
		return roster.Publish(said, r.Table, roster.Settings{Current: h.Record, Logger: h.settings.Logger})
	})
	err := saying.Wait()
	if ctx.Err() != nil && err != nil {
		// It is told to end, and its check will see that it has gone.
		h.settings.Logger.Warn("the registry may have the host for a while", "error", err)
		return nil
	}
	return err
}

// announceAgain is how long it takes until a registry is asked again that has refused
// the credentials.
const announceAgain = 2 * time.Second

// announce keeps the host registered until the context ends. Where the registry refuses
// the credentials it serves on if it was ever registered: they may be mended.
func (h *Host) announce(ctx context.Context) error {
	instance := roster.Instance(h.Record())
	instance.TLS = h.checkTLS()
	again := time.NewTimer(announceAgain)
	defer again.Stop()
	for first := true; ; first = false {
		err := h.settings.Registry.Announcer.Announce(ctx, instance, h.registration.heard)
		if !errors.Is(err, discovery.ErrDenied) || ctx.Err() != nil {
			return err
		}
		h.registration.heard(err)
		if first {
			h.settings.Logger.Warn("the registry does not take the host; trying again", "error", err)
		}
		again.Reset(announceAgain)
		select {
		case <-again.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// served waits until the host has served its stage.
func (h *Host) served(ctx context.Context) error {
	for {
		at, changed, _ := h.status.get()
		if at == stateReady {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// awaitRegistration waits until the registry has heard of the host.
func (h *Host) awaitRegistration(ctx context.Context) error {
	if h.registration.get() == nil {
		return nil
	}
	select {
	case <-h.registration.changed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stage %s: %w: %w", h.settings.Stage, ctx.Err(), h.Ready())
	}
}
