package stagehost

import (
	"context"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Registry is where a host registers.
type Registry struct {
	Announcer discovery.Announcer
	Table     discovery.Table
	// Models is the table of models, and Watcher finds the stage's hosts, for a stage that
	// loads models.
	Models  discovery.Table
	Watcher discovery.Watcher
}

// register keeps the host registered, if there is a registry, from when it serves its
// stage until the context ends.
func (h *Host) register(ctx context.Context) error {
	r := h.settings.Registry
	if r == nil || h.status.await(ctx, func(s *status) bool { return s.state == stateReady }) != nil {
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

// announce keeps the host registered until the context ends.
func (h *Host) announce(ctx context.Context) error {
	instance := discovery.HostInstance(h.Record())
	instance.TLS = h.checkTLS()
	return discovery.KeepAnnounced(ctx, h.settings.Registry.Announcer, instance, h.status.recordRegistration, h.settings.Logger)
}

// Record returns the record that the host publishes. Call it after the runner has
// started.
func (h *Host) Record() *meshv1.HostRecord {
	s, r := h.settings, h.loadRecord()
	r.Version, r.Labels, r.Operations = s.Version, s.Labels, s.Operations
	description := h.Describe()
	r.Engine = description.Engine
	r.Spec, r.Limits = description.Published()
	if addr := h.Addr(); addr != nil {
		r.Address = config.Advertised(addr.String(), s.Advertise)
	}
	for _, d := range s.Queue.Durabilities {
		r.Durabilities = append(r.Durabilities, string(d))
	}
	if staffed, ok := s.Runner.(runner.WorkerReporter); ok {
		for i, w := range staffed.Workers() {
			r.Workers = append(r.Workers, &meshv1.WorkerRecord{Index: uint32(i), State: w.State, Incarnation: w.Incarnation, Cause: w.Cause})
		}
	}
	return r
}

// loadRecord returns the part of the record that is about its load.
func (h *Host) loadRecord() *meshv1.HostRecord {
	s := h.settings
	inFlight, running, wait, learned := h.items.Load()
	r := &meshv1.HostRecord{
		Mesh: string(s.Mesh), Stage: string(s.Stage), Host: string(s.Host),
		MaxInFlight: uint32(s.MaxInFlight), Slots: uint32(s.Runner.Concurrency()),
		InFlight: uint32(inFlight), Running: uint32(running), QueueWait: durationpb.New(wait), BatchEstimate: learned,
		StartedAt: timestamppb.New(h.connectedAt), Draining: h.status.isLeaving(),
	}
	if h.models != nil {
		r.Cache = h.models.Record()
	}
	if err := h.serving(); err != nil {
		r.Cause = err.Error()
	} else {
		r.Ready = true
	}
	return r
}

// demand returns what gateways learn from how many hosts the stage should have.
func (h *Host) demand() *meshv1.DemandAnswer {
	r := h.loadRecord()
	r.Limits = Limits{MaxSize: h.settings.Batch.MaxSize}.toProto()
	items, busy := h.items.Work()
	return &meshv1.DemandAnswer{Host: r, Items: items, Busy: durationpb.New(busy)}
}
