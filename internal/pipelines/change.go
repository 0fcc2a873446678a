package pipelines

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// changeTo returns the effect of applying a pipeline on the entry, which may be nil.
func (e *Entry) changeTo(p pipeline.Pipeline) adminv1.PipelineChange {
	switch {
	case !e.isServed():
		return adminv1.PipelineChange_PIPELINE_CHANGE_CREATE
	case proto.Equal(e.Pipeline.ToProto(), p.ToProto()):
		return adminv1.PipelineChange_PIPELINE_CHANGE_NONE
	}
	return adminv1.PipelineChange_PIPELINE_CHANGE_UPDATE
}

// Plan returns the served pipeline of the same name, nil if there is none, and the effect
// of applying the pipeline.
func (s *Store) Plan(p pipeline.Pipeline) (*Entry, adminv1.PipelineChange) {
	e, _ := s.find(p.Name)
	return e, e.changeTo(p)
}

const (
	// maxTries bounds the tries of a change that expects no revision.
	maxTries = 8
	// awaitTimeout bounds how long a change waits until its own gateway serves it.
	awaitTimeout = 2 * time.Second
)

// Apply creates or replaces a pipeline, and returns when this store serves it. A non-nil
// expect is the revision that the pipeline has to have; 0 expects that there is none.
// Apply leaves a pipeline that is already as requested.
func (s *Store) Apply(ctx context.Context, p pipeline.Pipeline, expect *uint64) (out Entry, change adminv1.PipelineChange, err error) {
	if err := errors.Join(p.Validate(), Validate(p)); err != nil {
		return Entry{}, change, fault.Newf(fault.InvalidRequest, "pipeline %s: %w", p.Name, err)
	}
	err = s.change(ctx, p.Name, expect, func(there *Entry) (*meshv1.PipelineRecord, error) {
		if change = there.changeTo(p); change == adminv1.PipelineChange_PIPELINE_CHANGE_NONE {
			out = *there
			return nil, nil
		}
		record := &meshv1.PipelineRecord{Pipeline: p.ToProto(), AppliedAt: timestamppb.Now()}
		if there != nil {
			record.Seed = there.seed
		}
		out = *entryOf(record, p, 0)
		return record, nil
	}, func(r discovery.Revision) { out.Revision = uint64(r) })
	return out, change, err
}

// Delete removes a pipeline, and returns when this store no longer serves it.
func (s *Store) Delete(ctx context.Context, name pipeline.Name, expect *uint64) error {
	return s.change(ctx, name, expect, func(there *Entry) (*meshv1.PipelineRecord, error) {
		if there == nil || there.isDeleted && there.seed != nil {
			return nil, s.unknown(name)
		}
		return &meshv1.PipelineRecord{Seed: there.seed, AppliedAt: timestamppb.Now()}, nil
	}, func(discovery.Revision) {})
}

// change puts the record that decide returns for the current entry, which is nil if there
// is none, and passes its revision to report. A nil record changes nothing.
func (s *Store) change(ctx context.Context, name pipeline.Name, expect *uint64, decide func(there *Entry) (*meshv1.PipelineRecord, error), report func(discovery.Revision)) error {
	if err := s.changeable(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	var err error
	for range maxTries {
		var there *Entry
		if there, err = s.read(ctx, name); err != nil {
			return discovery.Classify(err)
		}
		if err := matches(name, there, expect); err != nil {
			return err
		}
		record, err2 := decide(there)
		if err2 != nil || record == nil {
			return err2
		}
		var before, revision discovery.Revision
		if there != nil {
			before = discovery.Revision(there.Revision)
		}
		if revision, err = s.put(ctx, keyOf(name), record, before); err == nil {
			report(revision)
			s.await(ctx, keyOf(name), before, revision)
			return nil
		}
		if !errors.Is(err, discovery.ErrConflict) {
			break
		}
	}
	return discovery.Classify(err)
}

// put writes a record, and returns its revision. It deletes the key of an empty record,
// whose revision is 0.
func (s *Store) put(ctx context.Context, key discovery.Key, r *meshv1.PipelineRecord, expect discovery.Revision) (discovery.Revision, error) {
	if r.GetPipeline() == nil && r.GetSeed() == nil {
		return 0, s.table.Delete(ctx, key, expect)
	}
	value, err := protojson.Marshal(r)
	if err != nil {
		return 0, err
	}
	return s.table.Put(ctx, key, value, expect)
}

// changeable returns nil if pipelines can be changed now.
func (s *Store) changeable() error {
	if s.table == nil {
		return fault.New(fault.NotSupported, "the mesh has no registry, so its pipelines are those of its file; the section registry of the file names one, except for stagemesh serve")
	}
	if err := s.Ready(); err != nil {
		return discovery.Unavailable(err)
	}
	if since, why := s.mirror.Stale(); !since.IsZero() {
		return discovery.Unavailable(why)
	}
	return nil
}

// read returns the current entry, nil if there is none.
func (s *Store) read(ctx context.Context, name pipeline.Name) (*Entry, error) {
	e, err := s.table.Get(ctx, keyOf(name))
	if errors.Is(err, discovery.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	out, _ := decode(e) // an unreadable entry may be replaced
	return out, nil
}

// matches returns nil if a pipeline has the expected revision.
func matches(name pipeline.Name, there *Entry, expect *uint64) error {
	var revision uint64
	if there.isServed() {
		revision = there.Revision
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

// await waits up to awaitTimeout until the store serves a write, or a later one of the
// same key. A revision of 0 is a delete of the one before.
func (s *Store) await(ctx context.Context, key discovery.Key, before, revision discovery.Revision) {
	waiting, cancel := context.WithTimeout(ctx, awaitTimeout)
	defer cancel()
	for {
		s.mu.RLock()
		e, changed := s.records[key], s.changed
		s.mu.RUnlock()
		if revision == 0 && (e == nil || e.Revision != uint64(before)) || revision != 0 && e != nil && e.Revision >= uint64(revision) {
			return
		}
		select {
		case <-changed:
		case <-waiting.Done():
			return
		}
	}
}
