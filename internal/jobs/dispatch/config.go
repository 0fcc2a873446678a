package dispatch

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/webhook"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Config is the section jobs of a mesh file.
type Config struct {
	store.Settings

	Pools  map[string]PoolConfig  `yaml:"pools"`
	Queues map[string]QueueConfig `yaml:"queues"`
	// Batches configures the batches of the OpenAI API.
	Batches store.BatchSettings `yaml:"batches"`
	// Tenants are those with a weight, queues or totals of their own.
	Tenants map[string]TenantConfig `yaml:"tenants"`
	Rates   RatesConfig             `yaml:"rates"`
	// NATS has gateways serve tenants on the broker.
	NATS bool `yaml:"nats"`
	// Webhooks are the calls that tell of the ends of jobs; nil means that there are none.
	Webhooks *webhook.Config `yaml:"webhooks"`
}

// PoolConfig is a target with its capacity.
type PoolConfig struct {
	Target TargetConfig `yaml:"target"`
	// MaxInFlight bounds the jobs that run; 0 means DefaultMaxInFlight.
	MaxInFlight int `yaml:"max_in_flight"`
	// Timeout bounds an attempt; 0 means the pipeline's own, or DefaultTimeout of an HTTP target.
	Timeout time.Duration `yaml:"timeout"`
	// Limits bound the jobs of each tenant, or of each value of an attribute.
	Limits []LimitConfig `yaml:"limits"`
	// Merge is how queues share the pool: weighted, strict or deadline.
	Merge string `yaml:"merge"`
	// Gate says how much room the target has; nil means up to MaxInFlight.
	Gate *GateConfig `yaml:"gate,value"`
}

// TargetConfig is where the jobs of a pool go.
type TargetConfig struct {
	// Pipelines of this mesh that jobs may use, the first unless they say.
	Pipelines []string `yaml:"pipelines"`
	// HTTP is an endpoint, instead of pipelines.
	HTTP *HTTPTarget `yaml:"http"`

	webhooks *webhook.Config
}

// QueueConfig is a queue.
type QueueConfig struct {
	store.JobQueueSettings

	// Pool is the one that the queue feeds; it may be empty if there is only one.
	Pool string `yaml:"pool"`
	// Weight is the queue's share of its pool; 0 means 1.
	Weight float64 `yaml:"weight"`
	// Attempts is how often a job may fail; 0 means DefaultAttempts.
	Attempts int `yaml:"attempts"`
	// Class is the priority class of the jobs in this mesh: low, the default, normal or high.
	Class string `yaml:"class"`
}

// TenantConfig is a tenant of the jobs.
type TenantConfig struct {
	// Weight is the tenant's share of a queue's class; 0 means 1.
	Weight float64 `yaml:"weight"`
	// Queues are those that it may submit to; empty means all.
	Queues []string `yaml:"queues"`
}

// Defaults of Config.
const (
	DefaultMaxInFlight = 64
	DefaultAttempts    = 5
	maxMaxInFlight     = 4096
)

// Validate checks the section; messages begin with the key in it.
func (c Config) Validate() error {
	errs := []error{c.Settings.Validate()}
	if c.Webhooks != nil {
		errs = append(errs, config.InSection("webhooks", errors.Join(c.Webhooks.Validate(), within("max_in_flight", c.Webhooks.MaxInFlight, maxMaxInFlight))))
	}
	retention := c.WithJobDefaults().Retention
	return errors.Join(append(
		errs,
		inEach("pools", c.Pools, validOwnName("pool"), func(_ string, p PoolConfig) error { return p.validate() }),
		inEach("queues", c.Queues, validOwnName("queue"), func(name string, q QueueConfig) error {
			_, err := c.PoolOf(name)
			if ttl := q.WithDefaults().TTL; ttl > retention {
				err = errors.Join(fmt.Errorf("ttl: %s is longer than the %s of jobs.retention: the end of a job could be forgotten before the job is", ttl, retention), err)
			}
			return errors.Join(q.validate(), err)
		}),
		config.InSection("batches", c.validateBatches()),
		inEach("tenants", c.Tenants, validNameOf("tenant"), func(_ string, t TenantConfig) error { return t.validate(c.Queues) }),
		config.InSection("rates", c.Rates.validate(c.Pools)),
	)...)
}

// inEach checks the values of a section, and their names.
func inEach[V any](section string, values map[string]V, validName func(string) error, validate func(name string, value V) error) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if err := validName(name); err != nil {
			errs = append(errs, fmt.Errorf("%s.%s: %w", section, name, err))
		}
		errs = append(errs, config.InSection(section+"."+name, validate(name, values[name])))
	}
	return errors.Join(errs...)
}

func validNameOf(kind string) func(string) error {
	return func(name string) error { return pipeline.ValidName(kind, name) }
}

func validOwnName(kind string) func(string) error {
	return func(name string) error {
		if name == string(pipeline.WebhookQueue) {
			return fmt.Errorf("is the built-in %s; use jobs.webhooks", kind)
		}
		return pipeline.ValidName(kind, name)
	}
}

