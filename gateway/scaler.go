package gateway

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/scale"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Scaler configures how many hosts gateways want for stages, and the port that KEDA asks: the section
// gateway.scaler. 0 means the default.
type Scaler struct {
	// Listen is the address of the port. If it is empty, there is none.
	Listen string `yaml:"listen"`
	// CertFile and KeyFile hold a certificate chain and its key; without them the port has no TLS.
	// ClientCAFile holds the authorities that sign the certificates of callers.
	CertFile     string `yaml:"cert_file,path"`
	KeyFile      string `yaml:"key_file,path"`
	ClientCAFile string `yaml:"client_ca_file,path"`
	// Insecure allows other machines to ask without a certificate.
	Insecure bool `yaml:"insecure"`
	// Target is what hosts are wanted for where nobody names one: wait=200ms, busy=70% or oldest=5s.
	Target string `yaml:"target"`
	// MaxWaiting and MaxWaitingBytes bound the requests that wait for the first host of a stage, in
	// each gateway, MaxWait for how long one waits.
	MaxWaiting      int           `yaml:"max_waiting"`
	MaxWaitingBytes int64         `yaml:"max_waiting_bytes,size"`
	MaxWait         time.Duration `yaml:"max_wait"`
}

// Defaults of Scaler.
const (
	defaultMaxWaiting      = 1024
	defaultMaxWaitingBytes = 64 << 20
	defaultMaxWait         = 5 * time.Minute
)

// validate checks the section without reading files. Messages name the key in the section.
func (s Scaler) validate() error {
	errs := []error{
		config.Address("listen", s.Listen), s.access().pair().Check(""), s.exposure().Check("listen", "name authorities in client_ca_file, "),
		config.NotNegative("max_waiting", s.MaxWaiting), config.NotNegative("max_waiting_bytes", s.MaxWaitingBytes), config.NotNegative("max_wait", s.MaxWait),
	}
	if s.ClientCAFile != "" && s.CertFile == "" {
		errs = append(errs, errors.New("client_ca_file: callers show certificates over TLS only; name this port's in cert_file"))
	}
	if s.Target != "" {
		if _, err := scale.ParseTarget(s.Target); err != nil {
			errs = append(errs, fmt.Errorf("target: %w", err))
		}
	}
	return errors.Join(errs...)
}

func (s Scaler) access() Access { return Access{CertFile: s.CertFile, KeyFile: s.KeyFile} }

func (s Scaler) exposure() config.Exposure {
	return config.Exposure{Listen: s.Listen, IsAuthenticated: s.ClientCAFile != "", Insecure: s.Insecure, AnyHost: true}
}

const (
	// scalePoll is how old a decision may be before a gateway makes the next one.
	scalePoll = 2 * time.Second
	// activatingPoll is that age where requests wait for the first host of a stage.
	activatingPoll = 200 * time.Millisecond
	// scaleTimeout bounds a poll, queueTimeout what is asked of one queue.
	scaleTimeout = 5 * time.Second
	queueTimeout = time.Second
	// maxScaled bounds the pairs of stage and target, scaledAge how long one is followed that
	// somebody has asked for.
	maxScaled = 1024
	scaledAge = 10 * time.Minute
	// maxStageQueries is how many queues are asked about at a time.
	maxStageQueries = 16
)

// scaler knows how many hosts each stage should have. All gateways of a mesh know the same: whoever
// finds the last decision too old makes the next one from it, and stores it for all.
type scaler struct {
	gateway *Gateway
	target  scale.Target
	store   *store.Scales
	// polling is held during a poll; wake has the loop poll at once.
	polling chan struct{}
	wake    chan struct{}

	mu sync.Mutex
	// known are the last decisions, asked when somebody wanted one for another target than the default.
	known map[scaled]decision
	asked map[scaled]time.Time
	// served are the stages whose hosts answered last.
	served map[pipeline.StageName]bool
	// changed is closed with the next poll.
	changed chan struct{}
}

// scaled is what a decision is about.
type scaled struct {
	stage  pipeline.StageName
	target scale.Target
}

type decision struct {
	scale.State
	readAt time.Time
}

