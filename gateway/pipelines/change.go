package pipelines

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Change is the effect of Apply on a pipeline.
type Change int

// The effects of Apply.
const (
	// None means that the pipeline is already as requested.
	None Change = iota
	Create
	Update
)

// Would returns the effect of applying a pipeline of that name.
func (e Entry) Would(p pipeline.Pipeline) Change {
	if proto.Equal(e.Pipeline.ToProto(), p.ToProto()) {
		return None
	}
	return Update
}

const (
	// maxAttempts bounds the attempts of a change that expects no revision.
	maxAttempts = 8
	// awaitTimeout bounds how long a change waits until its own gateway serves it.
	awaitTimeout = 2 * time.Second
	// retryAfter is when callers may retry.
	retryAfter = time.Second
)

// Apply creates or replaces a pipeline, and returns when this store serves it. A non-nil
// expect is the revision that the pipeline has to have; 0 expects that there is none.
// Apply leaves a pipeline that is already as requested.
func (s *Store) Apply(ctx context.Context, p pipeline.Pipeline, expect *uint64) (out Entry, change Change, err error) {
	if err := errors.Join(p.Validate(), Validate(p)); err != nil {
		return Entry{}, None, fault.Newf(fault.InvalidRequest, "pipeline %s: %w", p.Name, err)
	}
	err = s.change(ctx, p.Name, expect, func(there *entry) (*write, error) {
		if change = Update; there.deleted() {
			change = Create
		}
		if !there.deleted() && there.exported().Would(p) == None {
			change, out = None, there.exported()
			return nil, nil
		}
		record := &meshv1.PipelineRecord{Pipeline: p.ToProto(), AppliedAt: timestamppb.Now()}
		if there != nil {
			record.Seed = there.GetSeed()
		}
		out = (&entry{PipelineRecord: record, pipeline: p}).exported()
		return put(p.Name, record, there)
	}, func(r discovery.Revision) { out.Revision = uint64(r) })
	return out, change, err
}

// Delete removes a pipeline, and returns when this store no longer serves it.
func (s *Store) Delete(ctx context.Context, name pipeline.Name, expect *uint64) error {
	return s.change(ctx, name, expect, func(there *entry) (*write, error) {
		if there == nil || there.deleted() && there.GetSeed() != nil {
			c, _ := s.current()
			return nil, c.Unknown(string(name))
		}
		if there.GetSeed() == nil {
			return &write{key: keyOf(name), expect: there.revision, remove: true}, nil
		}
		return put(name, &meshv1.PipelineRecord{Seed: there.GetSeed(), AppliedAt: timestamppb.Now()}, there)
	}, func(discovery.Revision) {})
}

// write is one change of one key.
type write struct {
	key    discovery.Key
	value  []byte
	expect discovery.Revision
	remove bool
}

// put returns the write that replaces an entry, which may be nil.
func put(name pipeline.Name, r *meshv1.PipelineRecord, there *entry) (*write, error) {
	value, err := encode(r)
	if err != nil {
		return nil, err
	}
	out := &write{key: keyOf(name), value: value}
	if there != nil {
		out.expect = there.revision
	}
	return out, nil
}

// send makes a write, and returns its revision, 0 of a delete.
func (s *Store) send(ctx context.Context, w write) (discovery.Revision, error) {
	if w.remove {
		return 0, s.table.Delete(ctx, w.key, w.expect)
	}
	return s.table.Put(ctx, w.key, w.value, w.expect)
}

