package jobs

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/google/uuid"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

type batchRun struct {
	*batchRunner

	id     uuid.UUID
	queue  pipeline.QueueName
	tenant string
	log    *slog.Logger
	// stop ends the work on the lines, of a batch that is cancelled.
	stop context.CancelFunc

	mu     sync.Mutex
	record store.BatchRecord
	seq    uint64
	// ended says which lines have ended, the counts how many, and allEnded is closed after the last.
	ended             []bool
	completed, failed int
	allEnded          chan struct{}
	// largest is the size of the largest record of a line, in bytes.
	largest int64
	// noInputSince is when the input file was first missing, for run.
	noInputSince time.Time
}

func (b *batchRun) get() store.BatchRecord {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.record
}

func (b *batchRun) set(record store.BatchRecord, seq uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if seq <= b.seq {
		return
	}
	b.record, b.seq = record, seq
	if total := record.RequestCounts.Total; len(b.ended) != total {
		b.ended = make([]bool, total)
	}
	if record.Status == store.BatchCancelling {
		b.stop()
	}
}

// update changes the record until it is stored, or change returns false.
func (b *batchRun) update(ctx context.Context, change func(*store.BatchRecord) bool) error {
	for {
		b.mu.Lock()
		record, seq := b.record, b.seq
		b.mu.Unlock()
		if !change(&record) {
			return nil
		}
		next, err := b.batches.Put(ctx, store.BatchRecords, b.tenant, record.ID, seq, &record)
		if err == nil {
			b.set(record, next)
			if record.Status.IsEnd() {
				b.metrics.ended.Add(ctx, 1, metric.WithAttributes(attribute.String("status", string(record.Status))))
			}
			return nil
		}
		if !errors.Is(err, store.ErrJobChanged) {
			return err
		}
		var now store.BatchRecord
		if seq, err = b.batches.Get(ctx, store.BatchRecords, b.tenant, record.ID, &now); err != nil {
			return err
		}
		b.set(now, seq)
	}
}

func (b *batchRun) count(line int, state inferencev1.JobState, size int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.largest = max(b.largest, size)
	if line >= len(b.ended) || b.ended[line] {
		return
	}
	b.ended[line] = true
	if state == inferencev1.JobState_JOB_STATE_SUCCEEDED {
		b.completed++
	} else {
		b.failed++
	}
	if b.completed+b.failed == len(b.ended) {
		close(b.allEnded)
	}
}

// recordReads is how many records of lines may be in memory.
func (b *batchRun) recordReads() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return min(max(minRecordReads, maxRecordBytes/max(1, b.largest)), maxRecordReads)
}

func (b *batchRun) hasEnded(line int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ended[line]
}

// run takes the batch to its end, unless the context ends before. That of its lines ends as the
// batch expires or is cancelled.
func (b *batchRun) run(ctx, lines context.Context) {
	for isLogged := false; ctx.Err() == nil; {
		began := time.Now()
		err := b.advance(ctx, lines)
		if errors.Is(err, errNoInput) && b.isInputGone(began) {
			err = b.failWithoutInput(ctx)
		}
		if err == nil && b.get().Status.IsEnd() || errors.Is(err, store.ErrNoRecord) || errors.Is(err, store.ErrNotRecord) {
			return
		}
		if err != nil && ctx.Err() == nil && !isLogged {
			b.log.Warn("a batch cannot be processed; retrying", "error", err)
			isLogged = true
		}
		_ = process.Sleep(ctx, batchPause)
	}
}

func (b *batchRun) advance(ctx, lines context.Context) (err error) {
	if b.get().Status == store.BatchValidating {
		err = b.validate(lines)
	}
	if err == nil && b.get().Status == store.BatchInProgress {
		if err = b.expand(lines); err == nil {
			err = b.await(lines)
		}
	}
	switch status := b.get().Status; {
	case ctx.Err() != nil:
		return ctx.Err()
	case status.IsEnd():
		return nil
	case lines.Err() != nil && status != store.BatchFinalizing:
		if err = b.endLines(ctx); err == nil {
			err = b.await(ctx)
		}
	}
	if err != nil {
		return err
	}
	return b.finalize(ctx)
}

func (b *batchRun) requests(ctx context.Context, do func(at linePlace, text []byte) error) error {
	record := b.get()
	return eachRequest(b.batches.Open(ctx, record.Input, record.InputBytes), linePlace{}, do)
}

