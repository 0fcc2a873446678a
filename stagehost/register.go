package stagehost

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/discovery"
)

// Registry is where a host registers.
type Registry struct {
	Announcer discovery.Announcer
	Table     discovery.Table
}

// ErrNotRegistered is why a host is not ready before its first registration.
var ErrNotRegistered = errors.New("it is not registered with the mesh's registry yet")

// registration is whether the host was ever registered.
type registration struct {
	mu sync.Mutex
	// err is why it was not, nil once it was.
	err error
	// changed closes with the first registration; it is nil without a registry.
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

// report takes reports of Announce. A host that was registered once stays ready while the
// registry is unavailable: requests do not need it.
func (r *registration) report(err error) {
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

// register keeps the host registered, if there is a registry, from when it serves its
// stage until the context ends.
func (h *Host) register(ctx context.Context) error {
	r := h.settings.Registry
	if r == nil || h.awaitServing(ctx) != nil {
		return nil //nolint:nilerr // the context has ended
	}
	work, registering := errgroup.WithContext(ctx)
	work.Go(func() error { return h.announce(registering) })
	work.Go(func() error {
		return discovery.PublishHost(registering, r.Table, h.Record, h.settings.Logger)
	})
	err := work.Wait()
	if ctx.Err() != nil && err != nil {
		// The host stops, and what remains in the registry expires.
		h.settings.Logger.Warn("the registry may keep the host for a while", "error", err)
		return nil
	}
	return err
}

// retryDenied is how long a host waits after the registry rejected the credentials.
const retryDenied = 2 * time.Second

// announce keeps the host registered until the context ends. It retries after the registry
// rejected the credentials, as an operator may mend them.
func (h *Host) announce(ctx context.Context) error {
	instance := discovery.HostInstance(h.Record())
	instance.TLS = h.checkTLS()
	retry := time.NewTimer(retryDenied)
	defer retry.Stop()
	for first := true; ; first = false {
		err := h.settings.Registry.Announcer.Announce(ctx, instance, h.registration.report)
		if !errors.Is(err, discovery.ErrDenied) || ctx.Err() != nil {
			return err
		}
		h.registration.report(err)
		if first {
			h.settings.Logger.Warn("the registry rejects the host; retrying", "error", err)
		}
		retry.Reset(retryDenied)
		select {
		case <-retry.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// awaitServing waits until the host serves its stage.
func (h *Host) awaitServing(ctx context.Context) error {
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

// awaitRegistration waits until the host was registered.
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
