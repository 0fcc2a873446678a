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

// Change is what happens to a pipeline.
type Change int

// What applying a pipeline does.
const (
	// None says that it is there as it is to be.
	None Change = iota
	Create
	Update
)

// Would returns what applying a pipeline of that name would do.
func (e Entry) Would(p pipeline.Pipeline) Change {
	if proto.Equal(e.Pipeline.ToProto(), p.ToProto()) {
		return None
	}
	return Update
}

const (
	// tries is how often a change is tried that does not mind what there is.
	tries = 8
	// ownWord is how long a change waits at most to be served by its own gateway.
	ownWord = 2 * time.Second
	// retryAfter is when it is worth asking again.
	retryAfter = time.Second
)

// Apply makes or replaces a pipeline, and returns when this store serves it. Where
// expect is not nil, it is the revision that the pipeline has to have, 0 that there is
// none. A pipeline that is there as it is to be is left as it is.
func (s *Store) Apply(ctx context.Context, p pipeline.Pipeline, expect *uint64) (out Entry, change Change, err error) {
	if err := errors.Join(p.Validate(), Validate(p)); err != nil {
		return Entry{}, None, fault.Newf(fault.InvalidRequest, "pipeline %s: %w", p.Name, err)
	}
	err = s.change(ctx, p.Name, expect, func(there *entry) (*discovery.Operation, error) {
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
		made := &entry{PipelineRecord: record, pipeline: p}
		out = made.exported()
		return put(p.Name, record, there)
	}, func(r discovery.Revision) { out.Revision = uint64(r) })
	return out, change, err
}

// Delete removes a pipeline, and returns when this store does not serve it any more.
func (s *Store) Delete(ctx context.Context, name pipeline.Name, expect *uint64) error {
	return s.change(ctx, name, expect, func(there *entry) (*discovery.Operation, error) {
		if there == nil || there.deleted() && there.GetSeed() != nil {
			return nil, s.unknown(name)
		}
		if there.GetSeed() == nil {
			out := discovery.Delete(keyOf(name), there.revision)
			return &out, nil
		}
		return put(name, &meshv1.PipelineRecord{Seed: there.GetSeed(), AppliedAt: timestamppb.Now()}, there)
	}, func(discovery.Revision) {})
}

func (s *Store) unknown(name pipeline.Name) error {
	c, _ := s.current()
	return c.Unknown(string(name))
}

func put(name pipeline.Name, r *meshv1.PipelineRecord, there *entry) (*discovery.Operation, error) {
	value, err := encode(r)
	if err != nil {
		return nil, err
	}
	var revision discovery.Revision
	if there != nil {
		revision = there.revision
	}
	out := discovery.Put(keyOf(name), value, revision)
	return &out, nil
}

// change makes the change that the function returns for what there is, nil for none,
// and tells its revision.
func (s *Store) change(ctx context.Context, name pipeline.Name, expect *uint64, of func(there *entry) (*discovery.Operation, error), made func(discovery.Revision)) error {
	if err := s.changeable(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, commitTime)
	defer cancel()
	var err error
	for range tries {
		var there *entry
		if there, err = s.read(ctx, name); err != nil {
			return classified(err)
		}
		if err := matches(name, there, expect); err != nil {
			return err
		}
		operation, err2 := of(there)
		if err2 != nil || operation == nil {
			return err2
		}
		var revision discovery.Revision
		if revision, err = s.table.Commit(ctx, *operation); err == nil {
			made(revision)
			s.await(ctx, *operation, revision)
			return nil
		}
		if !errors.Is(err, discovery.ErrConflict) {
			break
		}
	}
	return classified(err)
}

// changeable returns nil where pipelines can be changed.
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

// read returns what the registry has now, nil where it has nothing. What cannot be
// read is there to be replaced.
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

// matches returns nil where a pipeline has the revision that is expected.
func matches(name pipeline.Name, there *entry, expect *uint64) error {
	var revision uint64
	if !there.deleted() {
		revision = uint64(there.revision)
	}
	switch {
	case expect == nil || *expect == revision:
		return nil
	case revision == 0:
		return fault.Newf(fault.RevisionMismatch, "there is no pipeline %s, and revision %d of it was expected; get it again", name, *expect)
	case *expect == 0:
		return fault.Newf(fault.RevisionMismatch, "there is a pipeline %s, of revision %d, and none was expected", name, revision)
	}
	return fault.Newf(fault.RevisionMismatch, "pipeline %s is of revision %d, not %d, which was expected; somebody has changed it: get it again", name, revision, *expect)
}

// await waits for a moment until what was changed is served so.
func (s *Store) await(ctx context.Context, made discovery.Operation, revision discovery.Revision) {
	patience, cancel := context.WithTimeout(ctx, ownWord)
	defer cancel()
	for {
		changed := s.Changed()
		if s.serves(made, revision) {
			return
		}
		select {
		case <-changed:
		case <-patience.Done():
			return
		}
	}
}

// serves reports whether a change of that revision is served, or a later one.
func (s *Store) serves(made discovery.Operation, revision discovery.Revision) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	e, ok := s.raw[made.Key]
	if made.Delete {
		// Its revision may be what it expected: nothing is left to have another.
		return !ok || e.Revision != made.Expect
	}
	return ok && e.Revision >= revision
}

// classified returns what the registry says as a fault.
func classified(err error) error {
	switch {
	case errors.Is(err, discovery.ErrUnknown):
		return fault.Newf(fault.RegistryUnavailable, "it is not known whether the change was made; ask for it again").Caused(err).WithRetryAfter(retryAfter)
	case errors.Is(err, discovery.ErrDenied):
		return fault.New(fault.PermissionDenied, "the registry refuses what the gateway is known by there").Caused(err)
	case errors.Is(err, discovery.ErrConflict):
		return fault.New(fault.RevisionMismatch, "others change the pipeline all the time").Caused(err)
	case errors.Is(err, discovery.ErrInvalid):
		return fault.Newf(fault.InvalidRequest, "%w", err)
	case errors.Is(err, discovery.ErrFull):
		return fault.New(fault.RegistryUnavailable, "the registry has no room").Caused(err).WithRetryAfter(retryAfter)
	}
	return unavailable(err)
}

func unavailable(err error) *fault.Fault {
	return fault.Newf(fault.RegistryUnavailable, "%w", err).WithRetryAfter(retryAfter)
}