// isInputGone reports whether a batch that was advanced since began, until its input file was missing, fails.
// One that is in progress waits: a replica of the broker that lags behind lacks bytes that others have.
func (b *batchRun) isInputGone(began time.Time) bool {
	if b.noInputSince.IsZero() || time.Since(began) >= inputWait { // it was there meanwhile
		b.noInputSince = time.Now()
	}
	return b.get().Status == store.BatchValidating || time.Since(b.noInputSince) >= inputWait
}

// failWithoutInput ends a batch whose input file is gone.
func (b *batchRun) failWithoutInput(ctx context.Context) error {
	var check batchCheck
	check.fail(0, "input_file_not_found", "input_file_id", "The input file was deleted.")
	return b.update(ctx, func(r *store.BatchRecord) bool {
		hasEnded := r.Status.IsEnd()
		r.Status, r.FailedAt, r.Errors = store.BatchFailed, time.Now().Unix(), &store.BatchErrors{Object: "list", Data: check.errs}
		return !hasEnded
	})
}

// validate reads the input file: the batch is in progress then, or has failed.
func (b *batchRun) validate(ctx context.Context) error {
	if err := b.validating.Acquire(ctx, b.tenant, 1); err != nil {
		return err
	}
	defer b.validating.Release(b.tenant, 1)
	check := batchCheck{endpoint: b.get().Endpoint, seen: map[[16]byte]struct{}{}}
	err := b.requests(ctx, check.add)
	switch {
	case err != nil && !errors.Is(err, errBadBatch):
		return err
	case check.requests == 0:
		check.fail(0, "empty_file", "", "The input file has no requests.")
	}
	return b.update(ctx, func(r *store.BatchRecord) bool {
		isValidating, now := r.Status == store.BatchValidating, time.Now().Unix()
		if errs := check.errs; len(errs) > 0 {
			r.Status, r.FailedAt, r.Errors = store.BatchFailed, now, &store.BatchErrors{Object: "list", Data: errs}
		} else {
			r.Status, r.InProgressAt, r.RequestCounts.Total = store.BatchInProgress, now, check.requests
		}
		return isValidating
	})
}

// expand makes jobs of the lines that have not ended, in turns. A line that has a job keeps it. While
// there is no room for more, the batch holds no turn and no memory.
func (b *batchRun) expand(ctx context.Context) error {
	index, at, pause := new(store.FileIndex), linePlace{}, minExpandPause
	for {
		if err := b.expanding.Acquire(ctx, b.tenant, 1); err != nil {
			return err
		}
		next, err := b.expandFrom(ctx, at, index)
		b.expanding.Release(b.tenant, 1)
		if err != nil || next == nil {
			return err
		}
		if next.isRefused {
			_ = process.Sleep(ctx, pause)
		}
		if pause = min(2*pause, batchPause); next.i > at.i {
			pause = minExpandPause
		}
		at = next.linePlace
	}
}

// nextLine is the first line that has no job after a turn.
type nextLine struct {
	linePlace

	isRefused bool
}

// expandFrom makes jobs of lines from a place on, until its turn is over or a line is refused. It
// returns the next line, nil if there is none.
func (b *batchRun) expandFrom(ctx context.Context, from linePlace, index *store.FileIndex) (next *nextLine, err error) {
	type batchText struct {
		linePlace

		size int64
		text []byte
	}
	record, end, isAnySent := b.get(), time.Now().Add(expandTurn), false
	var mu sync.Mutex // guards next
	keep := func(at linePlace, isRefused bool) {
		mu.Lock()
		defer mu.Unlock()
		if next == nil {
			next = &nextLine{linePlace: at}
		}
		if next.isRefused = next.isRefused || isRefused; at.i < next.i {
			next.linePlace = at
		}
	}
	isOver := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return next != nil
	}
	work, ctx := errgroup.WithContext(ctx)
	memory, lines := semaphore.NewWeighted(maxBulkBytes), make(chan batchText)
	work.Go(func() error {
		defer close(lines)
		file := b.batches.OpenAt(ctx, record.Input, record.InputBytes, from.offset, index)
		err := eachRequest(file, from, func(at linePlace, text []byte) error {
			if b.hasEnded(at.i) {
				return nil
			}
			if isOver() || isAnySent && time.Now().After(end) {
				keep(at, false)
				return errTurnOver
			}
			size := min(int64(len(text)), maxBulkBytes)
			if err := memory.Acquire(ctx, size); err != nil {
				return err
			}
			isAnySent = true
			return send(ctx, lines, batchText{at, size, bytes.Clone(text)})
		})
		if errors.Is(err, errTurnOver) {
			return nil
		}
		return err
	})
	for range maxBulkJobs {
		work.Go(func() error {
			for in := range lines {
				if isOver() {
					keep(in.linePlace, false)
				} else if isDone, err := b.submit(ctx, in.i, in.text); err != nil {
					return err
				} else if !isDone {
					keep(in.linePlace, true)
				}
				memory.Release(in.size)
			}
			return nil
		})
	}
	err = work.Wait()
	return next, err
}

