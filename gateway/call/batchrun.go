package call

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/mesh/store"
)

// batchRun is one batch in the works.
type batchRun struct {
	*batchRunner

	id     uuid.UUID
	tenant string
	log    *slog.Logger
	// changed is signalled when lines have ended.
	changed chan struct{}

	mu     sync.Mutex
	record store.Batch
	seq    uint64
	// stop ends the work on the lines, of a batch that is cancelled; nil before that begins.
	stop context.CancelFunc
	// ended says which lines have ended, and the counts how many.
	ended             []bool
	completed, failed int
}

func (b *batchRun) get() store.Batch {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.record
}

// set takes the record at a number.
func (b *batchRun) set(record store.Batch, seq uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if seq <= b.seq {
		return
	}
	b.record, b.seq = record, seq
	if total := record.RequestCounts.Total; len(b.ended) != total {
		b.ended = make([]bool, total)
	}
	if record.Status == store.BatchCancelling && b.stop != nil {
		b.stop()
	}
}

// update changes the record until it is stored, or change returns false.
func (b *batchRun) update(ctx context.Context, change func(*store.Batch) bool) error {
	for {
		b.mu.Lock()
		record, seq := b.record, b.seq
		b.mu.Unlock()
		if !change(&record) {
			return nil
		}
		next, err := b.batches.store.Put(ctx, store.BatchRecords, b.tenant, b.id, seq, &record)
		if err == nil {
			b.set(record, next)
			return nil
		}
		if !errors.Is(err, store.ErrJobChanged) {
			return err
		}
		var now store.Batch
		if seq, err = b.batches.store.Get(ctx, store.BatchRecords, b.tenant, b.id, &now); err != nil {
			return err
		}
		b.set(now, seq)
	}
}

func (b *batchRun) count(line int, state inferencev1.JobState) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if line >= len(b.ended) || b.ended[line] {
		return
	}
	b.ended[line] = true
	if state == inferencev1.JobState_JOB_STATE_SUCCEEDED {
		b.completed++
	} else {
		b.failed++
	}
	select {
	case b.changed <- struct{}{}:
	default:
	}
}

// run takes the batch to its end, unless the context ends before.
func (b *batchRun) run(ctx context.Context) {
	for isLogged := false; ctx.Err() == nil; {
		err := b.advance(ctx)
		if err == nil && b.get().Status.IsEnd() || errors.Is(err, store.ErrNoRecord) {
			return
		}
		if err != nil && ctx.Err() == nil && !isLogged {
			b.log.Warn("a batch cannot be processed; retrying", "error", err)
			isLogged = true
		}
		_ = process.Sleep(ctx, batchPause)
	}
}

// advance does what is left of the batch.
func (b *batchRun) advance(ctx context.Context) error {
	work, stop := context.WithDeadline(ctx, time.Unix(b.get().ExpiresAt, 0))
	defer stop()
	b.mu.Lock()
	b.stop = stop
	status := b.record.Status
	b.mu.Unlock()
	if status == store.BatchCancelling {
		stop()
	}
	err := error(nil)
	if status == store.BatchValidating {
		err = b.validate(work)
	}
	if err == nil && b.get().Status == store.BatchInProgress {
		if err = b.expand(work); err == nil {
			err = b.await(work, b.get().RequestCounts.Total)
		}
	}
	switch status := b.get().Status; {
	case ctx.Err() != nil:
		return ctx.Err()
	case status.IsEnd():
		return nil
	case work.Err() != nil && status != store.BatchFinalizing:
		if err = b.endLines(ctx, status == store.BatchCancelling); err == nil {
			err = b.await(ctx, b.get().Run.Claimed)
		}
	}
	if err != nil {
		return err
	}
	return b.finalize(ctx)
}

// requests passes the requests of the input file to do, with their places from 0 and the numbers
// of their lines. A text is valid until do returns.
func (b *batchRun) requests(ctx context.Context, do func(i, number int, text []byte) error) error {
	run := b.get().Run
	lines := bufio.NewScanner(b.batches.store.Open(ctx, run.Input, run.InputBytes))
	lines.Buffer(make([]byte, lineBuffer), maxBatchLine)
	i, number := 0, 0
	for lines.Scan() {
		number++
		text := bytes.TrimSpace(lines.Bytes())
		if len(text) == 0 {
			continue
		}
		if err := do(i, number, text); err != nil {
			return err
		}
		i++
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return do(i, number+1, nil)
	}
	return lines.Err()
}

// validate reads the input file: the batch is in progress then, or has failed.
func (b *batchRun) validate(ctx context.Context) error {
	if err := b.reading.Acquire(ctx, 1); err != nil {
		return err
	}
	defer b.reading.Release(1)
	check := newBatchCheck(b.get().Endpoint)
	err := b.requests(ctx, check.add)
	if err != nil && !errors.Is(err, errBadBatch) && !errors.Is(err, store.ErrNoRecord) {
		return err
	}
	if errors.Is(err, store.ErrNoRecord) {
		check.fail(0, "input_file_not_found", "input_file_id", "The input file was deleted.")
	}
	return b.update(ctx, func(r *store.Batch) bool {
		isValidating, now := r.Status == store.BatchValidating, time.Now().Unix()
		if errs := check.finish(); len(errs) > 0 {
			r.Status, r.FailedAt, r.Errors = store.BatchFailed, now, &store.BatchErrors{Object: "list", Data: errs}
		} else {
			r.Status, r.InProgressAt, r.RequestCounts.Total = store.BatchInProgress, now, check.requests
		}
		return isValidating
	})
}

