package store

import (
	"context"
	"errors"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// ScaleBytes bounds what gateways remember of how many hosts stages should have.
const ScaleBytes = 16 << 20

// Scales have how many hosts each stage should have, and what that was decided from, in memory: the
// gateway that comes first decides, and all others read it. The values are the caller's.
type Scales struct{ stream }

// NewScales returns the store. It makes no call to the broker.
func NewScales(b *bus.Bus) *Scales {
	out := &Scales{newStream(b, "scaling", b.ScaleStream(), b.Scale("*", "*"), Settings{}, Settings{MaxBytes: ScaleBytes})}
	out.config.Description, out.config.Storage, out.config.Duplicates = "How many hosts stages should have", jetstream.MemoryStorage, minDuplicates
	return out
}

// Get returns the value of a stage and a target, and its number; nil and 0 if there is none.
func (s *Scales) Get(ctx context.Context, stage pipeline.StageName, target string) ([]byte, uint64, error) {
	msg, err := s.bus.Last(ctx, s.bus.ScaleStream(), s.bus.Scale(stage, target))
	if errors.Is(err, bus.ErrNoQueue) {
		return nil, 0, s.wrap(s.Ensure(ctx))
	}
	if err != nil || msg == nil {
		return nil, 0, s.wrap(err)
	}
	return msg.Data, msg.Seq, nil
}

// Replace replaces the value at number after, 0 for none: ErrJobChanged if the value is another one.
func (s *Scales) Replace(ctx context.Context, stage pipeline.StageName, target string, after uint64, value []byte) error {
	_, err := s.replace(ctx, bus.Message{Subject: s.bus.Scale(stage, target), Stream: s.bus.ScaleStream(), Conditional: true, After: after, Data: value})
	return err
}
