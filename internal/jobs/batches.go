package jobs

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// maxFileBytes bounds a file.
const maxFileBytes = 200 << 20

// Purposes of files: the input of a batch, and its output.
const (
	purposeBatch  = "batch"
	purposeOutput = "batch_output"
)

// ExpiresAfter is when a file expires.
type ExpiresAfter struct {
	Anchor  string `json:"anchor"`
	Seconds int64  `json:"seconds"`
}

// minFileAge is the shortest that a file may last.
const minFileAge = time.Hour

// seconds returns how long a file lasts; nil is the longest.
func (e *ExpiresAfter) seconds(field string, longest time.Duration) (int64, *fault.Fault) {
	most := int64(longest / time.Second)
	switch {
	case e == nil:
		return most, nil
	case e.Anchor != "created_at":
		return 0, fault.InField(fault.InvalidRequest, field+".anchor", "%.*q; only created_at is possible", fault.MaxQuoted, e.Anchor)
	case e.Seconds < int64(minFileAge/time.Second) || e.Seconds > most:
		return 0, fault.InField(fault.InvalidRequest, field+".seconds", "%d, from %d to %d are possible", e.Seconds, int64(minFileAge/time.Second), most)
	}
	return e.Seconds, nil
}

// FileOptions are what an upload says of its file.
type FileOptions struct {
	Name, Purpose string
	ExpiresAfter  *ExpiresAfter
}

// NewBatch is what a caller says of a batch.
type NewBatch struct {
	InputFileID        string            `json:"input_file_id"`
	Endpoint           string            `json:"endpoint"`
	CompletionWindow   string            `json:"completion_window"`
	Metadata           map[string]string `json:"metadata"`
	OutputExpiresAfter *ExpiresAfter     `json:"output_expires_after"`
}

// ListOptions choose a page of files or batches.
type ListOptions struct {
	// After is the last ID of the page before.
	After string
	Limit int
	// Purpose selects files; empty is any.
	Purpose string
	// Ascending is true for the oldest first.
	Ascending bool
}

// Page is a page of files or batches, the newest first unless asked.
type Page[T any] struct {
	Object  string `json:"object"`
	Data    []T    `json:"data"`
	FirstID string `json:"first_id,omitempty"`
	LastID  string `json:"last_id,omitempty"`
	HasMore bool   `json:"has_more"`
}

// maxPage is how many files or batches a page has, whatever its limit.
const maxPage = 1000

// ServesBatches reports whether there are files and batches.
func (s *Service) ServesBatches() bool { return s.settings.Batches.Queue != "" }

// CallBatches makes a call of one of the methods of files and batches.
func (s *Service) CallBatches(ctx context.Context, do func() error) error {
	if f := s.limiter.Acquire(budget.TenantOf(ctx)); f != nil {
		return f
	}
	defer s.limiter.Release(budget.TenantOf(ctx))
	if f := s.batchStream.Ensure(ctx); f != nil {
		return f
	}
	err := do()
	f, isFault := errors.AsType[*fault.Fault](err)
	switch {
	case err == nil:
		return nil
	case isFault:
		return f
	case ctx.Err() != nil:
		return fault.From(ctx.Err())
	case errors.Is(err, store.ErrNoRecord): // its record is there
		return fault.New(fault.NotFound, "the bytes of the file have expired").Caused(err)
	case errors.Is(err, bus.ErrQueueFull):
		return fault.New(fault.QueueFull, "the space for files and batches is full; delete files").WithRetryAfter(budget.RetryAfter).Caused(err)
	case errors.Is(err, bus.ErrNoQueue):
		s.batchStream.Reset(ctx)
	}
	return store.Unavailable(err)
}

