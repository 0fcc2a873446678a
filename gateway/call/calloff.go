package call

import (
	"context"
	"errors"
	"time"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

const (
	// callOffBudget is for the whole of one calling off, of which most is the
	// wait for its turn where a thousand callers leave at once.
	callOffBudget = 5 * time.Second
	// stepBudget is for each thing that the broker is asked.
	stepBudget = time.Second
	// withdrawalsAtOnce bounds what is asked of the broker at a time: its API
	// has one queue for everybody. The others wait their turn.
	withdrawalsAtOnce = 64
)

// callOffs takes back what ended calls have left in the mesh, behind their
// callers' backs: the item is withdrawn from its first queue, and a notice tells
// the hosts. An item that a host has in hand is in the queue, too, so the notice
// goes out in any case.
type callOffs struct {
	bus      *bus.Bus
	takeBack func(context.Context, bus.Message, uint64) (bool, error)
	count    func(how string)
	// withdrawn, where set, hears of what was taken back.
	withdrawn func(*envelope.Envelope)
	// inside bounds those that wait or withdraw, turns those that withdraw.
	inside *admission.Limiter
	turns  chan struct{}
}

func newCallOffs(b *bus.Bus, bound int, count func(string)) *callOffs {
	return &callOffs{bus: b, takeBack: b.DeleteQueued, count: count, inside: admission.NewLimiter(bound), turns: make(chan struct{}, withdrawalsAtOnce)}
}

// leftover is what a call that ended early has left in the mesh.
type leftover struct {
	env     *envelope.Envelope
	message bus.Message
	// published gets what became of the last publish, which is the tries-th.
	published <-chan published
	tries     int
}

// start calls the request off and returns at once. Where too many are being
// called off there is only the notice.
func (o *callOffs) start(l leftover) {
	if f := o.inside.Acquire(); f != nil {
		o.conclude(l.env, false)
		return
	}
	go func() {
		defer o.inside.Release()
		o.callOff(l)
	}()
}

// stop waits for what is being called off, at most callOffBudget. What comes
// later is only noticed.
func (o *callOffs) stop() {
	o.inside.Close()
	// Each has a budget of its own, so this needs none.
	_ = o.inside.AwaitIdle(context.Background())
}

func (o *callOffs) callOff(l leftover) {
	ctx, cancel := context.WithTimeout(context.Background(), callOffBudget)
	defer cancel()
	p := l.outcome()
	if l.unsent(p) {
		return
	}
	was := p.err == nil && o.withdraw(ctx, l.message, p.receipt.Seq)
	if was && o.withdrawn != nil {
		o.withdrawn(l.env)
	}
	if l.env.StoresAnswer() {
		o.store(ctx, l.env)
	}
	o.conclude(l.env, was)
}

// outcome returns what became of the publish: unknown where that takes too long.
func (l leftover) outcome() published {
	patience := time.NewTimer(stepBudget)
	defer patience.Stop()
	select {
	case p := <-l.published:
		return p
	case <-patience.C:
		return published{err: bus.ErrUnknown}
	}
}

// unsent reports whether nothing was ever queued: a try before may have been.
func (l leftover) unsent(p published) bool {
	if l.tries > 1 {
		return false
	}
	return p.receipt.Duplicate || p.err != nil && !errors.Is(p.err, bus.ErrUnknown)
}

// withdraw reports whether the item was in its queue, and is not any more.
func (o *callOffs) withdraw(ctx context.Context, m bus.Message, seq uint64) bool {
	select {
	case o.turns <- struct{}{}:
		defer func() { <-o.turns }()
	case <-ctx.Done():
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, stepBudget)
	defer cancel()
	was, err := o.takeBack(ctx, m, seq)
	return err == nil && was
}

// store makes CANCELLED the answer of a request that was called off, as its caller
// was told. An answer that is there already stays.
func (o *callOffs) store(ctx context.Context, env *envelope.Envelope) {
	reply := env.Answer()
	reply.Fault = calledOff()
	message, err := o.bus.Result(env.Result(reply, time.Now()))
	if err != nil {
		return // a fault always encodes, and is small
	}
	ctx, cancel := context.WithTimeout(ctx, stepBudget)
	defer cancel()
	// Without it the request is one that never finishes; its caller knows.
	_, _ = o.bus.PublishAndWait(ctx, message)
}

// conclude tells the hosts, and counts how the request was called off.
func (o *callOffs) conclude(env *envelope.Envelope, was bool) {
	err := o.bus.Cancel(&envelope.Cancel{Mesh: env.Mesh, RequestID: env.RequestID, Deadline: env.Deadline})
	switch {
	case was:
		o.count(deleted)
	case err == nil:
		o.count(notified)
	default:
		o.count(failed)
	}
}

// calledOff is what the caller of a request gets that was called off.
func calledOff() *fault.Fault { return fault.New(fault.Cancelled, "the request was called off") }
