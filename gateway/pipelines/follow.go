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
	err = s.adopt(epoch, entries)
	return err == nil, err
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

// fill writes what was served last and is not there, or, where this gateway has served
// nothing yet, its seeds; then the epoch where there is none. It reports whether there
// was anything. Others may write the same at the same time; whoever is first has it.
func (s *Store) fill(ctx context.Context, there map[discovery.Key]discovery.Entry, wiped bool) (wrote bool, err error) {
	restored, err := s.restore(ctx, there)
	if err != nil {
		return true, err
	}
	seeded := false
	if s.epoch == "" {
		if seeded, err = s.seed(ctx, there); err != nil {
			return true, err
		}
	}
	if wiped {
		value, err := encode(&meshv1.PipelineEpoch{Id: uuid.NewString()})
		if err != nil {
			return false, err
		}
		_, err = s.write(ctx, discovery.Put(epochKey, value, 0))
		return true, err
	}
	return restored || seeded, nil
}

// restore writes what was served last and is not there.
func (s *Store) restore(ctx context.Context, there map[discovery.Key]discovery.Entry) (wrote bool, err error) {
	written := 0
	for _, key := range slices.Sorted(maps.Keys(s.raw)) {
		if _, ok := there[key]; ok {
			continue
		}
		made, err := s.write(ctx, discovery.Put(key, s.raw[key].Value, 0))
		if err != nil {
			return true, err
		}
		wrote = true
		if made {
			written++
		}
	}
	if written > 0 {
		s.log.Warn("the registry was wiped, or filled anew: it has the pipelines again that were served", "pipelines", written)
	}
	return wrote, nil
}

// seed writes those seeds that the registry does not know yet, each once. One that it
// does not take is left out: the others are served.
func (s *Store) seed(ctx context.Context, there map[discovery.Key]discovery.Entry) (wrote bool, err error) {
	for _, name := range slices.Sorted(maps.Keys(s.seeds)) {
		seed := s.seeds[name]
		have, ok := there[keyOf(name)]
		var e *entry
		if ok {
			// One that cannot be read is no reason not to write the seed.
			e, _ = decodeEntry(have)
		}
		if !e.due(seed) {
			delete(s.seeds, name)
			continue
		}
		value, err := encode(&meshv1.PipelineRecord{Pipeline: seed, Seed: seed, AppliedAt: timestamppb.Now()})
		if err != nil {
			return wrote, err
		}
		made, err := s.write(ctx, discovery.Put(keyOf(name), value, have.Revision))
		switch {
		case refused(err):
			s.log.Error("the registry does not take a pipeline of the file, which is not served", "pipeline", name, "error", err)
			delete(s.seeds, name)
		case err != nil:
			return true, err
		case made:
			s.log.Info("the pipeline is in the registry as the file has it", "pipeline", name, "new", !ok)
			delete(s.seeds, name)
			wrote = true
		default:
			wrote = true
		}
	}
	return wrote, nil
}

// refused reports whether the registry will not take what it was given, however often.
func refused(err error) bool {
	return errors.Is(err, discovery.ErrDenied) || errors.Is(err, discovery.ErrFull) || errors.Is(err, discovery.ErrInvalid)
}

// write makes one change, and reports whether it did: where somebody was faster, what
// they wrote comes as a change of the mirror.
func (s *Store) write(ctx context.Context, operation discovery.Operation) (made bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, commitTime)
	defer cancel()
	_, err = s.table.Commit(ctx, operation)
	if errors.Is(err, discovery.ErrConflict) {
		return false, nil
	}
	return err == nil, err
}

// adopt serves what the registry has.
func (s *Store) adopt(epoch string, raw map[discovery.Key]discovery.Entry) error {
	entries, served := map[pipeline.Name]*entry{}, []pipeline.Pipeline{}
	decoded := make(map[discovery.Key]*entry, len(raw))
	for key, e := range raw {
		was := s.decoded[key]
		if was == nil || was.revision != e.Revision {
			was = s.decode(e)
		}
		if decoded[key] = was; !was.deleted() {
			entries[was.pipeline.Name] = was
			served = append(served, was.pipeline)
		}
	}
	all, err := NewCatalog(served)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.catalog, s.entries, s.problem = all, entries, nil
	s.epoch, s.raw, s.decoded = epoch, raw, decoded
	close(s.changed)
	s.changed = make(chan struct{})
	return nil
}

// decode reads a record. One that cannot be read is not served, and told once.
func (s *Store) decode(e discovery.Entry) *entry {
	out, err := decodeEntry(e)
	if err != nil {
		s.log.Warn("a pipeline in the registry cannot be read, and is not served", "error", err)
		return unreadable(out)
	}
	return out
}
