package pipelines

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// writeTimeout bounds a change.
const writeTimeout = 5 * time.Second

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
	s.mirror.Follow(ctx, func(ctx context.Context) bool {
		adopted, err := s.reconcile(ctx, s.mirror.Entries())
		if ctx.Err() == nil {
			s.noteFailure(err)
		}
		return adopted
	})
	return nil
}

// noteFailure notes why the registry could not be filled, nil if it could, and logs that
// once.
func (s *Store) noteFailure(err error) {
	if isFailing := err != nil; isFailing != s.isFailing {
		s.isFailing = isFailing
		if isFailing {
			s.log.Warn("pipelines cannot be written to the registry; retrying", "error", err)
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

// reconcile adopts the registry's entries. It first fills a registry that was wiped, or
// that this gateway sees for the first time; its writes come back as changes. It reports
// whether it has adopted the entries.
func (s *Store) reconcile(ctx context.Context, entries map[discovery.Key]discovery.Entry) (adopted bool, err error) {
	epoch := discovery.EpochOf(entries[epochKey])
	delete(entries, epochKey)
	if epoch == "" || epoch != s.epoch {
		if wrote, err := s.fill(ctx, entries, epoch == ""); wrote || err != nil {
			return false, err
		}
	}
	s.adopt(epoch, entries)
	return true, nil
}

// fill writes the entries that were served last and are missing, or the seeds if this
// gateway has served nothing yet. Then it writes the epoch if that is missing: a gateway
// that stops in between leaves a registry that still counts as wiped, and the next one
// goes on. It reports whether there was anything to write. Other gateways may fill the
// registry at the same time; the first write of a key wins.
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
		return true, discovery.CreateEpoch(ctx, s.table, epochKey)
	}
	return restored || seeded, nil
}

// restore writes the entries that were served last and are missing.
func (s *Store) restore(ctx context.Context, there map[discovery.Key]discovery.Entry) (wrote bool, err error) {
	written, err := discovery.Restore(ctx, s.table, func(yield func(discovery.Key, []byte) bool) {
		for key, e := range s.records {
			if _, ok := there[key]; ok {
				continue
			}
			wrote = true
			if !yield(key, e.value) {
				return
			}
		}
	})
	if written > 0 {
		s.log.Warn("the registry was wiped; wrote the served pipelines again", "pipelines", written)
	}
	return wrote, err
}

// seed writes the seeds that no gateway has written yet. The store does not serve a seed
// that the registry rejects.
func (s *Store) seed(ctx context.Context, there map[discovery.Key]discovery.Entry) (wrote bool, err error) {
	for _, name := range slices.Sorted(maps.Keys(s.seeds)) {
		seed := s.seeds[name]
		have, ok := there[keyOf(name)]
		if ok {
			// The seed replaces an unreadable record, and one of another seed: its file has
			// changed.
			if e, _ := decode(have); proto.Equal(e.seed, seed) {
				delete(s.seeds, name)
				continue
			}
		}
		value, err := protojson.Marshal(&meshv1.PipelineRecord{Pipeline: seed, Seed: seed, AppliedAt: timestamppb.Now()})
		if err != nil {
			return wrote, err
		}
		created, err := discovery.Create(ctx, s.table, keyOf(name), value, have.Revision)
		switch {
		case errors.Is(err, discovery.ErrDenied), errors.Is(err, discovery.ErrFull), errors.Is(err, discovery.ErrInvalid): // no retry mends these
			s.log.Error("the registry rejects a pipeline of the file, which is not served", "pipeline", name, "error", err)
			delete(s.seeds, name)
			continue
		case err != nil:
			return true, err
		case created:
			s.log.Info("wrote a pipeline of the file to the registry", "pipeline", name, "new", !ok)
			delete(s.seeds, name)
		}
		wrote = true
	}
	return wrote, nil
}

// adopt serves the registry's entries. It logs unreadable ones and does not serve them.
func (s *Store) adopt(epoch string, found map[discovery.Key]discovery.Entry) {
	served, records := map[pipeline.Name]*Entry{}, make(map[discovery.Key]*Entry, len(found))
	for key, e := range found {
		entry := s.records[key]
		if entry == nil || entry.Revision != uint64(e.Revision) {
			var err error
			if entry, err = decode(e); err != nil {
				s.log.Warn("a pipeline in the registry is unreadable, and is not served", "error", err)
			}
		}
		if records[key] = entry; entry.isServed() {
			served[entry.Pipeline.Name] = entry
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.served, s.problem, s.epoch, s.records = served, nil, epoch, records
	close(s.changed)
	s.changed = make(chan struct{})
}