// newScaler returns the scaler of a gateway; nil if the mesh's file configures no scaling.
func newScaler(g *Gateway) (*scaler, error) {
	s := g.settings
	if s.Scaler == nil && len(s.Bounds) == 0 {
		return nil, nil
	}
	target, err := scale.ParseTarget(cmp.Or(s.scaler().Target, scale.DefaultTarget))
	return &scaler{
		gateway: g, target: target, polling: make(chan struct{}, 1), wake: make(chan struct{}, 1), changed: make(chan struct{}),
		known: map[scaled]decision{}, asked: map[scaled]time.Time{},
	}, err
}

// scaler returns the section gateway.scaler with its defaults.
func (s Settings) scaler() Scaler {
	var out Scaler
	if s.Scaler != nil {
		out = *s.Scaler
	}
	out.MaxWaiting, out.MaxWaitingBytes = cmp.Or(out.MaxWaiting, defaultMaxWaiting), cmp.Or(out.MaxWaitingBytes, defaultMaxWaitingBytes)
	out.MaxWait = cmp.Or(out.MaxWait, defaultMaxWait)
	return out
}

// boundsOf returns the bounds of a stage.
func (s Settings) boundsOf(stage pipeline.StageName) scale.Bounds {
	b, ok := s.Bounds[stage]
	if !ok && s.Scaler == nil {
		b.Min = 1
	}
	return b
}

// activation returns which stages may have no host; nil if none may.
func (s Settings) activation() *call.Activation {
	if s.Scaler == nil && !slices.ContainsFunc(slices.Collect(maps.Values(s.Bounds)), func(b scale.Bounds) bool { return b.Min == 0 }) {
		return nil
	}
	section := s.scaler()
	return &call.Activation{
		Allows:      func(stage pipeline.StageName) bool { return s.boundsOf(stage).Min == 0 },
		MaxRequests: section.MaxWaiting, MaxBytes: section.MaxWaitingBytes, Timeout: section.MaxWait,
	}
}

// run follows all stages until the context ends.
func (s *scaler) run(ctx context.Context) error {
	stop, err := s.gateway.bus.ServeActivating(func(pipeline.StageName) {
		select {
		case s.wake <- struct{}{}:
		default: // it polls anyway
		}
	})
	if err != nil {
		return err
	}
	defer stop() //nolint:errcheck // it fails when the connection is closed
	tick := time.NewTicker(scalePoll / 2)
	defer tick.Stop()
	for failing := ""; ; {
		age := scalePoll
		select {
		case <-tick.C:
		case <-s.wake:
			age = activatingPoll
		case <-ctx.Done():
			return nil
		}
		err := s.poll(ctx, s.all(), age)
		problem := ""
		if err != nil {
			problem = err.Error()
		}
		if problem != failing && problem != "" && ctx.Err() == nil {
			s.gateway.log.Warn("the hosts that a stage should have are not known; retrying", "error", err)
		}
		failing = problem
	}
}

// all returns what the gateway follows.
func (s *scaler) all() []scaled {
	s.mu.Lock()
	defer s.mu.Unlock()
	out, now := map[scaled]bool{}, time.Now()
	maps.DeleteFunc(s.asked, func(_ scaled, at time.Time) bool { return now.Sub(at) > scaledAge })
	for key := range s.asked {
		out[key] = true
	}
	for stage := range s.stagesLocked() {
		if len(out) < maxScaled {
			out[scaled{stage, s.target}] = true
		}
	}
	maps.DeleteFunc(s.known, func(key scaled, _ decision) bool { return !out[key] })
	return slices.Collect(maps.Keys(out))
}

// stagesLocked returns the stages that are known: of the mesh's file, of pipelines, and those with hosts.
func (s *scaler) stagesLocked() map[pipeline.StageName]bool {
	out := map[pipeline.StageName]bool{}
	for stage := range s.gateway.settings.Bounds {
		out[stage] = true
	}
	for _, e := range s.gateway.pipelines.List() {
		for _, step := range e.Pipeline.StageSteps() {
			out[step.Stage] = true
		}
	}
	if s.gateway.members != nil {
		for _, h := range s.gateway.members.Hosts() {
			out[pipeline.StageName(h.Record.GetStage())] = true
		}
	}
	maps.Copy(out, s.served)
	return out
}

