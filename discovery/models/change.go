package models

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	// maxTries bounds how often a change is decided, with pauses of minPause to maxPause.
	maxTries = 5
	minPause = 5 * time.Millisecond
	maxPause = 50 * time.Millisecond
	// changeTimeout bounds a change, and awaitTimeout how long it waits until this process
	// has seen it.
	changeTimeout = 5 * time.Second
	awaitTimeout  = 2 * time.Second
	// unusedFor is the age of the last use of a model that is registered without one, so that
	// registering many displaces nothing in use.
	unusedFor = 6 * time.Hour
)

// edit is what a change makes of a record: put it, remove it, or leave it as it is.
type edit struct {
	put    proto.Message
	remove bool
}

// pause waits before the next try.
func pause(ctx context.Context) {
	timer := time.NewTimer(minPause + rand.N(maxPause-minPause)) //nolint:gosec // it keeps no secret
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// isRetryable reports whether a change has to be decided again.
func isRetryable(ctx context.Context, err error) bool {
	return (errors.Is(err, discovery.ErrConflict) || errors.Is(err, discovery.ErrUnknown)) && ctx.Err() == nil
}

// change edits a record as decide says for the current entry, whose revision is 0 if there is
// none. It returns the revision of the record, 0 where there is none any more. If isNew is
// true it expects none at first, which saves a read.
func (r *Registry) change(ctx context.Context, key discovery.Key, isNew bool, decide func(discovery.Entry) (edit, error)) (revision discovery.Revision, err error) {
	for try := range maxTries {
		if try > 1 || try == 1 && !isNew {
			pause(ctx)
		}
		e := discovery.Entry{Key: key}
		if !isNew || try > 0 {
			if e, err = r.get(ctx, key); err != nil {
				return 0, discovery.Classify(err)
			}
		}
		next, err2 := decide(e)
		if err2 != nil {
			return 0, err2
		}
		if revision, err = r.write(ctx, e, next); err == nil || !isRetryable(ctx, err) {
			break
		}
	}
	if err != nil {
		return 0, discovery.Classify(err)
	}
	return revision, nil
}

// get returns an entry, one with revision 0 if there is none.
func (r *Registry) get(ctx context.Context, key discovery.Key) (discovery.Entry, error) {
	e, err := r.settings.Table.Get(ctx, key)
	if errors.Is(err, discovery.ErrNotFound) {
		return discovery.Entry{Key: key}, nil
	}
	return e, err
}

func (r *Registry) write(ctx context.Context, e discovery.Entry, next edit) (discovery.Revision, error) {
	switch {
	case next.remove && e.Revision != 0:
		return 0, r.settings.Table.Delete(ctx, e.Key, e.Revision)
	case next.put == nil:
		return e.Revision, nil
	}
	value, err := encode(next.put)
	if err != nil {
		return 0, err
	}
	return r.settings.Table.Put(ctx, e.Key, value, e.Revision)
}

// await waits until the content that readers get meets a condition, awaitTimeout at most. It
// reports whether it does.
func (r *Registry) await(ctx context.Context, met func(*content) bool) bool {
	ctx, cancel := context.WithTimeout(ctx, awaitTimeout)
	defer cancel()
	return r.until(ctx, func() bool {
		r.mu.RLock()
		defer r.mu.RUnlock()
		return met(r.served)
	})
}

// until asks after each change whether a condition is met. It reports whether it was before
// the context ended.
func (r *Registry) until(ctx context.Context, met func() bool) bool {
	for {
		changed := r.mirror.Changed()
		if met() {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// Registration is a model to register.
type Registration struct {
	model.Model
	// LastUse is when it was used last; zero means six hours ago.
	LastUse time.Time
	// AutoDelete unregisters it when no alias points at it any more.
	AutoDelete bool
}

// Register adds a model. It reports whether it has created it; the same model again changes
// nothing but sets AutoDelete.
func (r *Registry) Register(ctx context.Context, in Registration) (out *Model, created bool, err error) {
	if err := r.changeable(); err != nil {
		return nil, false, err
	}
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	_, _, exists := r.Model(in.ID)
	revision, err := r.change(ctx, modelKey(in.ID), !exists, func(e discovery.Entry) (edit, error) {
		there := current(e)
		if created = there == nil; created {
			now := time.Now()
			out = &Model{Model: in.Model, RegisteredAt: now, LastUse: in.LastUse, AutoDelete: in.AutoDelete}
			if in.LastUse.IsZero() {
				out.LastUse = now.Add(-unusedFor)
			}
			return edit{put: out.toProto()}, nil
		}
		if !isEqual(there.Model, in.Model) {
			return edit{}, fault.Newf(fault.ModelExists, "model %.*q is registered with other attributes, and never changes; choose another ID, or unregister it first", shown, string(in.ID))
		}
		if out = there; in.AutoDelete && !there.AutoDelete {
			out.AutoDelete = true
			return edit{put: out.toProto()}, nil
		}
		return edit{}, nil
	})
	if err != nil {
		return nil, false, err
	}
	out.revision = revision
	r.await(ctx, func(c *content) bool { m := c.models.get(in.ID); return m != nil && m.revision >= revision })
	return out, created, nil
}

// current returns the model in an entry, nil if there is none. One that is being unregistered
// is none; an unreadable record may be replaced.
func current(e discovery.Entry) *Model {
	m, err := decodeModel(e)
	if e.Revision == 0 || err != nil || m.deleting {
		return nil
	}
	return m
}

func isEqual(a, b model.Model) bool {
	return a.Stage == b.Stage && a.Type == b.Type && a.Source == b.Source && maps.Equal(a.Options, b.Options) &&
		a.Size == b.Size && a.MinReplicas == b.MinReplicas
}

// Unregister removes a model, if it exists. The package comment says how it works.
func (r *Registry) Unregister(ctx context.Context, id model.ID) error {
	if err := r.changeable(); err != nil {
		return err
	}
	// A mark that stays would hide the model, so callers do not end this.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
	defer cancel()
	for range maxTries {
		done, err := r.tryUnregister(ctx, id)
		if done || err != nil {
			return err
		}
		pause(ctx)
	}
	return discovery.Classify(discovery.ErrConflict)
}

// tryUnregister reports whether the model is gone.
func (r *Registry) tryUnregister(ctx context.Context, id model.ID) (done bool, err error) {
	var marked *Model
	mark, err := r.change(ctx, modelKey(id), false, func(e discovery.Entry) (edit, error) {
		if e.Revision == 0 {
			marked = nil
			return edit{}, nil
		}
		if marked, err = decodeModel(e); err != nil {
			return edit{remove: true}, nil //nolint:nilerr // nobody knows the model, so it may go
		}
		if marked.deleting {
			return edit{}, nil
		}
		marked.deleting = true
		return edit{put: marked.toProto()}, nil
	})
	if err != nil || mark == 0 {
		return err == nil, err
	}
	isPointedAt := false
	saw := r.await(ctx, func(c *content) bool {
		isPointedAt = c.pointing[id] > 0
		return c.seen >= mark
	})
	if saw && !isPointedAt {
		if err := r.settings.Table.Delete(ctx, modelKey(id), mark); isRetryable(ctx, err) {
			return false, nil
		} else if err != nil {
			return false, discovery.Classify(err)
		}
		r.await(ctx, func(c *content) bool { m := c.models.get(id); return m == nil || m.revision > mark })
		r.removeReplicas(ctx, id)
		return true, nil
	}
	marked.deleting = false
	value, err := encode(marked.toProto())
	if err == nil {
		_, err = r.settings.Table.Put(ctx, modelKey(id), value, mark)
	}
	switch {
	case isRetryable(ctx, err):
		return false, nil // somebody else has changed the model meanwhile
	case err != nil:
		return false, discovery.Classify(err)
	case !saw:
		return false, nil
	}
	return false, fault.Newf(fault.ModelInUse, "an alias points at model %.*q; change or delete it first, stagemesh aliases list shows it", shown, string(id))
}

// SetStageSettings replaces the settings of a stage.
func (r *Registry) SetStageSettings(ctx context.Context, stage pipeline.StageName, s *meshv1.ModelSettings) error {
	if err := r.changeable(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	revision, err := r.change(ctx, settingsKey(stage), false, func(discovery.Entry) (edit, error) { return edit{put: s}, nil })
	if err == nil {
		r.await(ctx, func(c *content) bool { return c.seen >= revision })
	}
	return err
}
