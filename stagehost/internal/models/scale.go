package models

import (
	"cmp"
	"context"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	registry "github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/models/placement"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/internal/item"
)

const (
	// scaleEvery is how often a host decides whether its models need more replicas, downEvery
	// whether they need fewer.
	scaleEvery = 10 * time.Second
	downEvery  = 6 * time.Minute
	// Defaults of meshv1.ScaleSettings.
	fullRate, fullBusy = 2000, 0.9
	// touchAfter is how old the last use on record may become.
	touchAfter = time.Hour
	// usageKept is for how long the use of a model is remembered.
	usageKept = 2 * time.Hour
)

// modelUse is the use of a model since it was last asked for.
type modelUse struct {
	requests int
	busy     time.Duration
	// waited is for how long its requests did, but for the model.
	waited time.Duration
	// slots is how many of its batches may run at a time.
	slots int
}

// Ran counts a batch of a model.
func (s *set) Ran(r item.Ran) {
	id := model.ID(r.Model.Model)
	use := s.uses[id]
	use.requests += r.Requests
	use.busy += r.Took
	use.waited += r.Waited
	if use.slots = s.Loader.Concurrency(); r.Limit != nil {
		use.slots = min(use.slots, r.Limit.Most)
	}
	s.uses[id] = use
}

// load is 1 where a replica should get no more, by the settings.
func (u modelUse) load(s *meshv1.ScaleSettings) float64 {
	rate := float64(u.requests) / scaleEvery.Minutes() / float64(cmp.Or(s.GetRequestsPerMinute(), fullRate))
	busy := u.busy.Seconds() / scaleEvery.Seconds() / float64(max(1, u.slots)) / cmp.Or(s.GetBusy(), fullBusy)
	out := max(rate, busy)
	if most := s.GetQueueTime().AsDuration(); most > 0 && u.requests > 0 {
		out = max(out, float64(u.waited)/float64(u.requests)/float64(most))
	}
	return out
}

// takeUses returns the uses of models since the last time.
func (s *set) takeUses() map[model.ID]modelUse {
	uses, requests := s.uses, 0
	for _, use := range uses {
		requests += use.requests
	}
	s.uses, s.rate = map[model.ID]modelUse{}, uint32(float64(requests)/scaleEvery.Minutes())
	return uses
}

// Scale has more hosts load the models that are busy here, or are used regularly, and has this
// one unload those that others have, too, where room is short. It does so at each tick, which
// come every scaleEvery, until the context ends.
func (ms *Models) Scale(ctx context.Context, ticks <-chan time.Time) error {
	known, downAt := map[model.ID]*placement.Usage{}, time.Time{}
	for {
		var now time.Time
		select {
		case now = <-ticks:
		case <-ctx.Done():
			return ctx.Err()
		}
		if ms.IsLeaving() {
			continue
		}
		isDown := !downAt.IsZero() && now.After(downAt)
		if isDown || downAt.IsZero() {
			downAt = now.Add(downEvery)
		}
		if err := ms.scaleOnce(ctx, now, known, isDown); err != nil && ctx.Err() == nil {
			ms.Logger.Debug("the replicas of models stay as they are", "error", err)
		}
	}
}

func (ms *Models) scaleOnce(ctx context.Context, now time.Time, known map[model.ID]*placement.Usage, isDown bool) error {
	ctx, cancel := context.WithTimeout(ctx, scaleEvery)
	defer cancel()
	uses, err := ask(ctx, ms, (*set).takeUses)
	if err != nil {
		return err
	}
	used, settings := map[model.ID]*placement.Usage{}, ms.registry.StageSettings(ms.Stage).GetScale()
	for id, use := range uses {
		if known[id] == nil {
			known[id] = &placement.Usage{}
		}
		used[id] = known[id]
		used[id].Observe(now, use.load(settings))
	}
	for id, usage := range known {
		switch {
		case now.Sub(usage.Last()) > usageKept:
			delete(known, id)
		case isDown:
			used[id] = usage
		}
	}
	for _, id := range ms.placer.Scale(ctx, now, ms.Stage, ms.Host, used, isDown) {
		if m, _, ok := ms.registry.Model(id); ok {
			if err := ms.registry.RemoveSpare(ctx, id, ms.Host, m.MinReplicas); err != nil {
				return err
			}
		}
	}
	for id, usage := range used {
		if _, there, ok := ms.registry.Model(id); ok && registry.HasReplica(there, ms.Host) && now.Sub(there.GetLastUse().AsTime()) > touchAfter {
			if err := ms.registry.Touch(ctx, id, usage.Last()); err != nil {
				return err
			}
		}
	}
	return nil
}