// want returns the decision about a stage that is at most scalePoll old, and what changes with the next one.
func (s *scaler) want(ctx context.Context, key scaled) (decision, <-chan struct{}, error) {
	s.mu.Lock()
	if _, isAsked := s.asked[key]; isAsked || len(s.asked) < maxScaled {
		s.asked[key] = time.Now()
	}
	d, changed := s.known[key], s.changed
	s.mu.Unlock()
	if time.Since(d.readAt) < scalePoll {
		return d, changed, nil
	}
	err := s.poll(ctx, []scaled{key}, scalePoll)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		return decision{}, s.changed, err
	}
	return s.known[key], s.changed, nil
}

// last returns the last decision for the default target, if it is current.
func (s *scaler) last(stage pipeline.StageName) (d decision, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d = s.known[scaled{stage, s.target}]
	return d, time.Since(d.readAt) < 2*scaleTimeout
}

// status returns how many hosts of a stage are wanted; nil where that is not known.
func (s *scaler) status(stage pipeline.StageName) *adminv1.HostsWanted {
	d, ok := s.last(stage)
	if !ok {
		return nil
	}
	return &adminv1.HostsWanted{Hosts: uint32(d.Wanted), Reason: d.Reason, DecidedAt: timestamppb.New(d.At), Activating: uint32(d.Waiting)}
}

// poll reads the decisions, and makes those anew that are of that age. It returns the error of one stage; the
// others are decided on nevertheless.
func (s *scaler) poll(ctx context.Context, keys []scaled, age time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, scaleTimeout)
	defer cancel()
	select {
	case s.polling <- struct{}{}:
		defer func() { <-s.polling }()
	case <-ctx.Done():
		return ctx.Err()
	}
	var failing pipeline.StageName // the first by name, so that it stays the same
	var problem error
	note := func(key scaled, err error) {
		if problem == nil || key.stage < failing {
			failing, problem = key.stage, fmt.Errorf("stage %s: %w", key.stage, err)
		}
	}
	states, due := map[scaled]storedState{}, map[pipeline.StageName]bool{}
	for _, key := range keys {
		state, err := s.read(ctx, key)
		if err != nil {
			note(key, err)
			continue
		}
		states[key] = state
		if time.Since(state.At) >= age {
			due[key.stage] = true
		}
	}
	if len(due) > 0 {
		seen, err := s.observe(ctx, due)
		if err != nil {
			return err
		}
		for key, state := range states {
			if !due[key.stage] {
				continue
			}
			err := seen[key.stage].err
			if err == nil {
				states[key], err = s.decide(ctx, key, state, seen[key.stage].finish())
			}
			if err != nil {
				note(key, err)
				delete(states, key)
			}
		}
	}
	if len(states) == 0 {
		return problem
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, state := range states {
		s.known[key] = decision{state.State, time.Now()}
	}
	close(s.changed)
	s.changed = make(chan struct{})
	return problem
}

// storedState is a decision with its number on the broker.
type storedState struct {
	scale.State
	seq uint64
}

func (s *scaler) read(ctx context.Context, key scaled) (out storedState, err error) {
	data, seq, err := s.store.Get(ctx, key.stage, key.target.String())
	if err != nil || seq == 0 {
		return out, err
	}
	out.seq = seq
	if json.Unmarshal(data, &out.State) != nil {
		out.State = scale.State{} // the next decision replaces it
	}
	return out, nil
}

// decide makes the next decision from a state, or returns the one of another gateway that was first.
func (s *scaler) decide(ctx context.Context, key scaled, before storedState, seen scale.Observation) (storedState, error) {
	next := storedState{State: before.Next(seen, key.target, s.gateway.settings.boundsOf(key.stage))}
	data, err := json.Marshal(next.State)
	if err == nil {
		err = s.store.Replace(ctx, key.stage, key.target.String(), before.seq, data)
	}
	if errors.Is(err, store.ErrJobChanged) {
		return s.read(ctx, key)
	}
	return next, err
}

