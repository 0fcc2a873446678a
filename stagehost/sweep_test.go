package stagehost_test

import (
	"fmt"
	"testing"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// The broker's word is taken for it, whatever has become of the item: the first
// answer counts.
func TestExhaustedItemIsAnsweredAndRemoved(t *testing.T) {
	t.Parallel()
	for name, key := range map[string]string{"reply": "", "stored result": "key"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			g := newGate()
			b.host(g)
			c := b.ask("unlucky", func(e *envelope.Envelope) { e.IdempotencyKey = key })
			testbed.Receive(t, "item at the runner", g.entered)
			advisory := "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES." + b.bus.Stream(stage, pipeline.Memory) + ".normal-x"
			for _, word := range []string{"garbage", `{"stream_seq":4711,"deliveries":20}`, `{"stream_seq":1,"deliveries":20}`} {
				if err := b.broker.Client().Publish(advisory, fmt.Append(nil, word)); err != nil {
					t.Fatal(err)
				}
			}
			if f := c.fault(fault.AttemptsExhausted); f.Stage != string(stage) || f.Step != "step" {
				t.Errorf("at stage %q, step %q", f.Stage, f.Step)
			}
			b.emptied()
			if key != "" {
				if got := b.stored(c.env.RequestID); got.Fault == nil || got.Fault.Reason != fault.AttemptsExhausted {
					t.Errorf("stored %+v", got)
				}
			}
			close(g.release)
		})
	}
}