// errTurnOver ends the reading of lines.
var errTurnOver = errors.New("the turn is over")

// submit makes a job of a line, and returns false if there is no room for it now. A line that is refused
// for good ends.
func (b *batchRun) submit(ctx context.Context, line int, text []byte) (isDone bool, err error) {
	_, err = b.Service.submit(ctx, b.jobOf(text), pipeline.LineJobID(b.queue, b.id, line))
	f, isFault := errors.AsType[*fault.Fault](err) // other errors are the broker's
	switch {
	case err == nil:
		return true, nil
	case ctx.Err() != nil:
		return false, ctx.Err()
	case isFault && !f.Retryable():
		return true, b.endLine(ctx, line, inferencev1.JobState_JOB_STATE_FAILED, f)
	}
	return false, nil
}

// jobOf returns the job of a line that was validated.
func (b *batchRun) jobOf(text []byte) *inferencev1.SubmitJobRequest {
	var line struct {
		Body jsontext.Value `json:"body"`
	}
	_ = json.Unmarshal(text, &line, lenient)
	record := b.get()
	out := &inferencev1.SubmitJobRequest{Queue: string(b.queue), Deadline: timestamppb.New(time.Unix(record.ExpiresAt, 0))}
	if (*b.queues.Load())[b.queue].HTTP {
		out.Payload = &inferencev1.SubmitJobRequest_Http{Http: &inferencev1.HttpCall{Path: record.Endpoint, ContentType: payload.JSONType, Body: line.Body}}
		return out
	}
	var body batchBody
	_ = json.Unmarshal(line.Body, &body, lenient)
	request := &request.Request{Pipeline: body.Model, Inputs: []payload.Part{payload.OfBlob("", payload.JSONType, line.Body)}}
	out.Payload = &inferencev1.SubmitJobRequest_Infer{Infer: request.ToProto()}
	return out
}

// endLine ends a line for good: its job is cancelled if that is the state, and a line without a job
// never gets one.
func (b *batchRun) endLine(ctx context.Context, line int, state inferencev1.JobState, f *fault.Fault) error {
	id := pipeline.LineJobID(b.queue, b.id, line)
	for {
		var err error
		if state == inferencev1.JobState_JOB_STATE_CANCELLED {
			_, err = b.cancelJob(ctx, id, b.tenant)
		} else {
			_, err = b.findJob(ctx, id, b.tenant)
		}
		if errors.Is(err, store.ErrNotAJob) {
			b.count(line, inferencev1.JobState_JOB_STATE_FAILED, 0)
			return nil
		}
		if errors.Is(err, store.ErrNoJob) {
			now := timestamppb.Now()
			_, err = b.store.PutRecord(ctx, id, b.tenant, 0, &meshv1.JobRecord{Job: &inferencev1.Job{
				Id: id.String(), Queue: string(b.queue), State: state, AcceptedAt: now, Deadline: now, EndedAt: now, Reason: string(f.Reason), Message: f.Message,
			}})
		}
		if !errors.Is(err, store.ErrJobChanged) || ctx.Err() != nil {
			return err
		}
	}
}

// endLines ends the lines of a batch that has expired or is cancelled. Jobs expire by themselves.
func (b *batchRun) endLines(ctx context.Context) error {
	state, f := inferencev1.JobState_JOB_STATE_EXPIRED, fault.New(fault.DeadlineExceeded, "the batch expired before the request was submitted")
	if b.get().Status == store.BatchCancelling {
		state, f = inferencev1.JobState_JOB_STATE_CANCELLED, fault.New(fault.Cancelled, "the batch was cancelled before the request was submitted")
	}
	ends, ctx := errgroup.WithContext(ctx)
	ends.SetLimit(maxBulkJobs)
	for line := 0; line < b.get().RequestCounts.Total && ctx.Err() == nil; line++ {
		if !b.hasEnded(line) {
			ends.Go(func() error { return b.endLine(ctx, line, state, f) })
		}
	}
	return ends.Wait()
}