// observe asks hosts, gateways and the broker about stages.
func (s *scaler) observe(ctx context.Context, stages map[pipeline.StageName]bool) (map[pipeline.StageName]*observed, error) {
	answers, err := s.gateway.bus.ListDemand(ctx)
	if err != nil {
		return nil, err
	}
	seen := map[pipeline.StageName]*observed{}
	of := func(stage string) *observed {
		if seen[pipeline.StageName(stage)] == nil {
			seen[pipeline.StageName(stage)] = &observed{Observation: scale.Observation{At: time.Now(), Hosts: map[string]scale.Counters{}}}
		}
		return seen[pipeline.StageName(stage)]
	}
	for stage := range stages {
		of(string(stage))
	}
	served := map[pipeline.StageName]bool{}
	for _, a := range answers {
		if h := a.GetHost(); pipeline.ValidName("stage", h.GetStage()) == nil {
			served[pipeline.StageName(h.GetStage())] = true
			of(h.GetStage()).addHost(a)
		}
		for _, w := range a.GetActivating() {
			if pipeline.ValidName("stage", w.GetStage()) != nil {
				continue
			}
			o := of(w.GetStage())
			o.Waiting += int(w.GetRequests())
			o.Oldest = max(o.Oldest, time.Since(w.GetSince().AsTime()))
		}
	}
	var queries errgroup.Group
	queries.SetLimit(maxStageQueries)
	ctx, cancel := context.WithTimeout(ctx, scaleTimeout/2) // the decisions need time as well
	defer cancel()
	for stage := range stages {
		queries.Go(func() error {
			seen[stage].err = s.addQueues(ctx, stage, seen[stage])
			return nil
		})
	}
	_ = queries.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.served = served
	return seen, nil
}

// observed is an observation that is being made.
type observed struct {
	scale.Observation

	inFlight int
	// learned counts the hosts that know their batches, start and perRow are their sums.
	learned       int
	start, perRow time.Duration
	// own are the hosts that have queues of their own.
	own []pipeline.HostID
	err error // the first of its queues
}

func (o *observed) addHost(a *meshv1.DemandAnswer) {
	h := a.GetHost()
	o.inFlight += int(h.GetInFlight())
	if h.GetDraining() {
		return
	}
	o.Hosts[h.GetHost()] = scale.Counters{Items: a.GetItems(), Busy: a.GetBusy().AsDuration(), Started: h.GetStartedAt().AsTime()}
	if h.GetCache() != nil {
		o.own = append(o.own, pipeline.HostID(h.GetHost()))
	}
	if !h.GetReady() {
		return
	}
	o.Ready++
	o.Slots += int(h.GetSlots())
	o.Running += int(h.GetRunning())
	o.MaxRows = max(o.MaxRows, int(h.GetLimits().GetMaxSize()))
	if e := h.GetBatchEstimate(); e != nil {
		o.learned++
		o.start, o.perRow = o.start+e.GetStart().AsDuration(), o.perRow+e.GetPerRow().AsDuration()
	}
	o.addCache(h.GetCache())
}

// addCache adds a host's memory for models.
func (o *observed) addCache(c *meshv1.CacheRecord) {
	if c == nil {
		return
	}
	age := time.Since(c.GetOldestUse().AsTime())
	if o.Models == nil {
		o.Models = &scale.Models{IsFull: true, OldestUse: age}
	}
	m := o.Models
	m.Waiting += int(c.GetQueued() + c.GetLoading())
	m.Slots += int(c.GetLoadSlots())
	m.IsFull = m.IsFull && c.GetFull()
	// The model that was used longest ago on any host: placement moves models to where it is.
	m.OldestUse = max(m.OldestUse, age)
	for _, took := range c.GetLoadTimes() {
		m.Time = max(m.Time, took.AsDuration())
	}
}

