package testbed

import (
	"context"
	"maps"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// Counts is a meter that keeps the sums of its counters. It is safe for concurrent use.
type Counts struct {
	noop.Meter

	mu   sync.Mutex
	sums map[string]int64
}

var _ metric.Meter = (*Counts)(nil)

// Int64Counter implements metric.Meter.
func (c *Counts) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return counter{counts: c, name: name}, nil
}

// Of returns a sum: of "name", of "name value" for an attribute's value, or of
// "name key=value,key=value" for all attributes.
func (c *Counts) Of(key string) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sums[key]
}

// All returns all sums.
func (c *Counts) All() map[string]int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.sums)
}

type counter struct {
	noop.Int64Counter

	counts *Counts
	name   string
}

// Add implements metric.Int64Counter.
func (c counter) Add(_ context.Context, n int64, options ...metric.AddOption) {
	set := metric.NewAddConfig(options).Attributes()
	c.counts.mu.Lock()
	defer c.counts.mu.Unlock()
	if c.counts.sums == nil {
		c.counts.sums = map[string]int64{}
	}
	c.counts.sums[c.name] += n
	for _, kv := range set.ToSlice() {
		c.counts.sums[c.name+" "+kv.Value.AsString()] += n
	}
	c.counts.sums[c.name+" "+set.Encoded(attribute.DefaultEncoder())] += n
}