// CreateFile stores a file. It calls describe once it has read all of it.
func (s *Service) CreateFile(ctx context.Context, from io.Reader, describe func() (FileOptions, error)) (*store.File, error) {
	stored, f := s.calls.ReserveStored(ctx, s.batches.Records, recordBytes)
	if f != nil {
		return nil, f
	}
	defer stored()
	reserve := func(n int64) (func(), *fault.Fault) { return s.calls.ReserveStored(ctx, s.batches.Files, n) }
	data, size, err := s.batches.Write(ctx, budget.TenantOf(ctx), reserve, func(to io.Writer) error {
		_, err := io.Copy(to, io.LimitReader(from, maxFileBytes+1))
		return err
	})
	if err != nil {
		return nil, err
	}
	file, err := newInputFile(size, s.settings.Batches.Retention, describe)
	// A caller who hangs up now leaves no record without its bytes.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTimeout)
	defer cancel()
	if err != nil {
		_ = s.batches.Purge(ctx, data) // else they go with the stream's age
		return nil, err
	}
	file.Data = data
	return &file.File, s.putFile(ctx, budget.TenantOf(ctx), file)
}

// recordBytes is about what the record of a file or a batch takes.
const recordBytes = 2 << 10

// recordTimeout bounds the change of a record after an upload.
const recordTimeout = 10 * time.Second

// putFile stores the record of a file, unless it is there. The bytes go if no record has them. After
// bus.ErrUnknown and the context's error one may.
func (s *Service) putFile(ctx context.Context, tenant string, file *store.FileRecord) error {
	_, err := s.batches.Put(ctx, store.FileRecords, tenant, file.ID, 0, file)
	switch {
	case errors.Is(err, store.ErrJobChanged):
		var there store.FileRecord // by an earlier try, or this one, whose answer was lost
		if _, err = s.batches.Get(ctx, store.FileRecords, tenant, file.ID, &there); err != nil || there.Data == file.Data {
			return err
		}
	case err == nil, errors.Is(err, bus.ErrUnknown), ctx.Err() != nil:
		return err
	}
	return errors.Join(err, s.batches.Purge(ctx, file.Data))
}

func newInputFile(size int64, longest time.Duration, describe func() (FileOptions, error)) (*store.FileRecord, error) {
	if size > maxFileBytes {
		return nil, fault.Newf(fault.PayloadTooLarge, "a file has at most %d bytes", maxFileBytes)
	}
	options, err := describe()
	if err != nil {
		return nil, err
	}
	if options.Purpose != purposeBatch {
		return nil, fault.InField(fault.InvalidRequest, "purpose", "%.*q; only %s is possible", fault.MaxQuoted, options.Purpose, purposeBatch)
	}
	seconds, f := options.ExpiresAfter.seconds("expires_after", longest)
	if f != nil {
		return nil, f
	}
	return newFile(uuid.Must(uuid.NewV7()), options.Name, purposeBatch, size, seconds), nil
}

func newFile(id uuid.UUID, name, purpose string, size, seconds int64) *store.FileRecord {
	now := time.Now().Unix()
	return &store.FileRecord{File: store.File{
		ID: recordID(store.FileRecords, id), Object: "file", Bytes: size, CreatedAt: now, ExpiresAt: now + seconds, Filename: name, Purpose: purpose, Status: "processed",
	}}
}

// recordID returns the ID of a file or a batch. IDs sort by age.
func recordID(kind string, id uuid.UUID) string {
	return recordPrefixes[kind] + hex.EncodeToString(id[:])
}

var recordPrefixes = map[string]string{store.FileRecords: "file-", store.BatchRecords: "batch_"}

func parseRecordID(kind, text string) (uuid.UUID, error) {
	id, err := uuid.Parse(strings.TrimPrefix(text, recordPrefixes[kind]))
	if err == nil && recordID(kind, id) != text {
		err = store.ErrNoRecord
	}
	return id, err
}

func (s *Service) getRecord(ctx context.Context, kind, id string, into any) (seq uint64, err error) {
	if _, err := parseRecordID(kind, id); err != nil {
		return 0, noRecord(kind, id)
	}
	seq, err = s.batches.Get(ctx, kind, budget.TenantOf(ctx), id, into)
	switch {
	case errors.Is(err, store.ErrNoRecord):
		err = noRecord(kind, id)
	case errors.Is(err, store.ErrNotRecord), err == nil && idOf(into) != id:
		err = fault.Newf(fault.Internal, "%s %s cannot be read", kind, id).Caused(err)
	}
	return seq, err
}