// change makes the write that decide returns for the current entry, which is nil if there
// is none, and passes its revision to report. A nil write changes nothing.
func (s *Store) change(ctx context.Context, name pipeline.Name, expect *uint64, decide func(there *entry) (*write, error), report func(discovery.Revision)) error {
	if err := s.changeable(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	var err error
	for range maxAttempts {
		var there *entry
		if there, err = s.read(ctx, name); err != nil {
			return classify(err)
		}
		if err := matches(name, there, expect); err != nil {
			return err
		}
		w, err2 := decide(there)
		if err2 != nil || w == nil {
			return err2
		}
		var revision discovery.Revision
		if revision, err = s.send(ctx, *w); err == nil {
			report(revision)
			s.await(ctx, *w, revision)
			return nil
		}
		if !errors.Is(err, discovery.ErrConflict) {
			break
		}
	}
	return classify(err)
}

// changeable returns nil if pipelines can be changed now.
func (s *Store) changeable() error {
	if s.table == nil {
		return fault.New(fault.NotSupported, "the mesh has no registry, so its pipelines are those of its file; the section registry of the file names one")
	}
	if err := s.Ready(); err != nil {
		return unavailable(err)
	}
	if since, why := s.mirror.Stale(); !since.IsZero() {
		return unavailable(why)
	}
	return nil
}

// read returns the current entry, nil if there is none. An unreadable entry may be
// replaced.
func (s *Store) read(ctx context.Context, name pipeline.Name) (*entry, error) {
	e, err := s.table.Get(ctx, keyOf(name))
	if errors.Is(err, discovery.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	out, err := decodeEntry(e)
	if err != nil {
		return unreadable(out), nil //nolint:nilerr // see above
	}
	return out, nil
}

// matches returns nil if a pipeline has the expected revision.
func matches(name pipeline.Name, there *entry, expect *uint64) error {
	var revision uint64
	if !there.deleted() {
		revision = uint64(there.revision)
	}
	switch {
	case expect == nil || *expect == revision:
		return nil
	case revision == 0:
		return fault.Newf(fault.RevisionMismatch, "pipeline %s does not exist, and revision %d was expected; get it again", name, *expect)
	case *expect == 0:
		return fault.Newf(fault.RevisionMismatch, "pipeline %s exists with revision %d, and none was expected", name, revision)
	}
	return fault.Newf(fault.RevisionMismatch, "pipeline %s has revision %d, and %d was expected; it was changed meanwhile: get it again", name, revision, *expect)
}

// await waits up to awaitTimeout until the store serves a write.
func (s *Store) await(ctx context.Context, w write, revision discovery.Revision) {
	waiting, cancel := context.WithTimeout(ctx, awaitTimeout)
	defer cancel()
	for {
		changed := s.Changed()
		if s.serves(w, revision) {
			return
		}
		select {
		case <-changed:
		case <-waiting.Done():
			return
		}
	}
}

// serves reports whether the store serves a write, or a later one of the same key.
func (s *Store) serves(w write, revision discovery.Revision) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	e, ok := s.raw[w.key]
	if w.remove {
		return !ok || e.Revision != w.expect
	}
	return ok && e.Revision >= revision
}

// classify returns an error of the registry as a fault.
func classify(err error) error {
	switch {
	case errors.Is(err, discovery.ErrUnknown):
		return fault.Newf(fault.RegistryUnavailable, "it is unknown whether the change was made; ask for it again").Caused(err).WithRetryAfter(retryAfter)
	case errors.Is(err, discovery.ErrDenied):
		return fault.New(fault.PermissionDenied, "the registry rejects the gateway's credentials").Caused(err)
	case errors.Is(err, discovery.ErrConflict):
		return fault.New(fault.RevisionMismatch, "other writers keep changing the pipeline").Caused(err)
	case errors.Is(err, discovery.ErrInvalid):
		return fault.Newf(fault.InvalidRequest, "%w", err)
	case errors.Is(err, discovery.ErrFull):
		return fault.New(fault.RegistryUnavailable, "the registry is full").Caused(err).WithRetryAfter(retryAfter)
	}
	return unavailable(err)
}

func unavailable(err error) *fault.Fault {
	return fault.Newf(fault.RegistryUnavailable, "%w", err).WithRetryAfter(retryAfter)
}
