package call

import (
	"context"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// capacityAge is how long an answer about a stage's hosts is good.
const capacityAge = 100 * time.Millisecond

// capacity knows which stages have hosts. It asks the bus at most once at a
// time and per capacityAge for each stage.
type capacity struct {
	connected func() bool
	ask       func(context.Context, pipeline.StageName) error

	mu     sync.Mutex
	stages map[pipeline.StageName]*answer
}

// answer is what was, or is being, heard about a stage.
type answer struct {
	done  chan struct{}
	err   error
	until time.Time
}

func newCapacity(b *bus.Bus) *capacity {
	return &capacity{connected: b.Connected, ask: b.Alive, stages: map[pipeline.StageName]*answer{}}
}

// maxStages bounds the stages that are remembered: a caller can name any.
const maxStages = 4096

// check returns nil when every stage on the route has a host. While the broker
// is away nothing is known of hosts, whatever was heard before.
func (c *capacity) check(ctx context.Context, route []pipeline.Hop) *fault.Fault {
	if !c.connected() {
		return refused(bus.ErrDisconnected, route[0])
	}
	asked := make([]*answer, len(route))
	for i, hop := range route {
		asked[i] = c.of(hop.Stage)
	}
	for i, a := range asked {
		select {
		case <-a.done:
		case <-ctx.Done():
			return fault.From(ctx.Err())
		}
		if a.err != nil {
			return refused(a.err, route[i])
		}
	}
	return nil
}

// of returns what is known about the stage, asking if that is nothing or old.
func (c *capacity) of(stage pipeline.StageName) *answer {
	c.mu.Lock()
	defer c.mu.Unlock()
	a := c.stages[stage]
	if a != nil && !a.stale(time.Now()) {
		return a
	}
	if len(c.stages) >= maxStages {
		clear(c.stages)
	}
	a = &answer{done: make(chan struct{})}
	c.stages[stage] = a
	// Bus.Alive ends within 100 ms, with the bus or without.
	go a.fill(c.ask, stage)
	return a
}

func (a *answer) stale(now time.Time) bool {
	select {
	case <-a.done:
		return now.After(a.until)
	default:
		return false
	}
}

// fill asks for all callers that wait, so no one caller's context ends it.
func (a *answer) fill(ask func(context.Context, pipeline.StageName) error, stage pipeline.StageName) {
	defer close(a.done)
	a.err = ask(context.Background(), stage)
	a.until = time.Now().Add(capacityAge)
}
