package bus

import (
	"context"
	"encoding/json"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// GivenUp is an item that the broker delivers to nobody any more: it was delivered
// MaxDeliver times, and nobody settled it. It stays in its queue until it is
// removed, or too old.
type GivenUp struct {
	Data       []byte
	Deliveries int

	stream string
	seq    uint64
}

// givenUpWait bounds the question for an item.
const givenUpWait = 2 * time.Second

// ServeGivenUp hands each item of the stage's queue in memory that the broker gives
// up on to one of those that serve it, until the returned function is called. On
// file it gives up on none. The handler may block.
func (b *Bus) ServeGivenUp(stage pipeline.StageName, handle func(GivenUp)) (stop func() error, err error) {
	stream := b.Stream(stage, pipeline.Memory)
	sub, err := b.nc.QueueSubscribe("$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES."+stream+".*", aliveGroup, func(msg *nats.Msg) {
		if g, err := b.givenUp(stream, msg.Data); err == nil {
			handle(g)
		} else {
			b.settings.Logger.Debug("an item that the broker gave up on is not there", "stage", stage, "error", err)
		}
	})
	if err != nil {
		return nil, sendError(err)
	}
	return b.known(sub, sub.SetPendingLimits(watchBacklog, -1))
}

// givenUp fetches the item that the broker's advisory is about.
func (b *Bus) givenUp(stream string, advisory []byte) (GivenUp, error) {
	var about struct {
		Seq        uint64 `json:"stream_seq"`
		Deliveries int    `json:"deliveries"`
	}
	if err := json.Unmarshal(advisory, &about); err != nil {
		return GivenUp{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), givenUpWait)
	defer cancel()
	var answer struct {
		Message struct {
			Data []byte `json:"data"`
		} `json:"message"`
		Error *apiError `json:"error"`
	}
	err := b.api(ctx, "STREAM.MSG.GET."+stream, struct {
		Seq uint64 `json:"seq"`
	}{about.Seq}, &answer)
	if err == nil && answer.Error != nil {
		err = answer.Error.classify()
	}
	return GivenUp{Data: answer.Message.Data, Deliveries: about.Deliveries, stream: stream, seq: about.Seq}, err
}

// Remove takes an item that the broker gave up on out of its queue.
func (b *Bus) Remove(ctx context.Context, g GivenUp) error {
	_, err := b.delete(ctx, g.stream, g.seq)
	return err
}