// addQueues adds what waits in the queues of a stage and, where its hosts load models, in their own.
func (s *scaler) addQueues(ctx context.Context, stage pipeline.StageName, o *observed) error {
	type queue struct {
		name       pipeline.StageName
		durability pipeline.Durability
	}
	all := []queue{{stage, pipeline.Memory}, {stage, pipeline.File}}
	for _, host := range o.own {
		all = append(all, queue{pipeline.HostQueue(stage, host), pipeline.Memory})
	}
	backlog := func(q queue) (bus.Backlog, error) {
		ctx, cancel := context.WithTimeout(ctx, queueTimeout)
		defer cancel()
		return s.gateway.bus.Backlog(ctx, q.name, q.durability)
	}
	for _, q := range all {
		b, err := backlog(q)
		if errors.Is(err, bus.ErrNoQueue) {
			continue
		}
		if err != nil {
			return err
		}
		o.Items += int(b.Items)
		if !b.Oldest.IsZero() {
			o.Oldest = max(o.Oldest, b.Taken.Sub(b.Oldest))
		}
	}
	return nil
}

func (o *observed) finish() scale.Observation {
	// Hosts also hold items that came in no queue.
	o.Items = max(o.Items, o.inFlight)
	o.Running = min(o.Running, o.Items)
	if o.learned > 0 {
		o.Start, o.PerRow = o.start/time.Duration(o.learned), o.perRow/time.Duration(o.learned)
	}
	return o.Observation
}

// report registers the metrics of hosts wanted.
func (s *scaler) report(meter metric.Meter) error {
	if meter == nil {
		return nil
	}
	var errs []error
	gauge := func(name, unit, help string) metric.Float64ObservableGauge {
		g, err := meter.Float64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return g
	}
	wanted, err := meter.Int64ObservableGauge("stagemesh.stage.hosts_wanted", metric.WithDescription("Hosts that a stage should have, the same from each gateway."))
	errs = append(errs, err)
	needed := gauge("stagemesh.stage.hosts_needed", "", "Hosts that a stage needs, by what for.")
	rate := gauge("stagemesh.stage.arrival_rate", "", "Items per second that come to a stage, as hosts wanted count them.")
	cost := gauge("stagemesh.stage.item_cost", "s", "Time of a slot that an item takes when its stage has enough to do.")
	if err := errors.Join(errs...); err != nil {
		return err
	}
	_, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		for _, key := range s.all() {
			d, ok := s.last(key.stage)
			if !ok || key.target != s.target {
				continue
			}
			stage := attribute.String("stage", string(key.stage))
			of := metric.WithAttributes(stage)
			o.ObserveInt64(wanted, int64(d.Wanted), of)
			o.ObserveFloat64(rate, d.Parts.Rate, of)
			o.ObserveFloat64(cost, d.Parts.Cost, of)
			for part, need := range map[string]float64{"arrivals": d.Parts.Arrivals, "backlog": d.Parts.Backlog, "running": d.Parts.Running, "models": d.Parts.Models} {
				o.ObserveFloat64(needed, need, metric.WithAttributes(stage, attribute.String("part", part)))
			}
		}
		return nil
	}, wanted, needed, rate, cost)
	return err
}

// isServed reports whether a stage that nothing else names has a host.
func (s *scaler) isServed(ctx context.Context, stage string) bool {
	if pipeline.ValidName("stage", stage) != nil {
		return false
	}
	_, err := s.gateway.bus.Alive(ctx, pipeline.StageName(stage)) // a slow host is a host
	return err == nil
}

// keyOf returns the stage and the target that a caller names, or what is wrong with them.
func (s *scaler) keyOf(ctx context.Context, metadata map[string]string) (key scaled, err error) {
	name := metadata["stage"]
	if name == "" {
		return key, errors.New("stage: is required in the trigger's metadata")
	}
	s.mu.Lock()
	stages := s.stagesLocked()
	s.mu.Unlock()
	if key.stage = pipeline.StageName(name); !stages[key.stage] && !s.isServed(ctx, name) {
		names := slices.Sorted(maps.Keys(stages))
		texts := make([]string, len(names))
		for i := range names {
			texts[i] = string(names[i])
		}
		return key, fmt.Errorf("stage: there is no stage %q; there is %s", name, cmp.Or(strings.Join(texts, ", "), "none"))
	}
	key.target = s.target
	if text := metadata["target"]; text != "" {
		if key.target, err = scale.ParseTarget(text); err != nil {
			err = fmt.Errorf("target: %w", err)
		}
	}
	return key, err
}
