package dispatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"sync"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/process"
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
	Own        *OwnGate        `yaml:"own"`

	// First is the first with a valid reading, Min the one with the least, Product all multiplied.
	First   []Gate `yaml:"first"`
	Min     []Gate `yaml:"min"`
	Product []Gate `yaml:"product"`
}

// Defaults of GateConfig.
const (
	DefaultGateInterval = 5 * time.Second
	DefaultBaseline     = .05
	DefaultMaxAge       = 30 * time.Second

	gateTimeout = 2 * time.Second
)

// gate returns how much room there is. It does not wait; the owner's lock is held.
type gate func(now time.Time) (reading, error)

// build returns the gate at a key. number is behind its name where it is one of several.
func (g Gate) build(p *poolGate, at, number string) (out gate, err error) {
	n := 0
	for _, kind := range []struct {
		key   string
		has   bool
		build func(p *poolGate, source string) (gate, error)
	}{
		{"constant", g.Constant != nil, g.Constant.build},
		{"prometheus", g.Prometheus != nil, g.Prometheus.build},
		{"scrape", g.Scrape != nil, g.Scrape.build},
		{"value", g.Value != nil, g.Value.build},
		{"schedule", g.Schedule != nil, g.Schedule.build},
		{"adaptive", g.Adaptive != nil, g.Adaptive.build},
		{"mesh", g.Mesh != nil, g.Mesh.build},
		{"own", g.Own != nil, g.Own.build},
	} {
		if kind.has {
			n++
			out, err = kind.build(p, kind.key+number)
			err = config.InSection(at+"."+kind.key, err)
		}
	}
	for key, gates := range map[string][]Gate{"first": g.First, "min": g.Min, "product": g.Product} {
		if gates != nil {
			n++
			out, err = compose(p, gates, at, key, number)
		}
	}
	if n != 1 {
		return nil, fmt.Errorf("%s: a gate has exactly one of constant, prometheus, scrape, value, schedule, adaptive, mesh, own, first, min and product", at)
	}
	return out, err
}

func compose(p *poolGate, of []Gate, at, key, number string) (gate, error) {
	var gates []gate
	var errs []error
	for i, g := range of {
		one, err := g.build(p, fmt.Sprintf("%s.%s[%d]", at, key, i), fmt.Sprintf(" %d", i+1))
		gates, errs = append(gates, one), append(errs, err)
	}
	if len(of) == 0 {
		errs = append(errs, fmt.Errorf("%s.%s: there is no gate in it", at, key))
	}
	return func(now time.Time) (reading, error) {
		out, err := gates[0](now)
		if key == "first" {
			for _, g := range gates {
				if r, rerr := g(now); rerr == nil && (r.timeless || now.Sub(r.at) <= p.credit.MaxAge) {
					return r, nil
				}
			}
			return out, err
		}
		for _, g := range gates[1:] {
			r, rerr := g(now)
			err = cmp.Or(err, rerr)
			switch {
			case key == "product":
				out.d *= r.d
			case r.d < out.d:
				out.d, out.source, out.counts = r.d, r.source, r.counts
			}
			if !r.timeless && (out.timeless || r.at.Before(out.at)) { // it is as old as the oldest
				out.at, out.timeless = r.at, false
			}
			if r.capacity > 0 && (out.capacity == 0 || r.capacity < out.capacity) {
				out.capacity = r.capacity
			}
		}
		if key == "product" {
			out.source, out.counts = key+number, false
		}
		return out, err
	}, errors.Join(errs...)
}

// poolGate is the gate of a pool. Its methods but run need the owner's lock.
type poolGate struct {
	settings  *Settings
	pipelines []string
	credit    *credit
	interval  time.Duration
	client    *http.Client

	gate          gate
	ready         gate // the number of ready servers; nil where it is constant
	takesCapacity bool // true where the gate says what one server takes, if it knows that
	polls         []*poller
	notes         []func(out outcome, isLate bool, began, now time.Time)
}

