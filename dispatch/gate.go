package dispatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/config"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// GateConfig says how much room the target of a pool has.
type GateConfig struct {
	Gate

	Budget BudgetConfig `yaml:"budget"`
	// Interval is how often a gate asks its source; 0 means DefaultGateInterval.
	Interval time.Duration `yaml:"interval"`
}

// Gate is one gate. It has one key.
type Gate struct {
	Constant   *ConstantGate   `yaml:"constant"`
	Prometheus *PrometheusGate `yaml:"prometheus"`
	Scrape     *ScrapeGate     `yaml:"scrape"`
	Value      *ValueGate      `yaml:"value"`
	Schedule   *ScheduleGate   `yaml:"schedule"`
	Adaptive   *AdaptiveGate   `yaml:"adaptive"`
	Mesh       *MeshGate       `yaml:"mesh"`

	// First is the first gate with a valid reading, Min the one with the least, Product all
	// of them multiplied.
	First   Gates `yaml:"first"`
	Min     Gates `yaml:"min"`
	Product Gates `yaml:"product"`
}

// BudgetConfig says how many jobs a reading permits: ready * each * (reading - baseline).
type BudgetConfig struct {
	// Baseline is in [0, 1); nil means DefaultBaseline.
	Baseline *float64 `yaml:"baseline"`
	// Ready is the number of ready servers, or the stage whose ready hosts count; nil means 1.
	Ready any `yaml:"ready"`
	// Each is how much one server takes; 0 means max_in_flight, or what the gate knows.
	Each float64 `yaml:"each"`
	// Unit is requests, the default, bytes or tokens.
	Unit string `yaml:"unit"`
	// Refill is when an ended job makes room: at its end, the default, or with the next reading.
	Refill string        `yaml:"refill"`
	MaxAge time.Duration `yaml:"max_age"`
}

// Defaults of GateConfig.
const (
	DefaultGateInterval = 5 * time.Second
	DefaultBaseline     = .05
	DefaultMaxAge       = defaultMaxAge
)

// gateTimeout bounds one question.
const gateTimeout = 2 * time.Second

// gate says how much room there is. read does not wait; the owner's lock is held.
type gate interface {
	read(now time.Time) (reading, error)
}

// gateConfig is a kind of gate as a file has it.
type gateConfig interface {
	validate() error
	build(g *poolGate, name string) gate
}

func (c GateConfig) validate() error {
	return errors.Join(c.Gate.validate("gate"), config.InSection("gate.budget", c.Budget.validate()), config.NotNegative("gate.interval", c.Interval))
}

func (b BudgetConfig) validate() error {
	errs := []error{config.NotNegative("max_age", b.MaxAge)}
	if v := b.Baseline; v != nil && !(*v >= 0 && *v < 1) {
		errs = append(errs, fmt.Errorf("baseline: %v is not within 0 and 1, without 1", *v))
	}
	if _, _, err := b.servers(); err != nil {
		errs = append(errs, err)
	}
	if !(b.Each >= 0) || math.IsInf(b.Each, 1) {
		errs = append(errs, fmt.Errorf("each: %v is no amount", b.Each))
	}
	if b.Each == 0 && (b.Ready != nil || unit(b.Unit) == unitBytes || unit(b.Unit) == unitTokens) {
		errs = append(errs, errors.New("each: say how much one server takes"))
	}
	switch unit(b.Unit) {
	case "", unitRequests, unitBytes, unitTokens:
	default:
		errs = append(errs, fmt.Errorf("unit: %q; use requests, bytes or tokens", b.Unit))
	}
	switch refillMode(b.Refill) {
	case "", refillEnd, refillReading:
	default:
		errs = append(errs, fmt.Errorf("refill: %q; use end or reading", b.Refill))
	}
	return errors.Join(errs...)
}

// servers returns how many servers are ready, or the stage whose hosts they are.
func (b BudgetConfig) servers() (n float64, stage string, err error) {
	switch ready := b.Ready.(type) {
	case nil:
		return 1, "", nil
	case int:
		n = float64(ready)
	case int64:
		n = float64(ready)
	case float64:
		n = ready
	case map[string]any:
		if stage, ok := ready["stage"].(string); ok && len(ready) == 1 {
			if err := pipeline.ValidName("stage", stage); err != nil {
				return 0, "", fmt.Errorf("ready.stage: %w", err)
			}
			return 0, stage, nil
		}
	}
	if !(n > 0) || math.IsInf(n, 1) {
		return 0, "", errors.New("ready: use a number above 0, or {stage: name}")
	}
	return n, "", nil
}

