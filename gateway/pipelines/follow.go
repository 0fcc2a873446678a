package pipelines

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/gateway/catalog"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	// tryAgain is how long it takes until something is written again that could not
	// be.
	tryAgain = time.Second
	// commitTime is how long one write takes at most.
	commitTime = 5 * time.Second
)

// Run follows the registry until the context ends.
func (s *Store) Run(ctx context.Context) error {
	if s.table == nil {
		<-ctx.Done()
		return nil
	}
	work, ctx := errgroup.WithContext(ctx)
	work.Go(func() error { return s.mirror.Run(ctx) })
	work.Go(func() error { return s.follow(ctx) })
	return work.Wait()
}

func (s *Store) follow(ctx context.Context) error {
	if s.mirror.Loaded(ctx) != nil {
		return nil
	}
	retry := time.NewTimer(tryAgain)
	defer retry.Stop()
	for {
		changed := s.mirror.Changed()
		settled, err := s.reconcile(ctx, s.mirror.Entries())
		if ctx.Err() == nil {
			s.say(err)
		}
		if retry.Stop(); !settled {
			retry.Reset(tryAgain)
		}
		select {
		case <-changed:
		case <-retry.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// say books why the registry could not be filled, nil where it could, and logs it once.
func (s *Store) say(err error) {
	if failing := err != nil; failing != s.failing {
		s.failing = failing
		if failing {
			s.log.Warn("pipelines cannot be written to the registry; trying again", "error", err)
		} else {
			s.log.Info("pipelines can be written to the registry again")
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && s.problem != nil {
		s.problem = err
	}
}

// reconcile takes what the registry has, and fills one that was wiped, or that this
// gateway sees for the first time; what it writes comes back as a change. It reports
// whether the registry is served as it is.
func (s *Store) reconcile(ctx context.Context, found []discovery.Entry) (settled bool, err error) {
	entries := map[discovery.Key]discovery.Entry{}
	for _, e := range found {
		entries[e.Key] = e
	}
	epoch := epochOf(entries[epochKey])
	delete(entries, epochKey)
	if epoch == "" || epoch != s.epoch {
		if wrote, err := s.fill(ctx, entries, epoch == ""); wrote || err != nil {
			return false, err
		}
	}
	s.adopt(epoch, entries)
	return true, nil
}

// epochOf returns the epoch of an entry, "" where there is none. One that cannot be
// read is told by its bytes.
func epochOf(e discovery.Entry) string {
	epoch := &meshv1.PipelineEpoch{}
	if decode(e.Value, epoch) != nil || epoch.GetId() == "" {
		return string(e.Value)
	}
	return epoch.GetId()
}

// fill writes what was served last and is not there, then seeds, then the epoch where
// there is none, and reports whether there was anything. Others may write the same at
// the same time; whoever is first has it.
func (s *Store) fill(ctx context.Context, there map[discovery.Key]discovery.Entry, wiped bool) (wrote bool, err error) {
	var due []discovery.Operation
	for _, key := range slices.Sorted(maps.Keys(s.raw)) {
		if _, ok := there[key]; !ok {
			due = append(due, discovery.Put(key, s.raw[key].Value, 0))
		}
	}
	if n := len(due); n > 0 {
		s.log.Warn("the registry was wiped, or filled anew; writing the pipelines that were served", "pipelines", n)
	}
	seeds, err := s.dueSeeds(there)
	if err != nil {
		return false, err
	}
	due = append(due, seeds...)
	if wiped {
		value, err := encode(&meshv1.PipelineEpoch{Id: uuid.NewString()})
		if err != nil {
			return false, err
		}
		due = append(due, discovery.Put(epochKey, value, 0))
	}
	for _, operation := range due {
		if err := s.write(ctx, operation); err != nil {
			return true, err
		}
	}
	return len(due) > 0, nil
}

// dueSeeds are the seeds that the registry is to have, and neither it nor what is
// written anyway has.
func (s *Store) dueSeeds(there map[discovery.Key]discovery.Entry) ([]discovery.Operation, error) {
	var out []discovery.Operation
	for _, seed := range s.seeds {
		key := keyOf(pipeline.Name(seed.GetName()))
		have, ok := there[key]
		if _, comes := s.raw[key]; comes && !ok {
			continue
		}
		var e *entry
		if ok {
			// One that cannot be read is no reason not to write the seed.
			e, _ = decodeEntry(have)
		}
		if !e.due(seed) {
			continue
		}
		value, err := encode(&meshv1.PipelineRecord{Pipeline: seed, Seed: seed, AppliedAt: timestamppb.Now()})
		if err != nil {
			return nil, err
		}
		s.log.Info("the pipeline is written to the registry as the file has it", "pipeline", seed.GetName(), "new", !ok)
		out = append(out, discovery.Put(key, value, have.Revision))
	}
	return out, nil
}

// write makes one change; where somebody was faster it comes as a change of the
// mirror.
func (s *Store) write(ctx context.Context, operation discovery.Operation) error {
	ctx, cancel := context.WithTimeout(ctx, commitTime)
	defer cancel()
	if _, err := s.table.Commit(ctx, operation); !errors.Is(err, discovery.ErrConflict) {
		return err
	}
	return nil
}

// adopt serves what the registry has.
func (s *Store) adopt(epoch string, raw map[discovery.Key]discovery.Entry) {
	entries, served := map[pipeline.Name]*entry{}, []pipeline.Pipeline{}
	unreadable := map[discovery.Key]discovery.Revision{}
	for key, e := range raw {
		decoded, err := decodeEntry(e)
		if err != nil {
			if unreadable[key] = e.Revision; s.unreadable[key] != e.Revision {
				s.log.Warn("a pipeline in the registry cannot be read, and is not served", "error", err)
			}
			continue
		}
		if !decoded.deleted() {
			entries[decoded.pipeline.Name] = decoded
			served = append(served, decoded.pipeline)
		}
	}
	// They are valid, and of different names.
	all, err := catalog.New(served)
	if err != nil {
		s.log.Error("the registry's pipelines cannot be served", "error", err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.catalog, s.entries, s.problem = all, entries, nil
	s.epoch, s.raw, s.unreadable = epoch, raw, unreadable
	close(s.changed)
	s.changed = make(chan struct{})
}
