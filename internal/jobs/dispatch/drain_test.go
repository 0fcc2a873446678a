package dispatch

import (
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// BenchmarkDrain is the time of one job: from a queue that is full when the dispatcher starts
// until its end is stored. The target answers at once.
func BenchmarkDrain(b *testing.B) {
	m := newMesh(b, func(c *Config) {
		p := c.Pools["main"]
		p.MaxInFlight = 256
		c.Pools["main"] = p
	})
	m.submitMany(b.N)
	target := &stub{}
	b.ResetTimer()
	m.start(target)
	testbed.Eventually(b, "the queue is empty", func() bool { return m.backlog() == 0 })
}
