package models

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/process"
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
	changeTimeout = 10 * time.Second
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
	_ = process.Sleep(ctx, minPause+rand.N(maxPause-minPause)) //nolint:gosec // it keeps no secret
}

// errRepeat means that a change has to be decided again.
var errRepeat = fmt.Errorf("the alias or its models are being changed: %w", discovery.ErrConflict)

// isRetryable reports whether a change has to be decided again.
func isRetryable(err error) bool {
	return errors.Is(err, discovery.ErrConflict) || errors.Is(err, discovery.ErrUnknown)
}

// retry decides a change, again where that is necessary, and returns a fault.
func retry(ctx context.Context, decide func() error) error {
	err := decide()
	for tries := 1; isRetryable(err) && tries < maxTries && ctx.Err() == nil; tries++ {
		pause(ctx)
		err = decide()
	}
	if err != nil {
		return discovery.Classify(err)
	}
	return nil
}

// change edits a record as decide says for the current entry, whose revision is 0 if there is
// none. It returns the revision of the record, 0 where there is none any more, once this process
// has seen it. If isNew is true it expects none at first, which saves a read.
func (r *Registry) change(ctx context.Context, key discovery.Key, isNew bool, decide func(discovery.Entry) (edit, error)) (revision discovery.Revision, err error) {
	err = retry(ctx, func() error {
		e := discovery.Entry{Key: key}
		if !isNew {
			if e, err = r.get(ctx, key); err != nil {
				return err
			}
		}
		isNew = false
		next, err := decide(e)
		if err == nil {
			revision, err = r.write(ctx, e, next)
		}
		return err
	})
	if err != nil {
		return 0, err
	}
	r.await(ctx, func(c *content) bool { return c.seen >= revision && (revision != 0 || !c.has(key)) })
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

// Register adds a model, and reports whether there was none. The same model again changes nothing
// but sets AutoDelete.
func (r *Registry) Register(ctx context.Context, in Registration) (created bool, err error) {
	if err := r.changeable(); err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	_, _, exists := r.Model(in.ID)
	_, err = r.change(ctx, modelKey(in.ID), !exists, func(e discovery.Entry) (edit, error) {
		m := current(e)
		switch created = m == nil; {
		case created:
			now := time.Now()
			m = &Model{Model: in.Model, RegisteredAt: now, LastUse: in.LastUse}
			if in.LastUse.IsZero() {
				m.LastUse = now.Add(-unusedFor)
			}
		case m.Model != in.Model:
			return edit{}, fault.Newf(fault.ModelExists, "model %.*q is registered with other attributes, and never changes; choose another ID, or unregister it first", fault.MaxQuoted, string(in.ID))
		case m.AutoDelete || !in.AutoDelete:
			return edit{}, nil
		}
		m.AutoDelete = in.AutoDelete
		return edit{put: m.toProto()}, nil
	})
	return created, err
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

// Unregister removes a model, if it exists. The package comment says how it works.
func (r *Registry) Unregister(ctx context.Context, id model.ID) error {
	if err := r.changeable(); err != nil {
		return err
	}
	// A mark that stays would hide the model, so callers do not end this.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
	defer cancel()
	return retry(ctx, func() error { return r.tryUnregister(ctx, id) })
}

func (r *Registry) tryUnregister(ctx context.Context, id model.ID) error {
	if _, _, ok := r.Model(id); ok && r.isPointedAt(id) {
		return inUse(id) // nobody sees a mark that would be taken back
	}
	var marked *Model
	mark, err := r.change(ctx, modelKey(id), false, func(e discovery.Entry) (edit, error) {
		if e.Revision == 0 {
			marked = nil
			return edit{}, nil
		}
		var err error
		if marked, err = decodeModel(e); err != nil {
			return edit{remove: true}, nil //nolint:nilerr // nobody knows the model, so it may go
		}
		if marked.deleting {
			return edit{}, nil
		}
		marked.deleting = true
		return edit{put: marked.toProto()}, nil
	})
	if err != nil {
		return err
	}
	if mark == 0 {
		r.removeReplicas(ctx, id)
		return nil
	}
	saw := r.await(ctx, func(c *content) bool { return c.seen >= mark })
	if saw && !r.isPointedAt(id) {
		if err := r.settings.Table.Delete(ctx, modelKey(id), mark); err != nil {
			return err
		}
		r.await(ctx, func(c *content) bool { m := c.models.get(id); return m == nil || m.revision > mark })
		r.removeReplicas(ctx, id)
		return nil
	}
	marked.deleting = false
	value, err := encode(marked.toProto())
	if err == nil {
		// The time of the change may be over by now, and the model would stay hidden.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
		_, err = r.settings.Table.Put(ctx, modelKey(id), value, mark)
		cancel()
	}
	switch {
	case err != nil:
		return err // it may be that somebody else has changed the model meanwhile
	case !saw:
		return errRepeat
	}
	return inUse(id)
}

// isPointedAt reports whether an alias points at a model.
func (r *Registry) isPointedAt(id model.ID) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.served.pointing[id] > 0
}

func inUse(id model.ID) *fault.Fault {
	return fault.Newf(fault.ModelInUse, "an alias points at model %.*q; change or delete it first, stagemesh aliases list shows it", fault.MaxQuoted, string(id))
}

// SetStageSettings replaces the settings of a stage. Those of the mesh file count where they
// have none.
func (r *Registry) SetStageSettings(ctx context.Context, stage pipeline.StageName, s *meshv1.ModelSettings) error {
	return r.putSettings(ctx, settingsKey(stage), s)
}

// putSettings writes a record of settings, or removes it where they are none.
func (r *Registry) putSettings(ctx context.Context, key discovery.Key, s *meshv1.ModelSettings) error {
	if err := r.changeable(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	_, err := r.change(ctx, key, false, func(e discovery.Entry) (edit, error) {
		have := &meshv1.ModelSettings{}
		switch isThere := e.Revision > 0; {
		case proto.Size(s) == 0:
			return edit{remove: isThere}, nil
		case isThere && unmarshal(e, have) == nil && proto.Equal(have, s):
			return edit{}, nil
		}
		return edit{put: s}, nil
	})
	return err
}