func within[N cmp.Ordered](key string, n, most N) error {
	if n > most {
		return fmt.Errorf("%s: %v, at most %v are possible", key, n, most)
	}
	return config.NotNegative(key, n)
}

// validateBatches checks that the ends of lines are there when their batch ends.
func (c Config) validateBatches() error {
	err := c.Batches.Validate()
	if c.Batches.Queue == "" {
		return err
	}
	q, ok := c.Queues[string(c.Batches.Queue)]
	ttl, retention := q.WithDefaults().TTL, c.WithJobDefaults().Retention
	switch {
	case !ok:
		return errors.Join(err, fmt.Errorf("queue: there is no %q in jobs.queues", c.Batches.Queue))
	case ttl < store.BatchWindow:
		return errors.Join(err, fmt.Errorf("queue: the ttl of %s is %s, at least the %s of a batch are needed", c.Batches.Queue, ttl, store.BatchWindow))
	case retention <= store.BatchWindow:
		return errors.Join(err, fmt.Errorf("queue: jobs.retention is %s, more than the %s of a batch are needed", retention, store.BatchWindow))
	}
	return err
}

// PoolOf returns the pool that a queue feeds.
func (c Config) PoolOf(queue string) (string, error) {
	name, names := c.Queues[queue].Pool, slices.Sorted(maps.Keys(c.Pools))
	if _, ok := c.Pools[name]; ok {
		return name, nil
	}
	names = slices.DeleteFunc(names, func(name string) bool { return name == string(pipeline.WebhookQueue) })
	switch {
	case name == "" && len(names) == 1:
		return names[0], nil
	case name == "":
		return "", fmt.Errorf("pool: name one of %v", names)
	}
	return "", fmt.Errorf("pool: there is no %q; there are %v", name, names)
}

// Reserves returns the bytes that the broker reserves for the queues, records and chunks.
func (c Config) Reserves() int64 {
	out := c.WithJobDefaults().MaxBytes + c.JobChunkBytes() + store.JobControlBytes
	for _, q := range c.WithWebhooks().Queues {
		out += q.WithDefaults().MaxBytes
	}
	if c.Batches.Queue != "" {
		out += c.Batches.WithDefaults().MaxBytes + store.BatchRecordBytes
	}
	return out
}

func (p PoolConfig) validate() error {
	errs := []error{within("max_in_flight", p.MaxInFlight, maxMaxInFlight), config.NotNegative("timeout", p.Timeout), oneOf("merge", cmp.Or(p.Merge, weighted), weighted, strict, byDeadline)}
	switch isMesh := len(p.Target.Pipelines) > 0; {
	case isMesh && p.Target.HTTP != nil:
		errs = append(errs, errors.New("target: is both pipelines and http; a pool has one"))
	case p.Target.HTTP != nil:
		errs = append(errs, config.InSection("target.http", p.Target.HTTP.validate()))
	case !isMesh:
		errs = append(errs, errors.New("target: is required; name pipelines of this mesh, as target.pipelines, or an endpoint, as target.http.url"))
	}
	for i, name := range p.Target.Pipelines {
		if err := pipeline.ValidPipelineName(name); err != nil {
			errs = append(errs, fmt.Errorf("target.pipelines[%d]: %w", i, err))
		}
	}
	for i, l := range p.Limits {
		errs = append(errs, config.InSection(fmt.Sprintf("limits[%d]", i), l.validate()))
		for j, other := range p.Limits[:i] {
			if l.Quota > 0 && other.Quota > 0 && l.quotaName() == other.quotaName() {
				errs = append(errs, fmt.Errorf("limits[%d].quota: limits[%d] is a quota by the same, in the same unit and window", i, j))
			}
		}
	}
	errs = append(errs, within("limits", len(p.Limits), maxLimits))
	if p.Gate != nil {
		_, err := newPoolGate(new(Settings), p, time.Time{})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func oneOf(key, word string, words ...string) error {
	if slices.Contains(words, word) {
		return nil
	}
	last := len(words) - 1
	return fmt.Errorf("%s: %q; use %s or %s", key, word, strings.Join(words[:last], ", "), words[last])
}

func (q QueueConfig) validate() error {
	return errors.Join(
		q.JobQueueSettings.Validate(), config.NotNegative("weight", q.Weight), config.NotNegative("attempts", q.Attempts),
		oneOf("class", cmp.Or(q.Class, string(pipeline.Low)), string(pipeline.Low), string(pipeline.Normal), string(pipeline.High)),
	)
}

func (t TenantConfig) validate(queues map[string]QueueConfig) error {
	errs := []error{config.NotNegative("weight", t.Weight)}
	for i, name := range t.Queues {
		if _, ok := queues[name]; !ok {
			errs = append(errs, fmt.Errorf("queues[%d]: there is no queue %q", i, name))
		}
	}
	return errors.Join(errs...)
}

// priority is the one of the queue's jobs among the requests of a mesh.
func (q QueueConfig) priority() int32 {
	switch pipeline.Class(q.Class) {
	case pipeline.High:
		return 1
	case pipeline.Normal:
		return 0
	}
	return -1
}

func (q QueueConfig) weight() float64 { return cmp.Or(q.Weight, 1) }