// expand makes jobs of the lines.
func (b *batchRun) expand(ctx context.Context) error {
	if err := b.reading.Acquire(ctx, 1); err != nil {
		return err
	}
	defer b.reading.Release(1)
	record := b.get()
	// Those that were claimed last may have no jobs.
	claimed := max(0, record.Run.Claimed-claimedLines)
	from := claimed
	var submits errgroup.Group
	submits.SetLimit(maxBulkJobs)
	memory := semaphore.NewWeighted(maxBulkBytes)
	err := b.requests(ctx, func(i, _ int, text []byte) error {
		if i < from {
			return nil
		}
		if i == claimed {
			if err := submits.Wait(); err != nil {
				return err
			}
			claimed = min(claimed+claimedLines, record.RequestCounts.Total)
			if err := b.update(ctx, func(r *store.Batch) bool {
				isMore := claimed > r.Run.Claimed && r.Status == store.BatchInProgress
				r.Run.Claimed = claimed
				return isMore
			}); err != nil {
				return err
			}
			if ctx.Err() != nil {
				return ctx.Err() // it was cancelled meanwhile
			}
		}
		size := min(int64(len(text)), maxBulkBytes)
		if err := memory.Acquire(ctx, size); err != nil {
			return err
		}
		text = bytes.Clone(text)
		submits.Go(func() error {
			defer memory.Release(size)
			return b.submit(ctx, i, text)
		})
		return nil
	})
	return errors.Join(err, submits.Wait())
}

// submit makes a job of a line, however long that takes. A line that is refused for good ends.
func (b *batchRun) submit(ctx context.Context, line int, text []byte) error {
	in, id := b.jobOf(text), pipeline.LineJobID(b.queue, b.id, line)
	for {
		_, err := b.submitJobAs(ctx, in, id)
		f, isFault := errors.AsType[*fault.Fault](err) // other errors are the broker's
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case isFault && !f.Retryable():
			return b.endLine(ctx, id, inferencev1.JobState_JOB_STATE_FAILED, f)
		}
		_ = process.Sleep(ctx, batchPause)
	}
}

// jobOf returns the job of a line that was validated.
func (b *batchRun) jobOf(text []byte) *inferencev1.SubmitJobRequest {
	var line batchLine
	_ = json.Unmarshal(text, &line) // as before
	record := b.get()
	out := &inferencev1.SubmitJobRequest{Queue: string(b.queue), Deadline: timestamppb.New(time.Unix(record.ExpiresAt, 0))}
	if b.isHTTP {
		out.Payload = &inferencev1.SubmitJobRequest_Http{Http: &inferencev1.HttpCall{Path: record.Endpoint, ContentType: payload.JSONType, Body: line.Body}}
		return out
	}
	var body batchBody
	_ = json.Unmarshal(line.Body, &body)
	request := &Request{Pipeline: body.Model, Inputs: []payload.Part{payload.OfBlob("", payload.JSONType, line.Body)}}
	out.Payload = &inferencev1.SubmitJobRequest_Infer{Infer: request.ToProto()}
	return out
}

// endLine ends a line that has no job, so that it never gets one.
func (b *batchRun) endLine(ctx context.Context, id pipeline.JobID, state inferencev1.JobState, f *fault.Fault) error {
	now := timestamppb.Now()
	_, err := b.jobs.store.PutRecord(ctx, id, b.tenant, 0, &meshv1.JobRecord{Tenant: b.tenant, Fault: f.ToProto(), Job: &inferencev1.Job{
		Id: id.String(), Queue: string(b.queue), State: state, AcceptedAt: now, Deadline: now, EndedAt: now, Reason: string(f.Reason), Message: f.Message,
	}})
	if errors.Is(err, store.ErrJobChanged) {
		return nil // it has an end, or an attempt that will have one
	}
	return err
}

// endLines ends the lines of a batch that has expired or is cancelled. Jobs expire by themselves.
func (b *batchRun) endLines(ctx context.Context, isCancelled bool) error {
	claimed, from := b.get().Run.Claimed, 0
	if !isCancelled {
		from = max(0, claimed-claimedLines) // all others have jobs
	}
	ends, ctx := errgroup.WithContext(ctx)
	ends.SetLimit(maxBulkJobs)
	for line := from; line < claimed && ctx.Err() == nil; line++ {
		b.mu.Lock()
		isEnded := b.ended[line]
		b.mu.Unlock()
		if isEnded {
			continue
		}
		ends.Go(func() error {
			id := pipeline.LineJobID(b.queue, b.id, line)
			if isCancelled {
				return b.cancelLine(ctx, id)
			}
			_, err := b.findJob(ctx, id, b.tenant)
			if errors.Is(err, store.ErrNoJob) {
				return b.endLine(ctx, id, inferencev1.JobState_JOB_STATE_EXPIRED, fault.New(fault.DeadlineExceeded, "the batch expired before the request was submitted"))
			}
			return err
		})
	}
	return ends.Wait()
}