// idOf returns the ID that a record says.
func idOf(record any) string {
	switch r := record.(type) {
	case *store.FileRecord:
		return r.ID
	case *store.BatchRecord:
		return r.ID
	}
	return ""
}

func noRecord(kind, id string) error {
	return fault.Newf(fault.NotFound, "there is no %s %.*q: it never was, is another tenant's, or has expired", kind, fault.MaxQuoted, id)
}

func (s *Service) getFile(ctx context.Context, id string) (file store.FileRecord, err error) {
	_, err = s.getRecord(ctx, store.FileRecords, id, &file)
	if err == nil && !isThere(&file) {
		err = noRecord(store.FileRecords, id)
	}
	return file, err
}

func isThere(f *store.FileRecord) bool { return !f.Deleted && time.Now().Unix() < f.ExpiresAt }

// GetFile returns a file of the caller.
func (s *Service) GetFile(ctx context.Context, id string) (*store.File, error) {
	file, err := s.getFile(ctx, id)
	return &file.File, err
}

// OpenFile returns a file and its bytes.
func (s *Service) OpenFile(ctx context.Context, id string) (*store.File, io.Reader, error) {
	file, err := s.getFile(ctx, id)
	return &file.File, s.batches.Open(ctx, file.Data, file.Bytes), err
}

// DeleteFile deletes a file. A batch that has begun with it goes on.
func (s *Service) DeleteFile(ctx context.Context, id string) error {
	_, err := editRecord(ctx, s, store.FileRecords, id, func(f *store.FileRecord) (bool, error) {
		if !isThere(f) {
			return false, noRecord(store.FileRecords, id)
		}
		f.Deleted = true
		return true, nil
	})
	return err
}

// editRecord has edit change a record of the caller, again if others have changed it meanwhile. edit
// returns false if there is nothing to store.
func editRecord[R any](ctx context.Context, s *Service, kind, id string, edit func(*R) (bool, error)) (*R, error) {
	for try := 0; ; try++ {
		out, isChanged := new(R), false
		seq, err := s.getRecord(ctx, kind, id, out)
		if err == nil {
			isChanged, err = edit(out)
		}
		if err != nil || !isChanged {
			return out, err
		}
		if _, err = s.batches.Put(ctx, kind, budget.TenantOf(ctx), id, seq, out); !errors.Is(err, store.ErrJobChanged) || try == maxChangeTries {
			return out, err
		}
	}
}

// ListFiles returns a page of the caller's files.
func (s *Service) ListFiles(ctx context.Context, o ListOptions) (*Page[store.File], error) {
	return listRecords(ctx, s, store.FileRecords, o, func(f *store.FileRecord) *store.File {
		if !isThere(f) || o.Purpose != "" && o.Purpose != f.Purpose {
			return nil
		}
		return &f.File
	})
}

// ListBatches returns a page of the caller's batches.
func (s *Service) ListBatches(ctx context.Context, o ListOptions) (*Page[store.Batch], error) {
	return listRecords(ctx, s, store.BatchRecords, o, func(b *store.BatchRecord) *store.Batch { return &b.Batch })
}

// listRecords returns a page of what view returns, nil for a record that is left out.
func listRecords[R, T any](ctx context.Context, s *Service, kind string, o ListOptions, view func(*R) *T) (*Page[T], error) {
	ids, err := s.batches.List(ctx, kind, budget.TenantOf(ctx))
	if err != nil {
		return nil, err
	}
	out := &Page[T]{Object: "list", Data: []T{}}
	if o.Ascending {
		slices.Reverse(ids)
	}
	for _, id := range ids {
		if order := cmp.Compare(id, o.After); o.After != "" && (order == 0 || order > 0 != o.Ascending) {
			continue
		}
		var record R
		_, err := s.batches.Get(ctx, kind, budget.TenantOf(ctx), id, &record)
		if errors.Is(err, store.ErrNoRecord) || errors.Is(err, store.ErrNotRecord) || err == nil && idOf(&record) != id {
			continue
		}
		if err != nil {
			return nil, err
		}
		one := view(&record)
		switch {
		case one == nil:
			continue
		case len(out.Data) == min(o.Limit, maxPage):
			out.HasMore = true
			return out, nil
		}
		out.Data, out.LastID, out.FirstID = append(out.Data, *one), id, cmp.Or(out.FirstID, id)
	}
	return out, nil
}

