package stagehost

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/internal/item"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

func (h *Host) queueMissing() {
	select {
	case h.missing <- struct{}{}:
	default:
	}
}

// reconcile keeps the queues existing and the puller on them: at the start, after
// every reconnect, when the broker reports that something is missing, and
// periodically. Mostly that is one request for each queue.
func (h *Host) reconcile(ctx context.Context) error {
	reconnects := h.bus.Reconnects()
	wait := time.NewTimer(0)
	defer wait.Stop()
	for {
		select {
		case <-wait.C:
		case <-h.runnerHealth.changed:
			if !h.runnerHealth.update(time.Now()) {
				continue
			}
		case <-reconnects:
			h.known = known{}
		case <-h.missing:
			// A broker that still removes the files would remove the successors' too.
			if err := process.Sleep(ctx, missingPause); err != nil {
				return err
			}
			h.known = known{}
		case <-ctx.Done():
			return ctx.Err()
		}
		wait.Reset(h.reconcileOnce(ctx, reconnects))
	}
}

// reconcileOnce returns how long to wait until the next time.
func (h *Host) reconcileOnce(ctx context.Context, reconnects <-chan struct{}) time.Duration {
	err := h.ensureOnConnection(ctx, reconnects)
	was, _, _ := h.status.get()
	switch {
	case err == nil:
		if was != stateReady {
			h.settings.Logger.Info("ready", "max_in_flight", h.settings.MaxInFlight, "slots", h.settings.Runner.Concurrency())
		}
		h.status.set(stateReady)
		return reconcileEvery
	case errors.Is(err, errReconnected):
		return 0
	case ctx.Err() == nil:
		if was != stateNotReady {
			h.settings.Logger.Warn("not ready; trying again", "error", err)
		}
		h.status.setCause(stateNotReady, err)
	}
	return reconcileRetry
}

var errReconnected = errors.New("the connection was replaced")

// ensureOnConnection is ensure, but ends with the connection: a request on a
// broken connection is never answered, and waiting for it would delay the
// recreation of a queue that was lost with the broker.
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
		<-ensured //nolint:errcheck // it is about the old connection
		h.known = known{}
		return errReconnected
	}
}

// known is what existed on the broker when the host last ensured all of it. Only
// reconcile uses it.
type known struct {
	queues  map[item.QueueKey]bus.Epoch
	streams bool
	until   time.Time
}

func (h *Host) ensure(ctx context.Context) error {
	now := time.Now()
	err := h.checkRunner(ctx, now)
	if err != nil {
		return err
	}
	if now.After(h.known.until) {
		h.known = known{queues: map[item.QueueKey]bus.Epoch{}, until: now.Add(ensureAllEvery)}
	}
	var noStreams error // which leaves the requests in memory
	if !h.known.streams {
		noStreams = h.ensureStreams(ctx)
		h.known.streams = noStreams == nil
	}
	if h.models != nil {
		if err := h.models.AwaitReady(ctx); err != nil {
			return err
		}
	}
	h.items.Refusal.Store(nil)
	if h.inFlight == nil {
		if h.inFlight, err = h.bus.ServeInFlight(h.settings.Stage); err != nil {
			return err
		}
	}
	wait := h.settings.Queue.AckWait
	for _, q := range h.pulled {
		least, failed := h.serveQueues(ctx, q, now, noStreams)
		wait, err = min(wait, least), cmp.Or(err, failed)
	}
	if err != nil {
		return err
	}
	h.stopAnswers(&h.failing)
	// Its queues may have been made with other settings than its own.
	if h.ackWait != wait {
		h.ackWait = wait
		h.items.Post(item.EventFunc(func(l *item.Loop) { l.SetAckWait(wait) })) // it may be shorter
		h.settings.Logger.Warn("the queue was made with another ack_wait, which holds; raise queue.version to change it", "ack_wait", wait, "own", h.settings.Queue.AckWait)
	}
	if h.forwarded == nil && h.models != nil && h.settings.Queue.durable() {
		h.forwarded, err = h.pulled[0].puller.ServeForwarded(h.settings.Host)
	}
	return err
}

// ensureStreams creates the streams of durable requests, and those found missing.
// A host without a file queue serves on where the broker has no space for them.
func (h *Host) ensureStreams(ctx context.Context) error {
	err := h.records.Runs.Ensure(ctx)
	if h.settings.Queue.durable() {
		return errors.Join(err, h.records.Results.Ensure(ctx), h.records.DeadLetters.Ensure(ctx))
	}
	if h.storeMissing.Load() {
		err = errors.Join(err, h.records.Results.Ensure(ctx))
	}
	if err != nil {
		h.settings.Logger.Debug("run records, or results, cannot be stored", "error", err)
	}
	return nil
}

