package stagehost

import (
	"context"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/schema"
)

// receive is the puller's handler: it decodes and checks an item on the
// subscription's goroutine and posts it to the loop.
func (h *Host) receive(d bus.Delivery) {
	env, err := h.decode(d.Data)
	if err == nil && env.Durability != d.Durability {
		err = fmt.Errorf("item of durability %q in the queue of %q", env.Durability, d.Durability)
	}
	if err != nil {
		h.malformed(d, err)
		return
	}
	it := h.pulled(d, env)
	h.metrics.pulled(context.Background(), it)
	h.load.waited(it.queueWait)
	h.post(&arrived{item: it, fault: h.fit(it)})
}

func (h *Host) pulled(d bus.Delivery, env *envelope.Envelope) *item {
	it := &item{env: env, delivery: d, arrived: d.Arrived, queueWait: h.queueWait(d)}
	it.timing = it.timingOf(h.settings.Host)
	return it
}

// decode reads an item and makes sure that it is this stage's to handle.
func (h *Host) decode(data []byte) (*envelope.Envelope, error) {
	env, err := envelope.Decode(data)
	if err != nil {
		return nil, err
	}
	if env.Mesh != h.settings.Mesh {
		return nil, fmt.Errorf("item of mesh %q", env.Mesh)
	}
	if stage := env.Hop().Stage; stage != h.settings.Stage {
		return nil, fmt.Errorf("item for stage %q", stage)
	}
	return env, nil
}

// queueWait is measured on the broker's clock, as far as this host knows it.
func (h *Host) queueWait(d bus.Delivery) time.Duration {
	return max(0, d.Arrived.Add(h.clock.ahead()).Sub(d.Stored))
}

// fit makes the item fit the runner, or says why it does not.
func (h *Host) fit(it *item) *fault.Fault {
	hop := it.env.Hop()
	fitted, err := h.contract.Fit(it.env.Parts, it.env.Kept, hop.Inputs)
	if err == nil && it.env.Position == 0 {
		// What a caller sends and nobody takes is a mistake. What a step puts
		// out and the next does not take is a choice of the pipeline.
		err = schema.AllTaken(h.spec, it.env.Parts, hop.Inputs, hop.Keep)
	}
	if err != nil {
		return fault.From(err)
	}
	it.inputs = fitted
	it.bytes = payload.Size(fitted.Inputs)
	it.key = batch.Key(schema.Key(h.spec, hop.Model, fitted, hop.Parameters, h.settings.Batch.By))
	return nil
}