func (b *batchRun) cancelLine(ctx context.Context, id pipeline.JobID) error {
	for {
		_, err := b.cancelJob(ctx, id, b.tenant)
		switch {
		case errors.Is(err, store.ErrNoJob):
			return b.endLine(ctx, id, inferencev1.JobState_JOB_STATE_CANCELLED, fault.New(fault.Cancelled, "the batch was cancelled before the request was submitted"))
		case !errors.Is(err, store.ErrJobChanged):
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		}
	}
}

// await returns once that many lines have ended, and stores the counts meanwhile.
func (b *batchRun) await(ctx context.Context, lines int) error {
	tick := time.NewTicker(batchPause)
	defer tick.Stop()
	for {
		b.mu.Lock()
		completed, failed := b.completed, b.failed
		b.mu.Unlock()
		if completed+failed >= lines {
			return nil
		}
		select {
		case <-b.changed:
			continue
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := b.update(ctx, func(r *store.Batch) bool {
			isMore := completed > r.RequestCounts.Completed || failed > r.RequestCounts.Failed
			r.RequestCounts.Completed, r.RequestCounts.Failed = max(completed, r.RequestCounts.Completed), max(failed, r.RequestCounts.Failed)
			return isMore && !r.Status.IsEnd()
		}); err != nil {
			return err
		}
	}
}

// finalize writes the files of a batch whose lines have ended, and ends it.
func (b *batchRun) finalize(ctx context.Context) error {
	if err := b.writing.Acquire(ctx, 1); err != nil {
		return err
	}
	defer b.writing.Release(1)
	if err := b.update(ctx, func(r *store.Batch) bool {
		isNew := r.Run.Output == uuid.Nil
		if isNew {
			r.Run.Output, r.Run.Errors = uuid.Must(uuid.NewV7()), uuid.Must(uuid.NewV7())
		}
		if r.Status == store.BatchInProgress || r.Status == store.BatchValidating {
			r.Status, r.FinalizingAt, isNew = store.BatchFinalizing, time.Now().Unix(), true
		}
		return isNew && !r.Status.IsEnd()
	}); err != nil {
		return err
	}
	record := b.get()
	writes, writing := errgroup.WithContext(ctx)
	lines := &lineWriter{
		batchRun: b, record: record,
		output: b.startFile(writing, writes, record.Run.Output, "output.jsonl"), failures: b.startFile(writing, writes, record.Run.Errors, "error.jsonl"),
	}
	writes.Go(func() error {
		err := lines.write(writing)
		_ = lines.output.CloseWithError(err)
		_ = lines.failures.CloseWithError(err)
		return err
	})
	if err := writes.Wait(); err != nil {
		return err
	}
	return b.update(ctx, func(r *store.Batch) bool {
		isOpen, now := !r.Status.IsEnd(), time.Now().Unix()
		switch {
		case r.Status == store.BatchCancelling:
			r.Status, r.CancelledAt = store.BatchCancelled, now
		case lines.hasExpired || now > r.ExpiresAt && r.RequestCounts.Total == 0:
			r.Status, r.ExpiredAt = store.BatchExpired, now
		default:
			r.Status, r.CompletedAt = store.BatchCompleted, now
		}
		r.RequestCounts.Completed, r.RequestCounts.Failed = lines.output.lines, lines.failures.lines
		if lines.output.lines > 0 {
			r.OutputFileID = recordID(filePrefix, record.Run.Output)
		}
		if lines.failures.lines > 0 {
			r.ErrorFileID = recordID(filePrefix, record.Run.Errors)
		}
		return isOpen
	})
}

// batchFile is a file that is being written.
type batchFile struct {
	*io.PipeWriter

	lines int
}

// startFile writes what is written to the file. A file that is there stays as it is.
func (b *batchRun) startFile(ctx context.Context, writes *errgroup.Group, id uuid.UUID, name string) *batchFile {
	from, to := io.Pipe()
	record := b.get()
	writes.Go(func() error {
		files := b.batches.store
		data, size, err := files.Write(ctx, from)
		_ = from.CloseWithError(cmp.Or(err, io.ErrClosedPipe))
		if err != nil {
			return err
		}
		if size > 0 {
			file := newFile(id, record.ID+"_"+name, PurposeOutput, record.Run.FileSeconds)
			file.Data, file.Bytes = data, size
			if _, err = files.Put(ctx, store.FileRecords, b.tenant, id, 0, file); err == nil {
				return nil
			}
		}
		if errors.Is(err, store.ErrJobChanged) {
			err = nil
		}
		return errors.Join(err, files.Purge(ctx, data))
	})
	return &batchFile{PipeWriter: to}
}
