package call

import (
	"context"
	"errors"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// StageState is what the broker says of a stage now.
type StageState struct {
	// Served says that a host takes items.
	Served bool
	// Queues are those that there are.
	Queues []QueueState
}

// QueueState is what is in a queue: what waits, and what hosts have in hand.
type QueueState struct {
	Durability pipeline.Durability
	// Items are all, Bytes theirs; Classes are the items by class.
	Items, Bytes uint64
	Classes      map[pipeline.Class]uint64
	// MaxItems and MaxBytes bound the queue; less than 1 means that nothing does.
	MaxItems, MaxBytes int64
}

// Stage asks the broker how a stage is: BROKER_UNAVAILABLE while there is none. What
// it says of the queues is of now, of hosts at most a moment old.
func (s *Service) Stage(ctx context.Context, name pipeline.StageName) (StageState, error) {
	if err := s.Ready(); err != nil {
		return StageState{}, err
	}
	durabilities := []pipeline.Durability{pipeline.Memory, pipeline.File}
	queues := make([]*QueueState, len(durabilities))
	var out StageState
	asking, ctx := errgroup.WithContext(ctx)
	asking.Go(func() (err error) {
		out.Served, err = s.served(ctx, name)
		return err
	})
	for i, d := range durabilities {
		asking.Go(func() (err error) {
			queues[i], err = s.queue(ctx, name, d)
			return err
		})
	}
	if err := asking.Wait(); err != nil {
		return StageState{}, unavailable(err)
	}
	for _, q := range queues {
		if q != nil {
			out.Queues = append(out.Queues, *q)
		}
	}
	return out, nil
}

// served reports whether a host of the stage takes items of any durability.
func (s *Service) served(ctx context.Context, name pipeline.StageName) (bool, error) {
	f := s.capacity.CheckHosts(ctx, []pipeline.Hop{{Stage: name, Step: pipeline.StepName(name)}}, pipeline.Memory)
	switch {
	case f == nil || f.Reason == fault.NotSupported:
		return true, nil
	case f.Reason == fault.NoCapacity:
		return false, nil
	}
	return false, f
}

// queue returns what is in a queue, nil where there is none.
func (s *Service) queue(ctx context.Context, name pipeline.StageName, d pipeline.Durability) (*QueueState, error) {
	b, err := s.bus.Backlog(ctx, name, d)
	if errors.Is(err, bus.ErrNoQueue) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return &QueueState{Durability: d, Items: b.Items, Bytes: b.Bytes, Classes: b.Classes, MaxItems: b.MaxItems, MaxBytes: b.MaxBytes}, nil
}
