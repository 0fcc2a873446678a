package call

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/mesh/store"
)

const (
	// maxReading is how many batches are validated or expanded at a time, and maxWriting how many
	// are finalized.
	maxReading = 4
	maxWriting = 2
	// claimedLines is how many lines become jobs at a time.
	claimedLines = 1000
	// batchPause is how long a step of a batch waits after a failure, and between two counts.
	batchPause = time.Second
	// sweepEvery is the pause between looks for files that have expired, and orphanAge the age of
	// bytes without a record that are purged.
	sweepEvery = time.Minute
	orphanAge  = 24 * time.Hour
)

// batchRunner processes all batches while its gateway has the lease. What it does can be repeated:
// the state of a batch is its record, a line's job has an ID that follows from the batch and the
// line, and the end of a line is the record of that job.
type batchRunner struct {
	*Service

	queue            pipeline.QueueName
	isHTTP           bool
	reading, writing *semaphore.Weighted
	runs             sync.WaitGroup
	// deleted is signalled when a file has been deleted.
	deleted chan struct{}

	mu    sync.Mutex
	known map[uuid.UUID]*batchRun
	lines map[pipeline.LinePrefix]*batchRun
	files map[uuid.UUID]knownFile
}

// knownFile is what decides when a file goes.
type knownFile struct {
	data    uuid.UUID
	seq     uint64
	expires int64
}

// runBatches processes batches, one gateway at a time, until the context ends.
func (s *Service) runBatches(ctx context.Context) {
	owner, log := uuid.NewString(), s.settings.Logger
	ensure := func(ctx context.Context) error {
		queue := s.settings.Jobs.Batches.Queue
		return errors.Join(s.jobs.store.Ensure(ctx), s.batches.store.Ensure(ctx), s.jobs.store.EnsureQueue(ctx, queue, (*s.jobs.queues.Load())[queue].JobQueueSettings))
	}
	for ctx.Err() == nil {
		lease := store.NewLease(s.jobs.store, store.BatchLease, "all", owner)
		if !lease.Acquire(ctx, log, ensure) {
			return
		}
		log.Info("processes batches")
		running, end := context.WithCancelCause(ctx)
		var renewal sync.WaitGroup
		renewal.Go(func() {
			if err := lease.Keep(running, func() uint64 { return 0 }); err != nil {
				end(err)
			}
		})
		err := ensure(running)
		if err == nil {
			err = newBatchRunner(s).run(running)
		}
		lost := context.Cause(running)
		end(nil)
		renewal.Wait()
		if !errors.Is(lost, store.ErrLeaseLost) {
			lease.Release()
		}
		if ctx.Err() == nil {
			log.Warn("no longer processes batches", "error", cmp.Or(lost, err))
			_ = process.Sleep(ctx, batchPause)
		}
	}
}

func newBatchRunner(s *Service) *batchRunner {
	queue := s.settings.Jobs.Batches.Queue
	return &batchRunner{
		Service: s, queue: queue, isHTTP: (*s.jobs.queues.Load())[queue].HTTP, deleted: make(chan struct{}, 1),
		reading: semaphore.NewWeighted(maxReading), writing: semaphore.NewWeighted(maxWriting),
		known: map[uuid.UUID]*batchRun{}, lines: map[pipeline.LinePrefix]*batchRun{}, files: map[uuid.UUID]knownFile{},
	}
}

// run follows the records of batches, files and jobs until the context ends.
func (r *batchRunner) run(ctx context.Context) error {
	first, err := r.jobs.store.LastRecord(ctx)
	if err != nil {
		return err
	}
	following, ctx := errgroup.WithContext(ctx)
	caughtUp := make(chan struct{})
	following.Go(func() error {
		return r.batches.store.Follow(ctx, func(one store.BatchRecord) { r.receive(ctx, one) }, func() { close(caughtUp) })
	})
	following.Go(func() error {
		select {
		case <-caughtUp:
		case <-ctx.Done():
			return ctx.Err()
		}
		r.mu.Lock()
		for _, b := range r.known {
			first = min(first, b.get().Run.Records)
		}
		r.mu.Unlock()
		following.Go(func() error { return r.sweepFiles(ctx) })
		return r.jobs.store.FollowEnds(ctx, r.queue, first, r.count)
	})
	err = following.Wait()
	r.runs.Wait()
	return err
}

// receive takes a record of a batch or a file.
func (r *batchRunner) receive(ctx context.Context, one store.BatchRecord) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if one.Kind == store.FileRecords {
		var file store.File
		if json.Unmarshal(one.Data, &file) != nil {
			return
		}
		if file.Deleted {
			file.ExpiresAt = 0
			select {
			case r.deleted <- struct{}{}:
			default:
			}
		}
		r.files[one.ID] = knownFile{data: file.Data, seq: one.Seq, expires: file.ExpiresAt}
		return
	}
	var record store.Batch
	if json.Unmarshal(one.Data, &record) != nil || record.Status.IsEnd() {
		return
	}
	if b := r.known[one.ID]; b != nil {
		b.set(record, one.Seq)
		return
	}
	prefix, _ := pipeline.LineJobID(r.queue, one.ID, 0).Line()
	b := &batchRun{
		batchRunner: r, id: one.ID, tenant: one.Tenant, changed: make(chan struct{}, 1),
		log: r.settings.Logger.With("batch", record.ID),
	}
	b.set(record, one.Seq)
	r.known[one.ID], r.lines[prefix] = b, b
	r.runs.Go(func() {
		b.run(WithTenant(ctx, one.Tenant))
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.known, one.ID)
		delete(r.lines, prefix)
	})
}

// count counts the end of a job, if it is a line's.
func (r *batchRunner) count(id pipeline.JobID, state inferencev1.JobState) {
	prefix, line := id.Line()
	r.mu.Lock()
	b := r.lines[prefix]
	r.mu.Unlock()
	if b != nil {
		b.count(line, state)
	}
}

// sweepFiles purges files that have expired or were deleted, except those that a batch reads, and
// bytes that were left behind.
func (r *batchRunner) sweepFiles(ctx context.Context) error {
	files := r.batches.store
	for {
		now, kept := time.Now().Unix(), map[uuid.UUID]bool{}
		var gone []knownFile
		r.mu.Lock()
		for _, b := range r.known {
			kept[b.get().Run.Input] = true
		}
		for id, file := range r.files {
			if file.expires > now || kept[file.data] {
				kept[file.data] = true
				continue
			}
			gone = append(gone, file)
			delete(r.files, id)
		}
		r.mu.Unlock()
		for _, file := range gone {
			if err := errors.Join(files.Purge(ctx, file.data), files.Remove(ctx, file.seq)); err != nil {
				return err
			}
		}
		orphans, err := files.Orphans(ctx, orphanAge, func(data uuid.UUID) bool { return kept[data] })
		for _, data := range orphans {
			err = errors.Join(err, files.Purge(ctx, data))
		}
		if err != nil {
			return err
		}
		timer := time.NewTimer(sweepEvery)
		select {
		case <-r.deleted:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}