// newPoolGate returns a pool's gate and credit. Without a gate a pool is open up to max_in_flight.
func newPoolGate(s *Settings, p PoolConfig, now time.Time) (*poolGate, error) {
	c := cmp.Or(p.Gate, &GateConfig{Gate: Gate{Constant: new(ConstantGate)}, Budget: BudgetConfig{Baseline: new(float64)}})
	g := &poolGate{
		settings: s, pipelines: p.Target.Pipelines, credit: newCredit(c.Budget, cmp.Or(p.MaxInFlight, DefaultMaxInFlight), now),
		interval: cmp.Or(c.Interval, DefaultGateInterval), takesCapacity: c.Budget.Each == 0,
		// A question every few seconds needs no connection that stays open.
		client: &http.Client{Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, DisableKeepAlives: true}},
	}
	var err, gerr error
	g.credit.ready, err = g.servers(c.Budget.Ready)
	g.credit.breaker.disabled = p.Target.webhooks != nil
	g.gate, gerr = c.build(g, "gate", "")
	return g, errors.Join(gerr, config.InSection("gate.budget", errors.Join(c.Budget.validate(), err)), config.NotNegative("gate.interval", c.Interval))
}

// servers returns how many servers are ready, or polls their number.
func (g *poolGate) servers(c *ReadyConfig) (n float64, err error) {
	count := func(n int, err error) (reading, error) { return reading{d: float64(n)}, err }
	switch {
	case c == nil:
		return 1, nil
	case *c == ReadyConfig{Count: c.Count} && c.Count > 0 && !math.IsInf(c.Count, 1):
		return c.Count, nil
	case *c == ReadyConfig{Stage: c.Stage} && c.Stage != "":
		g.ready = g.poll(func(context.Context) (reading, error) { return count(g.settings.ReadyHosts(c.Stage)) })
		return 0, config.InSection("ready", pipeline.ValidName("stage", c.Stage))
	case *c == ReadyConfig{Consul: c.Consul} && c.Consul != "":
		g.ready = g.poll(func(ctx context.Context) (reading, error) { return count(g.settings.ReadyInstances(ctx, c.Consul)) })
		return 0, nil
	case *c == ReadyConfig{Prometheus: c.Prometheus} && c.Prometheus != ReadyQuery{}:
		query := PrometheusGate{URL: c.Prometheus.URL}
		g.ready = g.poll(func(ctx context.Context) (reading, error) {
			_, n, err := query.ask(ctx, g.client, c.Prometheus.Query)
			return reading{d: n}, err
		})
		if err = validURL(query.URL); c.Prometheus.Query == "" {
			err = errors.Join(err, errors.New("query: is required"))
		}
		return 0, config.InSection("ready.prometheus", err)
	}
	return 0, errors.New("ready: has exactly one of count, above 0, stage, consul and prometheus")
}

// update passes on what the gate says now.
func (g *poolGate) update(now time.Time) {
	var r reading
	var err error
	if g.ready != nil {
		r, err = g.ready(now)
		g.credit.ready = r.d
	}
	if err == nil {
		r, err = g.gate(now)
	}
	if r.capacity > 0 && g.takesCapacity {
		g.credit.Each = r.capacity
	}
	g.credit.read(r, err, now)
}

func (g *poolGate) note(a Answer, out outcome, r *meshv1.JobRecord, now time.Time) {
	status := a.HTTP.GetStatus()
	isLate := !now.Before(r.GetAttemptDeadline().AsTime()) || status == http.StatusRequestTimeout || status == http.StatusGatewayTimeout
	for _, note := range g.notes {
		note(out, isLate, r.GetJob().GetStartedAt().AsTime(), now)
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

// poll returns a gate that asks while the pool is owned.
func (g *poolGate) poll(ask func(context.Context) (reading, error)) gate {
	p := &poller{ask: ask, err: errNotAsked}
	g.polls = append(g.polls, p)
	return p.read
}

var errNotAsked = errors.New("not asked yet")

// poller has the last answer of a source that is asked at intervals. No lock is held meanwhile.
type poller struct {
	ask func(context.Context) (reading, error)

	mu   sync.Mutex
	last reading
	err  error
}

func (p *poller) read(time.Time) (reading, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last, p.err
}

func (p *poller) run(ctx context.Context, every time.Duration, changed func()) {
	for {
		began := time.Now()
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
		if process.Sleep(ctx, every-time.Since(began)) != nil {
			return
		}
	}
}