// serveQueues ensures the queues of one name, and answers callers for those that are there. One that
// cannot be ensured for unhealthyGrace is left out: its callers get the cause at once. It returns the
// least ack wait, and why a queue is not served. noStreams is why durable requests cannot be stored.
func (h *Host) serveQueues(ctx context.Context, q *pulledQueues, now time.Time, noStreams error) (wait time.Duration, err error) {
	wait = h.settings.Queue.AckWait
	var served []pipeline.Durability
	isWaiting := false
	for _, d := range q.settings.Durabilities {
		info, failed := h.ensureQueue(ctx, q, d)
		if d == pipeline.File {
			failed = cmp.Or(failed, noStreams)
		}
		if failed == nil {
			wait = min(wait, cmp.Or(info.AckWait, wait))
			delete(q.failing, d)
			served = append(served, d)
			continue
		}
		if err = cmp.Or(err, failed); q.failing[d].IsZero() || !h.bus.Connected() || ctx.Err() != nil {
			q.failing[d] = now
		}
		isWaiting = isWaiting || now.Sub(q.failing[d]) < unhealthyGrace
	}
	if isWaiting {
		return wait, err
	}
	if !slices.Equal(served, q.served) {
		h.stopAnswers(&q.alive)
	}
	q.served = served
	if len(served) == 0 {
		h.serveFailing()
		return wait, err
	}
	cause := ""
	if err != nil {
		cause = item.WithoutFolders(err)
	}
	if q.alive == nil {
		var failed error
		q.alive, failed = h.bus.ServeAlive(q.name, h.settings.Host, served, cause, h.items.IsBusy.Load)
		err = cmp.Or(err, failed)
	}
	return wait, err
}

func (h *Host) ensureQueue(ctx context.Context, q *pulledQueues, d pipeline.Durability) (bus.QueueInfo, error) {
	info, err := h.wholeQueue(ctx, q, d)
	if err != nil {
		return bus.QueueInfo{}, err
	}
	h.items.Post(item.EventFunc(func(l *item.Loop) { l.ReplaceQueue(item.QueueKey{Name: q.name, Durability: d}, info.Epoch) }))
	if err := h.bus.ClockError(); err != nil {
		h.stopAnswers(&q.alive)
		q.puller.Use(d, "")
		return bus.QueueInfo{}, err
	}
	q.puller.Use(d, info.Epoch)
	return info, nil
}

// wholeQueue returns the queue, and creates what is missing of it where it is not
// known to exist.
func (h *Host) wholeQueue(ctx context.Context, q *pulledQueues, d pipeline.Durability) (bus.QueueInfo, error) {
	key := item.QueueKey{Name: q.name, Durability: d}
	if made, ok := h.known.queues[key]; ok {
		info, err := h.bus.Queue(ctx, q.name, d)
		if err == nil && info.Epoch == made && info.Whole() {
			return info, nil
		}
	}
	info, err := h.bus.EnsureQueue(ctx, bus.QueueSettings{
		Stage: q.name, Durability: d,
		MaxItems: q.settings.MaxItems, MaxBytes: q.settings.MaxBytes, MaxAge: q.settings.MaxAge,
		AckWait: q.settings.AckWait, MaxDeliver: item.MaxBrokerDeliveries, Replicas: q.settings.Replicas, Version: q.settings.Version,
	})
	if err == nil {
		h.known.queues[key] = info.Epoch
	}
	return info, err
}

// stopAnswers ends the answers of one kind.
func (h *Host) stopAnswers(of *func() error) {
	if *of == nil {
		return
	}
	if err := (*of)(); err != nil {
		h.settings.Logger.Debug("end of answers", "error", err)
	}
	*of = nil
}

// stopAlive stops telling others that the host serves its queues.
func (h *Host) stopAlive() {
	for _, q := range h.pulled {
		h.stopAnswers(&q.alive)
	}
}

// runnerHealth is the health of a runner that reports it.
type runnerHealth struct {
	runner  runner.HealthReporter
	changed <-chan struct{}
	err     error
	// since is when err became nil or not nil.
	since time.Time
}

// update asks the runner, and reports whether it became healthy or unhealthy.
func (v *runnerHealth) update(now time.Time) bool {
	if v.runner == nil {
		return false
	}
	was := v.err
	v.changed, v.err = v.runner.Health()
	turned := (was == nil) != (v.err == nil)
	if turned {
		v.since = now
	}
	return turned
}

// checkRunner returns why the runner cannot run anything, and has the host leave
// its stage where that lasts.
func (h *Host) checkRunner(ctx context.Context, now time.Time) error {
	h.runnerHealth.update(now)
	if h.runnerHealth.err == nil {
		return nil
	}
	if lasted := now.Sub(h.runnerHealth.since); lasted >= unhealthyGrace {
		h.leaveStage(ctx, now)
	}
	return fmt.Errorf("the runner cannot run anything: %w", h.runnerHealth.err)
}

