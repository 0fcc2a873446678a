package stagemesh

import (
	"sync"

	"go.opentelemetry.io/otel/metric"
)

// callbacks is a Meter whose callbacks end with the mesh.
type callbacks struct {
	metric.Meter

	mu         sync.Mutex
	registered []metric.Registration
}

// RegisterCallback implements metric.Meter.
func (c *callbacks) RegisterCallback(f metric.Callback, of ...metric.Observable) (metric.Registration, error) {
	r, err := c.Meter.RegisterCallback(f, of...)
	if err == nil {
		c.mu.Lock()
		c.registered = append(c.registered, r)
		c.mu.Unlock()
	}
	return r, err
}

// unregister ends all callbacks.
func (c *callbacks) unregister() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.registered {
		_ = r.Unregister()
	}
	c.registered = nil
}
