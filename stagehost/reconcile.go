package stagehost

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	reconcileEvery = 2 * time.Second
	reconcileRetry = 100 * time.Millisecond
	// allEvery is how often the host asks for all that it needs of the broker,
	// whatever it knows to be there.
	allEvery = time.Minute
	// maxClockOffset is how far the broker's clock may be off: deadlines are
	// absolute.
	maxClockOffset = 100 * time.Millisecond
)

// reconcile keeps the queue existing and the puller on it: at the start, after
// every reconnect, when the broker says that something is missing, and every now
// and then. Mostly that is a look at each queue.
func (h *Host) reconcile(ctx context.Context) error {
	reconnects := h.bus.Reconnects()
	wait := time.NewTimer(0)
	defer wait.Stop()
	for {
		select {
		case <-wait.C:
		case <-h.vitals.changed:
			if !h.vitals.look(time.Now()) {
				continue
			}
		case <-reconnects:
			h.known.forget()
		case <-h.missing:
			h.known.forget()
		case <-ctx.Done():
			return ctx.Err()
		}
		wait.Reset(h.reconcileOnce(ctx, reconnects))
	}
}

// reconcileOnce returns how long to wait until the next time.
func (h *Host) reconcileOnce(ctx context.Context, reconnects <-chan struct{}) time.Duration {
	err := h.ensureOnConnection(ctx, reconnects)
	switch {
	case err == nil:
		h.becomeReady()
		return reconcileEvery
	case errors.Is(err, errReconnected):
		return 0
	case ctx.Err() == nil:
		h.notReady(err)
	}
	return reconcileRetry
}

var errReconnected = errors.New("the connection was replaced")

// ensureOnConnection is ensure, but ends with the connection: what was asked on
// one that broke is never answered, and waiting for it would keep the host from
// making a queue anew that was lost with the broker.
func (h *Host) ensureOnConnection(ctx context.Context, reconnects <-chan struct{}) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ensured := make(chan error, 1)
	go func() { ensured <- h.ensure(ctx) }()
	select {
	case err := <-ensured:
		return err
	case <-reconnects:
		cancel()
		<-ensured //nolint:errcheck // whatever it has found was so on the old connection
		return errReconnected
	}
}

// known is what of the broker's was there when the host last asked for all. It is
// reconcile's.
type known struct {
	queues  map[pipeline.Durability]bus.Epoch
	streams bool
	until   time.Time
}

func (k *known) forget() { *k = known{} }

// renew forgets what was learnt too long ago.
func (k *known) renew(now time.Time) {
	if now.After(k.until) {
		*k = known{queues: map[pipeline.Durability]bus.Epoch{}, until: now.Add(allEvery)}
	}
}

func (h *Host) ensure(ctx context.Context) error {
	if err := h.heedRunner(time.Now()); err != nil {
		return err
	}
	h.known.renew(time.Now())
	if !h.known.streams {
		if err := h.ensureStreams(ctx); err != nil {
			return err
		}
		h.known.streams = true
	}
	wait := h.settings.Queue.AckWait
	for _, d := range h.settings.Queue.Durabilities {
		info, err := h.ensureQueue(ctx, d)
		if err != nil {
			return err
		}
		if info.AckWait > 0 {
			wait = min(wait, info.AckWait)
		}
	}
	h.heedAckWait(wait)
	return h.startAlive()
}

// ensureStreams makes what durable requests need, and what was found missing. A
// host without a file queue serves on where the broker has no room.
func (h *Host) ensureStreams(ctx context.Context) error {
	err := h.starts.Ensure(ctx)
	if h.settings.Queue.durable() {
		return errors.Join(err, h.results.Ensure(ctx), h.dead.Ensure(ctx))
	}
	if h.storeMissing.Load() {
		err = errors.Join(err, h.results.Ensure(ctx))
	}
	if err != nil {
		h.settings.Logger.Debug("run starts, or answers, have no place", "error", err)
	}
	return nil
}

// heedAckWait makes the host speak up as often as its queues want to hear: they
// may have been made with other settings than its own.
func (h *Host) heedAckWait(wait time.Duration) {
	if was := time.Duration(h.ackWait.Swap(int64(wait))); was != wait {
		h.post(speak{})
		h.settings.Logger.Warn("the queue was made with another ack_wait, which holds; raise queue.version to change it", "ack_wait", wait, "own", h.settings.Queue.AckWait)
	}
}

