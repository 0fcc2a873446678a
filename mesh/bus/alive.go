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

// Alive returns nil when somebody serves the stage, ErrNoHost when nobody does
// and ErrDisconnected when the broker is away.
func (b *Bus) Alive(ctx context.Context, stage pipeline.StageName) error {
	ctx, cancel := context.WithTimeout(ctx, aliveWait)
	defer cancel()
	answer, err := b.ask(ctx, b.Subjects.Alive(stage), nil)
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, ErrUnknown) && b.Connected():
		return nil
	case errors.Is(err, ErrUnknown):
		return ErrDisconnected
	case err != nil:
		return err
	case noResponders(answer):
		return ErrNoHost
	}
	return nil
}

// ServeAlive answers for the stage until the returned function is called. Once
// it has returned, Alive finds the host.
func (b *Bus) ServeAlive(stage pipeline.StageName, host pipeline.HostID) (stop func() error, err error) {
	answer, err := proto.Marshal(&meshv1.AliveResponse{Host: string(host), Stage: string(stage)})
	if err != nil {
		return nil, err
	}
	sub, err := b.nc.QueueSubscribe(b.Subjects.Alive(stage), aliveGroup, func(msg *nats.Msg) {
		if err := b.nc.Publish(msg.Reply, answer); err != nil {
			b.settings.Logger.Debug("alive answer not sent", "stage", stage, "error", err)
		}
	})
	if err != nil {
		return nil, sendError(err)
	}
	return b.known(sub, nil)
}
