package baseline

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Host forwards what comes to a stage.
type Host struct {
	nc    *nats.Conn
	js    jetstream.JetStream
	route Route
	pulls []jetstream.ConsumeContext

	mu sync.Mutex
	// sent are the messages that are not yet acknowledged by their stream, and what they
	// were received as.
	sent map[*nats.Msg]jetstream.Msg
}

// ErrStage says that the stage is not on the route.
var ErrStage = errors.New("the route has no such stage")

// StartHost starts one of a stage's hosts, at all places that the stage has on the route.
// The front has been started before it.
func StartHost(ctx context.Context, broker Broker, route Route, stage string) (*Host, error) {
	nc, err := broker.connect("baseline " + stage)
	if err != nil {
		return nil, err
	}
	h := &Host{nc: nc, route: route, sent: map[*nats.Msg]jetstream.Msg{}}
	if err := h.start(ctx, stage); err != nil {
		return nil, errors.Join(fmt.Errorf("stage %s: %w", stage, err), h.Stop())
	}
	return h, nil
}

func (h *Host) start(ctx context.Context, stage string) (err error) {
	h.js, err = jetstream.New(h.nc,
		jetstream.WithPublishAsyncMaxPending(maxWaiting),
		jetstream.WithPublishAsyncAckHandler(func(_ jetstream.JetStream, m *nats.Msg, _ *jetstream.PubAck) { h.stored(m) }),
		jetstream.WithPublishAsyncErrHandler(func(_ jetstream.JetStream, m *nats.Msg, _ error) { h.refused(m) }),
	)
	if err != nil {
		return err
	}
	hops := h.route.hops(stage)
	if len(hops) == 0 {
		return ErrStage
	}
	for _, hop := range hops {
		if err := h.pull(ctx, hop); err != nil {
			return err
		}
	}
	return nil
}

// What a host has asked for at most: as many items as the client asks for by itself, and
// no more bytes than the broker keeps for one connection.
const (
	pullMessages = 500
	pullBytes    = 16 << 20
)

func (h *Host) pull(ctx context.Context, hop int) error {
	c, err := h.js.Consumer(ctx, h.route.stream(hop), consumer)
	if err != nil {
		return err
	}
	forward := func(m jetstream.Msg) { h.forward(m, h.route.subject(hop+1)) }
	if hop == len(h.route.Stages)-1 {
		forward = h.answer
	}
	pull, err := c.Consume(forward, jetstream.PullMaxMessagesWithBytesLimit(pullMessages, pullBytes))
	if err != nil {
		return err
	}
	h.pulls = append(h.pulls, pull)
	return nil
}

// forward publishes to the next stream.
func (h *Host) forward(m jetstream.Msg, next string) {
	out := &nats.Msg{Subject: next, Data: m.Data()}
	h.mu.Lock()
	h.sent[out] = m
	h.mu.Unlock()
	if _, err := h.js.PublishMsgAsync(out); err != nil {
		h.refused(out)
	}
}

// stored acknowledges what has been forwarded.
func (h *Host) stored(out *nats.Msg) {
	if m := h.take(out); m != nil {
		_ = m.Ack() // else it is delivered again, and forwarded twice
	}
}

// backOff is how long what could not be forwarded stays where it is.
const backOff = 100 * time.Millisecond

// refused gives back what has not.
func (h *Host) refused(out *nats.Msg) {
	if m := h.take(out); m != nil {
		_ = m.NakWithDelay(backOff) // else it is delivered again later
	}
}

func (h *Host) take(out *nats.Msg) jetstream.Msg {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.sent[out]
	delete(h.sent, out)
	return m
}

// answer publishes to the front.
func (h *Host) answer(m jetstream.Msg) {
	if err := h.nc.Publish(h.route.answers(), m.Data()); err != nil {
		_ = m.NakWithDelay(backOff) // else it is delivered again later
		return
	}
	_ = m.Ack() // else it is delivered again, and nobody waits for the answer
}

// Stop stops pulling, sends what is under way, and leaves.
func (h *Host) Stop() error {
	for _, pull := range h.pulls {
		pull.Stop()
		<-pull.Closed()
	}
	return leave(h.nc)
}