// kind returns the key that the gate has, and what is there. The key is empty unless it is one.
func (g Gate) kind() (key string, of gateConfig, keys []string) {
	n, v := 0, reflect.ValueOf(g)
	for i := range v.NumField() {
		name := v.Type().Field(i).Tag.Get("yaml")
		keys = append(keys, name)
		if f := v.Field(i); !f.IsNil() {
			key, of, n = name, f.Interface().(gateConfig), n+1
		}
	}
	if n != 1 {
		key = ""
	}
	return key, of, keys
}

// validate checks the gate at a key.
func (g Gate) validate(at string) error {
	key, of, keys := g.kind()
	if key == "" {
		return fmt.Errorf("%s: a gate has exactly one of %s", at, strings.Join(keys, ", "))
	}
	at += "." + key
	gates, isComposed := of.(Gates)
	if !isComposed {
		return config.InSection(at, of.validate())
	}
	var errs []error
	for i, g := range gates {
		errs = append(errs, g.validate(fmt.Sprintf("%s[%d]", at, i)))
	}
	if len(gates) == 0 {
		errs = append(errs, fmt.Errorf("%s: there is no gate in it", at))
	}
	return errors.Join(errs...)
}

func (g Gate) build(p *poolGate, suffix string) gate {
	key, of, _ := g.kind()
	return of.build(p, key+suffix)
}

// Gates are those of first, min or product.
type Gates []Gate

func (c Gates) validate() error { return nil } // Gate does

func (c Gates) build(p *poolGate, name string) gate {
	kind, _, _ := strings.Cut(name, " ")
	out := composed{kind: kind, source: name, maxAge: p.credit.maxAge}
	for i, g := range c {
		out.gates = append(out.gates, g.build(p, fmt.Sprintf(" %d", i+1)))
	}
	return out
}

// composed makes one reading of several.
type composed struct {
	kind, source string
	gates        []gate
	maxAge       time.Duration
}

func (c composed) read(now time.Time) (out reading, err error) {
	if c.kind == "first" {
		for _, g := range c.gates {
			if out, err = g.read(now); err == nil && (out.timeless || now.Sub(out.at) <= c.maxAge) {
				return out, nil
			}
		}
		return c.gates[0].read(now)
	}
	for i, g := range c.gates {
		r, err := g.read(now)
		switch {
		case err != nil:
			return reading{}, err
		case i == 0:
			out = r
			continue
		case c.kind == "product":
			out.d *= r.d
		case r.d < out.d:
			out.d, out.source = r.d, r.source
		}
		// It is as old as the oldest.
		if !r.timeless && (out.timeless || r.at.Before(out.at)) {
			out.at, out.timeless = r.at, false
		}
		if r.capacity > 0 && (out.capacity == 0 || r.capacity < out.capacity) {
			out.capacity = r.capacity
		}
	}
	if c.kind == "product" {
		out.source = c.source
	}
	return out, nil
}

// poolGate is the gate of a pool that this process owns. Its methods but run need the owner's
// lock.
type poolGate struct {
	settings *Settings
	config   PoolConfig
	credit   *credit
	interval time.Duration
	client   *http.Client

	gate gate
	// ready has the number of ready hosts as its value; nil where it is constant.
	ready    *polled
	polls    []*polled
	adaptive []*adaptiveGate

	// last is what the credit knows.
	last    reading
	lastErr error
}

