package bus

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// aliveWait is how long a host may take to answer. A host that is slow is still
// a host: only the broker's word that nobody listens counts as none.
const aliveWait = 100 * time.Millisecond

const aliveGroup = "alive"

// Presence is what a host of a stage says about it.
type Presence struct {
	// Heard says that a host has said anything.
	Heard bool
	// Durabilities are the queues that the stage has; none where no host got to
	// say so.
	Durabilities []pipeline.Durability
	// Busy says that the host has items that wait for a slot.
	Busy bool
}

// Alive asks a host of the stage what there is of it: ErrNoHost when nobody
// serves it, ErrDisconnected when the broker is away.
func (b *Bus) Alive(ctx context.Context, stage pipeline.StageName) (Presence, error) {
	return b.present(ctx, b.Subjects.Alive(stage))
}

// Held asks whether any host may have items of the stage in hand, also one that
// takes no more: nil when one may, ErrNoHost when none can, ErrDisconnected when
// the broker is away.
func (b *Bus) Held(ctx context.Context, stage pipeline.StageName) error {
	_, err := b.present(ctx, b.Subjects.Holding(stage))
	return err
}

// ServeHeld answers for the stage that items may be in hand, until the returned
// function is called.
func (b *Bus) ServeHeld(stage pipeline.StageName) (stop func() error, err error) {
	sub, err := b.nc.QueueSubscribe(b.Subjects.Holding(stage), aliveGroup, func(msg *nats.Msg) {
		if err := b.nc.Publish(msg.Reply, nil); err != nil {
			b.settings.Logger.Debug("holding answer not sent", "stage", stage, "error", err)
		}
	})
	if err != nil {
		return nil, sendError(err)
	}
	return b.known(sub, nil)
}

// present asks whoever answers on the subject.
func (b *Bus) present(ctx context.Context, subject string) (Presence, error) {
	ctx, cancel := context.WithTimeout(ctx, aliveWait)
	defer cancel()
	answer, err := b.ask(ctx, subject, nil)
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, ErrUnknown) && b.Connected():
		return Presence{}, nil
	case errors.Is(err, ErrUnknown):
		return Presence{}, ErrDisconnected
	case err != nil:
		return Presence{}, err
	case noResponders(answer):
		return Presence{}, ErrNoHost
	}
	return presence(answer.Data), nil
}

// presence reads what a host says. Anybody may have said it, so what is no such
// message says nothing.
func presence(data []byte) Presence {
	var answer meshv1.AliveResponse
	if proto.Unmarshal(data, &answer) != nil {
		return Presence{}
	}
	out := Presence{Heard: true, Busy: answer.GetBusy()}
	for _, d := range answer.GetDurabilities() {
		if durability, err := pipeline.DurabilityFromProto(d); err == nil && durability != pipeline.DurabilityUnset && len(out.Durabilities) < durabilities {
			out.Durabilities = append(out.Durabilities, durability)
		}
	}
	return out
}

// durabilities is how many there are.
const durabilities = 2

// ServeAlive answers for the stage until the returned function is called: with
// the queues that it has, and whether the host is busy. Once it has returned,
// Alive finds the host.
func (b *Bus) ServeAlive(stage pipeline.StageName, host pipeline.HostID, queues []pipeline.Durability, busy func() bool) (stop func() error, err error) {
	said := &meshv1.AliveResponse{Host: string(host), Stage: string(stage)}
	for _, d := range queues {
		said.Durabilities = append(said.Durabilities, d.ToProto())
	}
	idle, err := proto.Marshal(said)
	if err != nil {
		return nil, err
	}
	said.Busy = true
	loaded, err := proto.Marshal(said)
	if err != nil {
		return nil, err
	}
	sub, err := b.nc.QueueSubscribe(b.Subjects.Alive(stage), aliveGroup, func(msg *nats.Msg) {
		answer := idle
		if busy() {
			answer = loaded
		}
		if err := b.nc.Publish(msg.Reply, answer); err != nil {
			b.settings.Logger.Debug("alive answer not sent", "stage", stage, "error", err)
		}
	})
	if err != nil {
		return nil, sendError(err)
	}
	return b.known(sub, nil)
}