// await returns once all lines have ended, and stores the counts meanwhile.
func (b *batchRun) await(ctx context.Context) error {
	for {
		b.mu.Lock()
		completed, failed, total := b.completed, b.failed, len(b.ended)
		b.mu.Unlock()
		if completed+failed == total {
			return nil
		}
		if err := b.update(ctx, func(r *store.BatchRecord) bool {
			isMore := completed > r.RequestCounts.Completed || failed > r.RequestCounts.Failed
			r.RequestCounts.Completed, r.RequestCounts.Failed = max(completed, r.RequestCounts.Completed), max(failed, r.RequestCounts.Failed)
			return isMore && !r.Status.IsEnd()
		}); err != nil {
			return err
		}
		select {
		case <-time.After(countPause):
		case <-b.allEnded:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// finalize writes the files of a batch whose lines have ended, and ends it.
func (b *batchRun) finalize(ctx context.Context) error {
	if err := b.writing.Acquire(ctx, b.tenant, 1); err != nil {
		return err
	}
	defer b.writing.Release(b.tenant, 1)
	stored, f := b.calls.ReserveStored(ctx, b.batches.Files, b.get().InputBytes) // about as much
	if f != nil {
		return f
	}
	defer stored()
	if err := b.update(ctx, func(r *store.BatchRecord) bool {
		isNew := r.Status == store.BatchInProgress || r.Status == store.BatchValidating
		r.Status, r.FinalizingAt = store.BatchFinalizing, time.Now().Unix()
		return isNew
	}); err != nil {
		return err
	}
	lines, errorID := &lineWriter{batchRun: b, outcomes: map[string]int{}}, b.id
	errorID[len(errorID)-1] ^= 1
	if err := b.writeFile(ctx, b.id, "output.jsonl", func(to io.Writer) error {
		lines.output = to
		return b.writeFile(ctx, errorID, "error.jsonl", func(to io.Writer) error {
			lines.failures = to
			return lines.write(ctx)
		})
	}); err != nil {
		return err
	}
	isOpen := false
	err := b.update(ctx, func(r *store.BatchRecord) bool {
		isOpen = !r.Status.IsEnd()
		now, counts := time.Now().Unix(), &r.RequestCounts
		counts.Completed = lines.outcomes[lineSucceeded]
		counts.Failed = counts.Total - counts.Completed
		switch {
		case r.Status == store.BatchCancelling:
			r.Status, r.CancelledAt = store.BatchCancelled, now
		case lines.outcomes[lineExpired] > 0 || counts.Total == 0: // it was not validated in time
			r.Status, r.ExpiredAt = store.BatchExpired, now
		default:
			r.Status, r.CompletedAt = store.BatchCompleted, now
		}
		if counts.Completed > 0 {
			r.OutputFileID = recordID(store.FileRecords, b.id)
		}
		if counts.Failed > 0 {
			r.ErrorFileID = recordID(store.FileRecords, errorID)
		}
		return isOpen
	})
	if err == nil && isOpen {
		for outcome, n := range lines.outcomes {
			b.metrics.lines.Add(ctx, int64(n), metric.WithAttributes(attribute.String("outcome", outcome)))
		}
	}
	return err
}

// writeFile stores a file of the batch, unless it is empty or is there. The ID is the batch's, or
// one beside it, so the files of a list are in the order of their batches.
func (b *batchRun) writeFile(ctx context.Context, id uuid.UUID, name string, fill func(io.Writer) error) error {
	record := b.get()
	data, size, err := b.batches.Write(ctx, b.tenant, nil, fill)
	if err != nil || size == 0 {
		return err
	}
	file := newFile(id, record.ID+"_"+name, purposeOutput, size, record.FileSeconds)
	file.Data = data
	for {
		if err = b.putFile(ctx, b.tenant, file); !errors.Is(err, bus.ErrUnknown) || ctx.Err() != nil {
			return err
		}
		_ = process.Sleep(ctx, batchPause)
	}
}
