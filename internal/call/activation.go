package call

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Activation has requests wait for the first host of a stage that may have none. The stage is
// activating meanwhile.
type Activation struct {
	// Allows reports whether a stage may have no host.
	Allows func(pipeline.StageName) bool
	// MaxRequests and MaxBytes bound the requests that wait and their inputs, Timeout how long
	// one waits in all.
	MaxRequests int
	MaxBytes    int64
	Timeout     time.Duration
}

const (
	// activationPoll is how often a request looks whether its stage has a host.
	activationPoll = 100 * time.Millisecond
	// activationNotice is how often gateways are told at most that requests wait.
	activationNotice = time.Second
	// activationProgress is how often a stream gets an event while it waits.
	activationProgress = 5 * time.Second
)

// activations are the requests that wait for the first host of a stage.
type activations struct {
	Activation

	notify func(pipeline.StageName)

	mu    sync.Mutex
	bytes int64
	waits map[*activationWait]pipeline.StageName
	// noticed is when gateways were told of each stage.
	noticed map[pipeline.StageName]time.Time
}

// activationWait is one request that waits.
type activationWait struct {
	of    *activations
	size  int64
	since time.Time
}

func newActivations(a *Activation) *activations {
	if a == nil {
		return nil
	}
	return &activations{Activation: *a, waits: map[*activationWait]pipeline.StageName{}, noticed: map[pipeline.StageName]time.Time{}}
}

// waitsFor reports whether a request that fails like that waits for a host instead. Nil
// activations have none wait.
func (a *activations) waitsFor(f *fault.Fault) bool {
	return a != nil && f != nil && f.Reason == fault.NoCapacity && f.Stage != "" && a.Allows(pipeline.StageName(f.Stage))
}

// join registers a request that waits, which must leave, or returns why it may not wait.
func (a *activations) join(env *envelope.Envelope, missing *fault.Fault) (*activationWait, *fault.Fault) {
	size := int64(payload.Size(env.Parts))
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.waits) >= a.MaxRequests || a.bytes+size > a.MaxBytes {
		return nil, fault.Newf(fault.NoCapacity, "stage %s is activating, and %d requests of %d bytes wait for its first host already: see gateway.scaler.max_waiting and max_waiting_bytes",
			missing.Stage, len(a.waits), a.bytes).At(missing.Stage, missing.Step, "").WithRetryAfter(budget.RetryAfter)
	}
	w := &activationWait{a, size, time.Now()}
	a.waits[w] = pipeline.StageName(missing.Stage)
	a.bytes += size
	return w, nil
}

// waitFor records for which stage the request waits, and lets gateways know.
func (w *activationWait) waitFor(stage pipeline.StageName) {
	a := w.of
	a.mu.Lock()
	a.waits[w] = stage
	now := time.Now()
	isDue := now.Sub(a.noticed[stage]) >= activationNotice
	if isDue {
		maps.DeleteFunc(a.noticed, func(_ pipeline.StageName, at time.Time) bool { return now.Sub(at) >= activationNotice })
		a.noticed[stage] = now
	}
	a.mu.Unlock()
	if isDue {
		a.notify(stage)
	}
}

func (w *activationWait) leave() {
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	delete(w.of.waits, w)
	w.of.bytes -= w.size
}

// list returns the stages for which requests wait, sorted.
func (a *activations) list() []*meshv1.ActivatingStage {
	a.mu.Lock()
	defer a.mu.Unlock()
	stages := map[pipeline.StageName]*meshv1.ActivatingStage{}
	for w, stage := range a.waits {
		s := stages[stage]
		if s == nil {
			s = &meshv1.ActivatingStage{Stage: string(stage), Since: timestamppb.New(w.since)}
			stages[stage] = s
		}
		s.Requests, s.Bytes = s.GetRequests()+1, s.GetBytes()+uint64(w.size)
		if w.since.Before(s.GetSince().AsTime()) {
			s.Since = timestamppb.New(w.since)
		}
	}
	out := make([]*meshv1.ActivatingStage, 0, len(stages))
	for _, stage := range slices.Sorted(maps.Keys(stages)) {
		out = append(out, stages[stage])
	}
	return out
}