// newPoolGate returns a pool's gate, with the credit that it feeds. Without a gate in the file
// a pool is open up to max_in_flight.
func newPoolGate(s *Settings, p PoolConfig, now time.Time) *poolGate {
	limit := cmp.Or(p.MaxInFlight, DefaultMaxInFlight)
	c := cmp.Or(p.Gate, &GateConfig{Gate: Gate{Constant: &ConstantGate{}}, Budget: BudgetConfig{Baseline: new(float64)}})
	b := budget{
		baseline: DefaultBaseline, each: cmp.Or(c.Budget.Each, float64(limit)), unit: cmp.Or(unit(c.Budget.Unit), unitRequests),
		maxInFlight: limit, maxAge: c.Budget.MaxAge, refill: cmp.Or(refillMode(c.Budget.Refill), refillEnd),
	}
	if c.Budget.Baseline != nil {
		b.baseline = *c.Budget.Baseline
	}
	g := &poolGate{
		settings: s, config: p, credit: newCredit(b, now), interval: cmp.Or(c.Interval, DefaultGateInterval),
		// A question every few seconds needs no connection that stays open.
		client: &http.Client{Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, DisableKeepAlives: true}},
	}
	ready, stage, _ := c.Budget.servers() // Validate has seen it
	g.credit.ready = ready
	if stage != "" {
		g.ready = g.poll(func(context.Context) (reading, error) {
			if s.ReadyHosts == nil {
				return reading{}, errors.New("this process knows no hosts")
			}
			n, err := s.ReadyHosts(stage)
			return reading{d: float64(n)}, err
		})
	}
	g.gate = c.build(g, "")
	g.update(now)
	return g
}

// poll returns a gate that asks while the pool is owned.
func (g *poolGate) poll(ask func(context.Context) (reading, error)) *polled {
	p := &polled{ask: ask, err: errNotAsked}
	g.polls = append(g.polls, p)
	return p
}

// update passes on what the gate says now, if that is new.
func (g *poolGate) update(now time.Time) {
	var err error
	before := g.credit.ready
	if g.ready != nil {
		var hosts reading
		hosts, err = g.ready.read(now)
		g.credit.ready = hosts.d
	}
	var r reading
	if err == nil {
		r, err = g.gate.read(now)
	}
	if r.capacity > 0 && g.config.Gate.Budget.Each == 0 {
		g.credit.each = r.capacity
	}
	if r != g.last || err != g.lastErr || g.credit.ready != before { //nolint:errorlint // it is the same error until the next question
		g.last, g.lastErr = r, err
		g.credit.read(r, err, now)
	}
}

// note has gates know how an attempt ended.
func (g *poolGate) note(a Answer, out outcome, r *meshv1.JobRecord, now time.Time) {
	status := a.HTTP.GetStatus()
	isLate := !now.Before(r.GetAttemptDeadline().AsTime()) || status == http.StatusRequestTimeout || status == http.StatusGatewayTimeout
	for _, gate := range g.adaptive {
		gate.note(out, isLate, r.GetJob().GetStartedAt().AsTime(), now)
	}
}

// run asks until the context ends, and calls changed after each answer.
func (g *poolGate) run(ctx context.Context, changed func()) {
	var asking sync.WaitGroup
	defer asking.Wait()
	for _, p := range g.polls {
		asking.Go(func() { p.run(ctx, g.interval, changed) })
	}
}

// costOf is what a job costs in the pool's unit.
func (g *poolGate) costOf(size, tokens int64) int64 {
	switch g.credit.unit {
	case unitBytes:
		return size
	case unitTokens:
		if tokens == 0 {
			// A prompt of four bytes a token, and an answer.
			tokens = (size+3)/4 + unsaidTokens
		}
		return tokens
	}
	return 1
}

// unsaidTokens is the length of an answer that a job does not bound.
const unsaidTokens = 256

var errNotAsked = errors.New("not asked yet")

// polled is a gate that asks its source at intervals. No lock is held meanwhile.
type polled struct {
	ask func(context.Context) (reading, error)

	mu   sync.Mutex
	last reading
	err  error
}

func (p *polled) read(time.Time) (reading, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last, p.err
}

func (p *polled) run(ctx context.Context, every time.Duration, changed func()) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		asking, cancel := context.WithTimeout(ctx, gateTimeout)
		r, err := p.ask(asking)
		cancel()
		if ctx.Err() != nil {
			return
		}
		p.mu.Lock()
		p.last, p.err = r, err
		p.mu.Unlock()
		changed()
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// clamp returns a value in [0, 1].
func clamp(v float64) float64 { return min(1, max(0, v)) }