// leaveStage takes the host out of its stage. It naks the items that wait here for
// a slot only once no pull is open any more: else they would be redelivered to
// this host, and naked again, until they are exhausted.
func (h *Host) leaveStage(ctx context.Context, now time.Time) {
	h.stopAnswers(&h.forwarded)
	h.stopAlive()
	h.serveFailing()
	hasFailed := errors.Is(h.runnerHealth.err, runner.ErrStartFailed)
	for _, q := range h.pulled {
		for _, d := range q.settings.Durabilities {
			epoch := bus.Epoch("")
			if d == pipeline.Memory {
				epoch = h.refuseUnserved(ctx, now, q.name, hasFailed)
			}
			q.puller.Use(d, epoch)
		}
	}
	unhealthyFor, keepFor := now.Sub(h.runnerHealth.since), unhealthyGrace+reconcileRetry+bus.PullLife
	if h.bus.BrokerError() != nil {
		keepFor = max(keepFor, h.settings.HostGrace) // no other host can take the items
	}
	if unhealthyFor >= keepFor {
		// Items whose run crashed stay for as long as the runner needs to start: another host would
		// lose its workers to them too.
		isStarting := !hasFailed && unhealthyFor < h.startTook+unhealthyGrace
		h.items.Post(item.EventFunc(func(l *item.Loop) { l.NakWaiting(!isStarting) }))
	}
}

// serveFailing answers why the host does not serve its stage, until failing is stopped.
func (h *Host) serveFailing() {
	if h.failing != nil {
		return
	}
	var err error
	if h.failing, err = h.bus.ServeFailing(h.settings.Stage, h.settings.Host, h.cause); err != nil {
		h.settings.Logger.Debug("callers do not learn why the stage is not served", "error", err)
	}
}

// refuseUnserved returns the epoch of the memory queue once the runner does not start
// again and no host has served the stage for HostGrace. The host then pulls what waits
// there, at whichever step, and refuses it, until it next looks and finds another host.
func (h *Host) refuseUnserved(ctx context.Context, now time.Time, name pipeline.StageName, hasFailed bool) bus.Epoch {
	isUnserved := false
	if hasFailed {
		_, err := h.bus.Alive(ctx, h.settings.Stage)
		isUnserved = errors.Is(err, bus.ErrNoHost)
	}
	if !isUnserved {
		h.servedAt = now
	}
	if now.Sub(h.servedAt) < h.settings.HostGrace || now.Sub(h.runnerHealth.since) < h.settings.HostGrace {
		h.items.Refusal.Store(nil)
		return ""
	}
	queue, err := h.bus.Queue(ctx, name, pipeline.Memory)
	if err != nil {
		return ""
	}
	h.items.Refusal.Store(fault.Newf(fault.NoCapacity, "stage %s has no ready host: %s", h.settings.Stage, h.cause()).WithRetryAfter(time.Second))
	return queue.Epoch
}

// cause returns why the host is not ready, for callers, who need not know its folders; empty
// where it is ready.
func (h *Host) cause() string {
	if _, _, err := h.status.get(); err != nil {
		return item.WithoutFolders(err)
	}
	return ""
}

// endExhausted ends an item that the broker delivers no more. A host decides
// before that, so this is for items that crashed each host before it could. It
// retries nothing: the caller learns of the failure by the deadline at the latest.
func (h *Host) endExhausted(g bus.Exhausted) {
	ctx, cancel := context.WithTimeout(context.Background(), exhaustedTimeout)
	defer cancel()
	if env, reply, err := h.items.Exhausted(g.Data, g.Deliveries); err == nil {
		h.settings.Logger.Warn("the broker gave up on an item", "request_id", env.RequestID, "deliveries", g.Deliveries)
		h.replyExhausted(ctx, env, reply)
	}
	if err := h.bus.Remove(ctx, g); err != nil {
		h.settings.Logger.Warn("an item that the broker gave up on stays in its queue", "error", err)
	}
}

// replyExhausted replies to an item that no host holds.
func (h *Host) replyExhausted(ctx context.Context, env *envelope.Envelope, reply *envelope.Reply) {
	if env.StoresResult() {
		if m, err := h.records.Result(env.Result(reply, time.Now())); err == nil {
			_, err = h.bus.PublishAndWait(ctx, m)
			h.items.CheckAck(err)
		}
	}
	m, err := h.bus.Reply(env.Gateway, reply)
	if err == nil {
		err = h.bus.PublishUnacked(m)
	}
	h.items.CheckAck(err)
}
