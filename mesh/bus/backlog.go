package bus

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Backlog is what of a queue waits or is in hand.
type Backlog struct {
	Epoch Epoch
	// Taken is when the broker looked, by its own clock.
	Taken time.Time
	// Items are all, Bytes theirs, and Last is the number of the last one that came:
	// as many have come since the queue was made. They are of one moment.
	Items, Bytes, Last uint64
	// Classes are the items by their class, a moment later.
	Classes map[pipeline.Class]uint64
	// MaxItems and MaxBytes bound the queue; less than 1 means that nothing does.
	MaxItems, MaxBytes int64
}

// Backlog asks the broker what is in a queue: ErrNoQueue where there is none.
func (b *Bus) Backlog(ctx context.Context, stage pipeline.StageName, d pipeline.Durability) (Backlog, error) {
	var answer struct {
		jetstream.StreamInfo
		Error *apiError `json:"error"`
	}
	err := b.api(ctx, "STREAM.INFO."+b.Stream(stage, d), struct {
		Filter string `json:"subjects_filter"`
	}{b.Stage(stage, d, "*")}, &answer)
	switch {
	case err != nil:
		return Backlog{}, fmt.Errorf("queue of stage %s: %w", stage, err)
	case answer.Error.gone():
		return Backlog{}, ErrNoQueue
	case answer.Error != nil:
		return Backlog{}, fmt.Errorf("queue of stage %s: %w", stage, answer.Error.classify())
	}
	out := Backlog{
		Epoch: epochOf(&answer.StreamInfo), Taken: answer.TimeStamp, Classes: make(map[pipeline.Class]uint64, classCount),
		Items: answer.State.Msgs, Bytes: answer.State.Bytes,
		Last: answer.State.LastSeq, MaxItems: answer.Config.MaxMsgs, MaxBytes: answer.Config.MaxBytes,
	}
	for _, class := range pipeline.Classes() {
		out.Classes[class] = answer.State.Subjects[b.Stage(stage, d, class)]
	}
	return out, nil
}