// Bounds of what a batch says of itself. Those of metadata are OpenAI's.
const (
	maxEndpoint      = 256
	maxMetadata      = 16
	maxMetadataKey   = 64
	maxMetadataValue = 512
)

// CreateBatch stores a batch, which is processed later.
func (s *Service) CreateBatch(ctx context.Context, in NewBatch) (*store.Batch, error) {
	window, err := time.ParseDuration(in.CompletionWindow)
	switch {
	case err != nil || window < time.Second || window > store.BatchWindow:
		return nil, fault.InField(fault.InvalidRequest, "completion_window", "%.*q; it is 24h, or as short as 1s", fault.MaxQuoted, in.CompletionWindow)
	case !strings.HasPrefix(in.Endpoint, "/") || len(in.Endpoint) > maxEndpoint:
		return nil, fault.InField(fault.InvalidRequest, "endpoint", "%.*q is not a path such as /v1/chat/completions, of at most %d bytes", fault.MaxQuoted, in.Endpoint, maxEndpoint)
	case len(in.Metadata) > maxMetadata:
		return nil, fault.InField(fault.InvalidRequest, "metadata", "%d keys; at most %d are possible", len(in.Metadata), maxMetadata)
	}
	for key, value := range in.Metadata {
		if utf8.RuneCountInString(key) > maxMetadataKey || utf8.RuneCountInString(value) > maxMetadataValue {
			return nil, fault.InField(fault.InvalidRequest, "metadata", "%.*q: a key has at most %d characters, a value %d", fault.MaxQuoted, key, maxMetadataKey, maxMetadataValue)
		}
	}
	if _, f := s.queueFor(budget.TenantOf(ctx), s.settings.Batches.Queue); f != nil {
		return nil, f
	}
	seconds, f := in.OutputExpiresAfter.seconds("output_expires_after", s.settings.Batches.Retention)
	if f != nil {
		return nil, f
	}
	file, err := s.getFile(ctx, in.InputFileID)
	if err != nil {
		return nil, err
	}
	stored, f := s.calls.ReserveStored(ctx, s.batches.Records, recordBytes)
	if f != nil {
		return nil, f
	}
	defer stored()
	id, now := uuid.Must(uuid.NewV7()), time.Now()
	out := &store.BatchRecord{
		Batch: store.Batch{
			ID: recordID(store.BatchRecords, id), Object: "batch", Endpoint: in.Endpoint, InputFileID: in.InputFileID, CompletionWindow: in.CompletionWindow, Metadata: in.Metadata,
			Status: store.BatchValidating, CreatedAt: now.Unix(), ExpiresAt: now.Add(window).Unix(),
		},
		Queue: s.settings.Batches.Queue, Input: file.Data, InputBytes: file.Bytes, FileSeconds: seconds,
	}
	_, err = s.batches.Put(ctx, store.BatchRecords, budget.TenantOf(ctx), out.ID, 0, out)
	return &out.Batch, err
}

// GetBatch returns a batch of the caller.
func (s *Service) GetBatch(ctx context.Context, id string) (*store.Batch, error) {
	var out store.BatchRecord
	_, err := s.getRecord(ctx, store.BatchRecords, id, &out)
	return &out.Batch, err
}

// CancelBatch has a batch end with what it has.
func (s *Service) CancelBatch(ctx context.Context, id string) (*store.Batch, error) {
	out, err := editRecord(ctx, s, store.BatchRecords, id, func(b *store.BatchRecord) (bool, error) {
		switch {
		case b.Status == store.BatchCancelling:
			return false, nil
		case b.Status == store.BatchFinalizing || b.Status.IsEnd():
			return false, fault.Newf(fault.InvalidRequest, "a batch with status %s cannot be cancelled", b.Status)
		}
		b.Status, b.CancellingAt = store.BatchCancelling, time.Now().Unix()
		return true, nil
	})
	return &out.Batch, err
}
