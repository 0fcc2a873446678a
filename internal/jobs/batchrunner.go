package jobs

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	// Batches at each step at a time, in turns by tenant.
	maxValidating = 4
	maxExpanding  = 4
	maxWriting    = 2
	// expandTurn is how long a batch makes jobs of its lines before others have their turn, and
	// minExpandPause the pause before its next turn if there was no room, which doubles up to batchPause.
	expandTurn     = time.Second
	minExpandPause = 50 * time.Millisecond
	// batchPause is how long a step of a batch waits after a failure, countPause the pause between
	// two counts, and sweepPause between two looks for files that have expired.
	batchPause = time.Second
	countPause = 200 * time.Millisecond
	sweepPause = 10 * time.Second
	// inputWait is how long a batch in progress waits for an input file that is missing.
	inputWait = 5 * time.Minute
	// clockSlack bounds how far the clocks of gateways and of the broker may differ.
	clockSlack = time.Minute
)

// batchRunner processes all batches while its gateway has the lease. What it does can be repeated:
// the state of a batch is its record, a line's job has an ID that follows from the batch and the
// line, and the end of a line is the record of that job.
type batchRunner struct {
	*Service

	validating, expanding, writing *budget.Pool

	mu    sync.Mutex
	runs  map[pipeline.LinePrefix]*batchRun
	files map[string]knownFile
}

// knownFile is the record of a file, and its number.
type knownFile struct {
	store.FileRecord

	seq uint64
}

// runBatches processes batches, one gateway at a time, until the context ends.
func (s *Service) runBatches(ctx context.Context) {
	owner, log, queue := uuid.NewString(), s.settings.Logger, s.settings.Batches.Queue
	ensure := func(ctx context.Context) error {
		return errors.Join(s.store.Ensure(ctx), s.batches.Ensure(ctx), s.store.EnsureQueue(ctx, queue, (*s.queues.Load())[queue].JobQueueSettings))
	}
	for ctx.Err() == nil {
		lease := store.NewLease(s.store, store.BatchLease, "all", owner)
		if !lease.Acquire(ctx, log, ensure) {
			return
		}
		log.Info("processes batches")
		work, running := errgroup.WithContext(ctx)
		work.Go(func() error { return lease.Keep(running, func() uint64 { return 0 }) })
		work.Go(func() error {
			if err := ensure(running); err != nil {
				return err
			}
			return s.followBatches(running)
		})
		err := work.Wait()
		if !errors.Is(err, store.ErrLeaseLost) {
			lease.Release()
		}
		if ctx.Err() == nil {
			log.Warn("no longer processes batches", "error", err)
			_ = process.Sleep(ctx, batchPause)
		}
	}
}

// followBatches processes batches until the context ends, or the records of batches, files or
// jobs cannot be followed.
func (s *Service) followBatches(ctx context.Context) error {
	r := &batchRunner{
		Service:    s,
		validating: places(maxValidating), expanding: places(maxExpanding), writing: places(maxWriting),
		runs: map[pipeline.LinePrefix]*batchRun{}, files: map[string]knownFile{},
	}
	work, ctx := errgroup.WithContext(ctx)
	var followed map[pipeline.QueueName]bool // nil before all batches are known
	followEnds := func(queue pipeline.QueueName, first int64) {
		if followed != nil && !followed[queue] {
			followed[queue] = true
			work.Go(func() error { return s.store.FollowEnds(ctx, queue, time.Unix(first, 0).Add(-clockSlack), r.count) })
		}
	}
	work.Go(func() error {
		return s.batches.Follow(ctx, r.receiveFile, func(seq uint64, tenant string, record store.BatchRecord) {
			record.Queue = cmp.Or(record.Queue, s.settings.Batches.Queue) // earlier versions did not say
			if run := r.receiveBatch(ctx, seq, tenant, record); run != nil {
				work.Go(run)
				followEnds(record.Queue, record.CreatedAt)
			}
		}, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			first := map[pipeline.QueueName]int64{}
			for _, b := range r.runs {
				created := b.get().CreatedAt
				first[b.queue] = min(created, cmp.Or(first[b.queue], created))
			}
			followed = map[pipeline.QueueName]bool{}
			for queue, first := range first {
				followEnds(queue, first)
			}
			work.Go(func() error { return r.sweepFiles(ctx) })
		})
	})
	return work.Wait()
}

func places(n int64) *budget.Pool { return budget.NewPool(budget.Settings{Limit: n, Name: "places"}) }

func (r *batchRunner) receiveFile(seq uint64, file store.FileRecord) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.files[file.ID] = knownFile{file, seq}
}

// receiveBatch takes a record of a batch, and returns the run of a new one.
func (r *batchRunner) receiveBatch(ctx context.Context, seq uint64, tenant string, record store.BatchRecord) (run func() error) {
	id, err := parseRecordID(store.BatchRecords, record.ID)
	if err != nil || record.Status.IsEnd() {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	prefix, _ := pipeline.LineJobID(record.Queue, id, 0).Line()
	b := r.runs[prefix]
	if b == nil {
		ctx = budget.WithTenant(ctx, tenant)
		lines, stop := context.WithDeadline(ctx, time.Unix(record.ExpiresAt, 0))
		b = &batchRun{batchRunner: r, id: id, queue: record.Queue, tenant: tenant, log: r.settings.Logger.With("batch", record.ID), stop: stop, allEnded: make(chan struct{})}
		r.runs[prefix] = b
		run = func() error {
			defer stop()
			b.run(ctx, lines)
			r.mu.Lock()
			defer r.mu.Unlock()
			delete(r.runs, prefix)
			return nil
		}
	}
	b.set(record, seq)
	return run
}

// count counts the end of a job, if it is a line's.
func (r *batchRunner) count(id pipeline.JobID, state inferencev1.JobState, size int64) {
	prefix, line := id.Line()
	r.mu.Lock()
	b := r.runs[prefix]
	r.mu.Unlock()
	if b != nil {
		b.count(line, state, size)
	}
}

// sweepFiles purges files that have expired or were deleted, except those that a batch reads.
func (r *batchRunner) sweepFiles(ctx context.Context) error {
	for {
		kept := map[string]bool{}
		var gone []knownFile
		r.mu.Lock()
		for _, b := range r.runs {
			kept[b.get().Input] = true
		}
		for id, file := range r.files {
			if !isThere(&file.FileRecord) && !kept[file.Data] {
				gone = append(gone, file)
				delete(r.files, id)
			}
		}
		r.mu.Unlock()
		for _, file := range gone {
			if err := r.batches.Remove(ctx, file.Data, file.seq); err != nil {
				return err
			}
		}
		if err := process.Sleep(ctx, sweepPause); err != nil {
			return err
		}
	}
}