// serveDemand answers for which stages requests of this gateway wait.
func (s *Service) serveDemand() error {
	if s.activations == nil {
		return nil
	}
	s.activations.notify = s.bus.NotifyActivating
	gauge, err := s.settings.Meter.Int64ObservableGauge("stagemesh.gateway.activating_requests", metric.WithDescription("Requests that wait for the first host of a stage."))
	if err != nil {
		return err
	}
	_, err = s.settings.Meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		for _, one := range s.activations.list() {
			o.ObserveInt64(gauge, int64(one.GetRequests()), metric.WithAttributes(attribute.String("stage", one.GetStage())))
		}
		return nil
	}, gauge)
	if err != nil {
		return err
	}
	return s.bus.ServeDemand(func() *meshv1.DemandAnswer {
		return &meshv1.DemandAnswer{Gateway: string(s.settings.Gateway), Activating: s.activations.list()}
	})
}

// hostGrace is how long calls wait for another host after the last one of their stage has left.
func (s *Service) hostGrace(stage pipeline.StageName) time.Duration {
	if s.activations != nil && s.activations.Allows(stage) {
		return max(s.settings.HostGrace, s.activations.Timeout)
	}
	return s.settings.HostGrace
}

// awaitHosts calls try until it returns anything but a missing host, or the wait is over. missing is the
// fault of the first try.
func (s *Service) awaitHosts(ctx context.Context, x *call, missing *fault.Fault, try func() *fault.Fault) *fault.Fault {
	wait, f := s.activations.join(x.env, missing)
	if f != nil {
		return f
	}
	defer wait.leave()
	if x.activation.since.IsZero() {
		x.activation.since = wait.since
	}
	waiting, cancel := context.WithDeadline(ctx, x.activation.since.Add(s.activations.Timeout))
	defer cancel()
	poll := time.NewTicker(activationPoll)
	defer poll.Stop()
	for f = missing; s.activations.waitsFor(f); f = try() {
		missing = f
		wait.waitFor(pipeline.StageName(f.Stage))
		x.noteActivating(f.Stage)
		if now := time.Now(); x.emit != nil && now.Sub(x.activation.notified) >= activationProgress {
			x.activation.notified = now
			if err := x.emit(request.Chunk{RequestID: string(x.env.RequestID), Activating: &request.Activating{Stage: f.Stage, Waited: now.Sub(x.activation.since)}}); err != nil {
				return fault.From(err)
			}
		}
		select {
		case <-poll.C:
		case <-s.limiter.Closing().Done():
			return admission.Stopping()
		case <-waiting.Done():
			if f := fault.From(context.Cause(ctx)); ctx.Err() != nil && f.Reason == fault.Cancelled {
				return f
			}
			return expiredActivation(missing, time.Since(x.activation.since))
		}
	}
	// A question that the end of the time has cut off says nothing.
	if f != nil && f.Reason == fault.DeadlineExceeded && errors.Is(waiting.Err(), context.DeadlineExceeded) {
		return expiredActivation(missing, time.Since(x.activation.since))
	}
	return f
}

// expiredActivation is the fault of a request for which no host has come.
func expiredActivation(missing *fault.Fault, waited time.Duration) *fault.Fault {
	return fault.Newf(fault.NoCapacity, "%s; the request waited %s for its first host", missing.Message, waited.Round(time.Millisecond)).
		At(missing.Stage, missing.Step, "").WithRetryAfter(budget.RetryAfter)
}

// noteActivating records that the call has waited for a stage.
func (x *call) noteActivating(stage string) {
	if !slices.Contains(x.activation.stages, stage) {
		x.activation.stages = append(x.activation.stages, stage)
	}
}

// addActivated notes in the metadata of a response, which is shared, what the call has waited for.
func (x *call) addActivated(r *request.Response) {
	metadata := maps.Clone(r.Metadata)
	if metadata == nil {
		metadata = map[string]string{}
	}
	metadata[request.Activated], r.Metadata = strings.Join(x.activation.stages, ","), metadata
}
