package stagehost

import (
	"context"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// sweepBudget bounds what is done about one item.
const sweepBudget = 5 * time.Second

// sweep ends an item that the broker gave up on by itself. Hosts decide before, so
// this is for those that ended each host which got them before it could. No
// attempt is repeated: whoever waits hears of it by the deadline at the latest.
func (h *Host) sweep(g bus.GivenUp) {
	ctx, cancel := context.WithTimeout(context.Background(), sweepBudget)
	defer cancel()
	env, err := h.decode(g.Data)
	if err != nil {
		h.metrics.malformed(ctx)
	} else {
		h.metrics.failed(ctx, h.giveUpOn(ctx, env, g.Deliveries))
	}
	if err := h.bus.Remove(ctx, g); err != nil {
		h.settings.Logger.Warn("an item that the broker gave up on stays in its queue", "error", err)
	}
}

// giveUpOn answers an item that is in nobody's hands.
func (h *Host) giveUpOn(ctx context.Context, env *envelope.Envelope, deliveries int) *fault.Fault {
	hop := env.Hop()
	f := exhausted(deliveries, h.settings.Stage).At(string(hop.Stage), string(hop.Step), string(h.settings.Host))
	reply := env.Answer()
	reply.Fault = f
	h.settings.Logger.Warn("the broker gave up on an item", "request", env.RequestID, "deliveries", deliveries)
	if env.StoresAnswer() {
		if m, err := h.bus.Result(env.Result(reply, time.Now())); err == nil {
			_, err = h.bus.SendAndWait(ctx, m)
			h.say(err)
		}
	}
	m, err := h.bus.Reply(env.Gateway, reply)
	if err == nil {
		err = h.bus.SendOnce(m)
	}
	h.say(err)
	return f
}