func (h *Host) ensureQueue(ctx context.Context, d pipeline.Durability) (bus.QueueInfo, error) {
	info, err := h.wholeQueue(ctx, d)
	if err != nil {
		return bus.QueueInfo{}, err
	}
	h.clock.look(info.ClockOffset, info.RoundTrip, time.Now())
	h.post(&queueReplaced{queue: d, epoch: info.Epoch})
	if off := info.ClockOffset.Abs() - info.RoundTrip/2; off > maxClockOffset {
		h.stopAlive()
		h.puller.Use(d, "")
		return bus.QueueInfo{}, fmt.Errorf("the broker's clock is %s ahead of this host's, at most %s is tolerated: synchronise the clocks", info.ClockOffset, maxClockOffset)
	}
	h.puller.Use(d, info.Epoch)
	return info, nil
}

// wholeQueue looks at the queue, and makes what is missing of it where it is not
// known to be there.
func (h *Host) wholeQueue(ctx context.Context, d pipeline.Durability) (bus.QueueInfo, error) {
	if made, ok := h.known.queues[d]; ok {
		info, err := h.bus.Queue(ctx, h.settings.Stage, d)
		if err == nil && info.Epoch == made && info.Whole() {
			return info, nil
		}
	}
	q := h.settings.Queue
	info, err := h.bus.EnsureQueue(ctx, bus.QueueSettings{
		Stage: h.settings.Stage, Durability: d,
		MaxItems: q.MaxItems, MaxBytes: q.MaxBytes, MaxAge: q.MaxAge,
		AckWait: q.AckWait, Replicas: q.Replicas, Version: q.Version,
	})
	if err == nil {
		h.known.queues[d] = info.Epoch
	}
	return info, err
}

// startAlive makes the host answer that it is there, once.
func (h *Host) startAlive() error {
	if h.alive != nil {
		return nil
	}
	stop, err := h.bus.ServeAlive(h.settings.Stage, h.settings.Host, h.settings.Queue.Durabilities, h.busy.Load)
	h.alive = stop
	return err
}

func (h *Host) stopAlive() {
	if h.alive == nil {
		return
	}
	if err := h.alive(); err != nil {
		h.settings.Logger.Debug("end of alive answers", "error", err)
	}
	h.alive = nil
}

func (h *Host) becomeReady() {
	if was, _, _ := h.status.get(); was != stateReady {
		h.settings.Logger.Info("ready", "max_in_flight", h.settings.MaxInFlight, "slots", h.settings.Runner.Concurrency())
	}
	h.status.set(stateReady)
}

func (h *Host) notReady(err error) {
	if was, _, _ := h.status.get(); was != stateNotReady {
		h.settings.Logger.Warn("not ready; trying again", "error", err)
	}
	h.status.setCause(stateNotReady, err)
}

// Ready returns nil when the host serves its stage, and the registry, if there is one,
// has heard of it; else why not.
func (h *Host) Ready() error {
	if err := h.serving(); err != nil {
		return err
	}
	if err := h.registration.get(); err != nil {
		return fmt.Errorf("%w: %w", ErrNotReady, err)
	}
	return nil
}

// serving returns nil when the host serves its stage, else why it does not.
func (h *Host) serving() error {
	at, _, cause := h.status.get()
	var away error
	if at == stateReady || at == stateNotReady || at == stateJoining {
		away = h.bus.Away()
	}
	switch {
	case away != nil:
		return fmt.Errorf("%w: %w", ErrNotReady, away)
	case at == stateReady:
		return nil
	case at == stateStarting:
		return fmt.Errorf("%w: the runner starts", ErrNotReady)
	case cause != nil:
		return fmt.Errorf("%w: %w", ErrNotReady, cause)
	default:
		return fmt.Errorf("%w: %s", ErrNotReady, at)
	}
}

// WaitReady returns when the host serves its stage. It fails when the context
// ends or the host does.
func (h *Host) WaitReady(ctx context.Context) error {
	for {
		at, changed, _ := h.status.get()
		switch at {
		case stateReady:
			return h.awaitRegistration(ctx)
		case stateDraining, stateStopped:
			return fmt.Errorf("stage %s: the host has stopped", h.settings.Stage)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("stage %s: %w: %w", h.settings.Stage, ctx.Err(), h.Ready())
		}
	}
}
