package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// BatchSettings are the section jobs.batches of a mesh file. Its retention applies to files.
type BatchSettings struct {
	Settings

	// Queue takes the lines of batches; empty means that there are no batches.
	Queue pipeline.QueueName `yaml:"queue"`
}

// Bounds of batches and files.
const (
	// BatchWindow is the longest time in which a batch completes.
	BatchWindow = 24 * time.Hour

	defaultFileRetention = 30 * 24 * time.Hour
	defaultFilesMaxBytes = 2 << 30
	// BatchRecordBytes bounds the records of batches and files.
	BatchRecordBytes = 64 << 20
)

// WithDefaults returns the settings with the defaults of what is not set.
func (s BatchSettings) WithDefaults() BatchSettings {
	s.Retention, s.MaxBytes = cmp.Or(s.Retention, defaultFileRetention), cmp.Or(s.MaxBytes, defaultFilesMaxBytes)
	return s
}

// Validate checks the section; messages name the key in it.
func (s BatchSettings) Validate() error {
	err := s.Settings.Validate()
	if s.Queue == "" && s != (BatchSettings{}) {
		err = errors.Join(err, errors.New("queue: is missing; name the queue of the lines of batches"))
	}
	if retention := s.WithDefaults().Retention; retention <= BatchWindow {
		err = errors.Join(err, fmt.Errorf("retention: %s, more than the %s of a batch are needed", retention, BatchWindow))
	}
	return err
}

// File is a file as callers see it, in the form of the OpenAI API.
type File struct {
	ID        string `json:"id"`
	Object    string `json:"object"`
	Bytes     int64  `json:"bytes"`
	CreatedAt int64  `json:"created_at"`
	ExpiresAt int64  `json:"expires_at"`
	Filename  string `json:"filename"`
	Purpose   string `json:"purpose"`
	Status    string `json:"status"`
}

// FileRecord is the record of a file.
type FileRecord struct {
	File

	// Data is where its bytes are. Deleted is true if they may go.
	Data    string `json:"data"`
	Deleted bool   `json:"deleted,omitempty"`
}

// Batch is a batch as callers see it, in the form of the OpenAI API.
type Batch struct {
	ID               string            `json:"id"`
	Object           string            `json:"object"`
	Endpoint         string            `json:"endpoint"`
	Errors           *BatchErrors      `json:"errors,omitempty"`
	InputFileID      string            `json:"input_file_id"`
	CompletionWindow string            `json:"completion_window"`
	Status           BatchStatus       `json:"status"`
	OutputFileID     string            `json:"output_file_id,omitempty"`
	ErrorFileID      string            `json:"error_file_id,omitempty"`
	CreatedAt        int64             `json:"created_at"`
	InProgressAt     int64             `json:"in_progress_at,omitempty"`
	ExpiresAt        int64             `json:"expires_at"`
	FinalizingAt     int64             `json:"finalizing_at,omitempty"`
	CompletedAt      int64             `json:"completed_at,omitempty"`
	FailedAt         int64             `json:"failed_at,omitempty"`
	ExpiredAt        int64             `json:"expired_at,omitempty"`
	CancellingAt     int64             `json:"cancelling_at,omitempty"`
	CancelledAt      int64             `json:"cancelled_at,omitempty"`
	RequestCounts    BatchCounts       `json:"request_counts"`
	Metadata         map[string]string `json:"metadata,omitempty"`
}

// BatchRecord is the record of a batch, with what the process that takes it over has to know.
type BatchRecord struct {
	Batch

	// Queue takes its lines, whatever the settings say by now.
	Queue pipeline.QueueName `json:"queue"`
	// Input and InputBytes describe the input file, which may be deleted meanwhile.
	Input      string `json:"input"`
	InputBytes int64  `json:"input_bytes"`
	// FileSeconds is how long its output files last.
	FileSeconds int64 `json:"file_seconds"`
}

// BatchStatus is where a batch is in its life.
type BatchStatus string

// The states of a batch. The last four are ends.
const (
	BatchValidating BatchStatus = "validating"
	BatchInProgress BatchStatus = "in_progress"
	BatchFinalizing BatchStatus = "finalizing"
	BatchCancelling BatchStatus = "cancelling"
	BatchCompleted  BatchStatus = "completed"
	BatchFailed     BatchStatus = "failed"
	BatchExpired    BatchStatus = "expired"
	BatchCancelled  BatchStatus = "cancelled"
)

// IsEnd reports whether a batch of that state has ended.
func (s BatchStatus) IsEnd() bool {
	return s == BatchCompleted || s == BatchFailed || s == BatchExpired || s == BatchCancelled
}

// BatchCounts are the lines of a batch.
type BatchCounts struct {
	Total     int `json:"total"`
	Completed int `json:"completed"`
	Failed    int `json:"failed"`
}

// BatchErrors are why a batch has failed.
type BatchErrors struct {
	Object string       `json:"object"`
	Data   []BatchError `json:"data"`
}

// BatchError is what is wrong in a line of an input file.
type BatchError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Param   string `json:"param,omitempty"`
	Line    int    `json:"line,omitempty"`
}

// Kinds of records.
const (
	FileRecords  = "file"
	BatchRecords = "batch"
)

// Errors of Batches: there is no such batch or file, or its record cannot be read.
var (
	ErrNoRecord  = errors.New("no such record")
	ErrNotRecord = errors.New("the record cannot be read")
)

// Batches keeps the records of batches and files, as JSON, and the bytes of files.
//
//	data, size, err := batches.Write(ctx, fill)     // the bytes first
//	seq, err := batches.Put(ctx, store.FileRecords, tenant, id, 0, file)
//	reader := batches.Open(ctx, data, size)
//
// A record is one message on a subject of its own, replaced by compare-and-set. Bytes that a crash
// leaves without a record last as long as the stream's messages. Decision 0022 has why they are not
// in an object store of NATS.
type Batches struct {
	stream

	data stream
	// Records bounds the records that each tenant keeps, and Files the bytes of its files.
	Records, Files *Share
}

// NewBatches returns the store of batches. It makes no call to the broker.
func NewBatches(b *bus.Bus, s BatchSettings) *Batches {
	s = s.WithDefaults()
	out := &Batches{
		stream: newStream(b, "batches", b.BatchRecordStream(), b.BatchRecord("*", "*", "*"), s.Settings, s.Settings),
		data:   newStream(b, "files", b.FileDataStream(), b.FileData("*"), s.Settings, s.Settings),
	}
	out.config.Description, out.config.MaxBytes = "Records of batches and files", BatchRecordBytes
	out.data.config.Description, out.data.config.MaxMsgsPerSubject = "Bytes of files", -1
	// A batch may begin with a file that is about to expire.
	out.config.MaxAge, out.data.config.MaxAge = s.Retention+2*BatchWindow, s.Retention+2*BatchWindow
	out.Records, out.Files = out.newShare("jobs.batches", fault.QueueFull), out.data.newShare("jobs.batches.max_bytes", fault.QueueFull)
	return out
}

// Ensure creates the streams.
func (s *Batches) Ensure(ctx context.Context) error {
	return s.wrap(errors.Join(s.stream.Ensure(ctx), s.data.Ensure(ctx)))
}

// Get reads a record into a value, and returns its number: ErrNoRecord if there is none.
func (s *Batches) Get(ctx context.Context, kind, tenant, id string, into any) (uint64, error) {
	msg, err := s.bus.Last(ctx, s.config.Name, s.bus.BatchRecord(kind, tenant, id))
	switch {
	case errors.Is(err, bus.ErrNoQueue), err == nil && msg == nil:
		return 0, ErrNoRecord
	case errors.Is(err, bus.ErrNewer):
		return 0, s.wrap(fmt.Errorf("%w: %w", ErrNotRecord, err))
	case err != nil:
		return 0, s.wrap(err)
	}
	if err := json.Unmarshal(msg.Data, into); err != nil {
		return msg.Seq, s.unreadable(msg.Subject, msg.Seq, err)
	}
	return msg.Seq, nil
}

func (s *Batches) unreadable(subject string, seq uint64, err error) error {
	s.bus.ReportUnreadable("batch record", subject, seq, "it stays", err)
	return s.wrap(fmt.Errorf("%w: %w", ErrNotRecord, err))
}

// Put replaces the record at number after, 0 for none, and returns the new one's number:
// ErrJobChanged if the record is another one.
func (s *Batches) Put(ctx context.Context, kind, tenant, id string, after uint64, value any) (uint64, error) {
	data, err := json.Marshal(value)
	if err != nil {
		return 0, s.wrap(err)
	}
	return s.replace(ctx, bus.Message{
		Subject: s.bus.BatchRecord(kind, tenant, id), Stream: s.bus.BatchRecordStream(), Conditional: true, After: after, Data: data,
	})
}

// List returns the IDs of a tenant's records, the greatest first.
func (s *Batches) List(ctx context.Context, kind, tenant string) ([]string, error) {
	found, err := s.bus.JetStream().Stream(ctx, s.config.Name)
	if err != nil {
		return nil, s.wrap(err)
	}
	info, err := found.Info(ctx, jetstream.WithSubjectFilter(s.bus.BatchRecord(kind, tenant, "*")))
	if err != nil {
		return nil, s.wrap(err)
	}
	var out []string
	for subject := range info.State.Subjects {
		_, _, id := s.bus.BatchRecordOf(subject)
		out = append(out, id)
	}
	slices.Sort(out)
	slices.Reverse(out)
	return out, nil
}

// Follow passes all records of files and batches, their numbers and their tenants, and then each
// change, until the context ends. caughtUp is called once, after those that were there. Those that
// cannot be read, and of which something might be deleted that is another's, are left out.
func (s *Batches) Follow(ctx context.Context, file func(uint64, FileRecord), batch func(uint64, string, BatchRecord), caughtUp func()) error {
	return s.follow(ctx, s.config.Name, jetstream.OrderedConsumerConfig{}, caughtUp, func(msg jetstream.Msg, at *jetstream.MsgMetadata) {
		kind, tenant, id := s.bus.BatchRecordOf(msg.Subject())
		var f FileRecord
		var b BatchRecord
		isNewer := bus.CheckVersion(msg.Headers()) != nil
		switch seq := at.Sequence.Stream; {
		case !isNewer && kind == FileRecords && json.Unmarshal(msg.Data(), &f) == nil && f.ID == id && uuid.Validate(f.Data) == nil:
			file(seq, f)
		case !isNewer && kind == BatchRecords && json.Unmarshal(msg.Data(), &b) == nil && b.ID == id:
			batch(seq, tenant, b)
		default:
			_ = s.unreadable(msg.Subject(), seq, ErrNotRecord)
		}
	})
}

const (
	// chunkBytes is how much of a file is one message, or half of what the broker allows.
	chunkBytes = 512 << 10
	// purgeTimeout bounds the purge of a file that could not be written.
	purgeTimeout = 5 * time.Second
)

// Write stores what fill writes for a tenant, and returns where it is and how many bytes. reserve,
// unless it is nil, may reject each message, by its bytes. After an error nothing is stored. What is in
// memory grows as bytes arrive, and counts against the owner of the context.
func (s *Batches) Write(ctx context.Context, tenant string, reserve func(int64) (func(), *fault.Fault), fill func(io.Writer) error) (data string, size int64, err error) {
	to := &fileWriter{data: uuid.NewString(), tenant: tenant, limit: max(min(chunkBytes, s.bus.MaxPayload()/2), 1), reserve: reserve, ctx: ctx, store: s} //nolint:mnd // room for headers
	if err = fill(to); err == nil {
		err = to.flush()
	}
	if err != nil {
		purge, cancel := context.WithTimeout(context.WithoutCancel(ctx), purgeTimeout)
		defer cancel()
		_ = s.Purge(purge, to.data) // else they go with the stream's age
	}
	return to.data, to.size, err
}

// fileWriter stores what is written in messages of limit bytes.
type fileWriter struct {
	data, tenant string
	size         int64
	limit        int
	buf          []byte
	reserve      func(int64) (stored func(), f *fault.Fault)
	ctx          context.Context //nolint:containedctx // it lives as long as Write
	store        *Batches
}

// writeFactor is how often buffered bytes are in memory: here, on their way to the broker, and as garbage.
const writeFactor = 3

// Write implements io.Writer.
func (w *fileWriter) Write(from []byte) (n int, err error) {
	for n < len(from) && err == nil {
		part := from[n:min(len(from), n+w.limit-len(w.buf))]
		if need := len(w.buf) + len(part); need > cap(w.buf) {
			size := min(max(2*cap(w.buf), need), w.limit)
			if err := budget.FromContext(w.ctx).Reserve(writeFactor * int64(size-cap(w.buf))); err != nil {
				return n, err
			}
			w.buf = append(make([]byte, 0, size), w.buf...)
		}
		w.buf, n = append(w.buf, part...), n+len(part)
		if len(w.buf) == w.limit {
			err = w.flush()
		}
	}
	return n, err
}

func (w *fileWriter) flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	if w.reserve != nil {
		stored, f := w.reserve(int64(len(w.buf)))
		if f != nil {
			return f
		}
		defer stored()
	}
	_, err := w.store.bus.PublishAndWait(w.ctx, bus.Message{
		Subject: w.store.bus.FileData(w.data), Stream: w.store.bus.FileDataStream(), Header: bus.TenantHeader(w.tenant), Data: w.buf,
	})
	w.size += int64(len(w.buf))
	w.buf = w.buf[:0]
	return w.store.wrap(err)
}

// Open returns a reader of bytes that were written. They may be read slowly. Of them one message at
// a time counts against the owner of the context.
func (s *Batches) Open(ctx context.Context, data string, size int64) io.Reader {
	return s.OpenAt(ctx, data, size, 0, new(FileIndex))
}

// FileIndex has where the messages of a file begin, as far as it was read. It belongs to one reader at a time.
type FileIndex struct {
	offsets []int64
	seqs    []uint64
}

// OpenAt is Open from an offset on that is not beyond what was read with the index.
func (s *Batches) OpenAt(ctx context.Context, data string, size, offset int64, index *FileIndex) io.Reader {
	var rest []byte
	from, seq, subject, release := int64(0), uint64(0), s.bus.FileData(data), func() {}
	if i := sort.Search(len(index.offsets), func(i int) bool { return index.offsets[i] > offset }) - 1; i >= 0 {
		from, seq = index.offsets[i], index.seqs[i]-1
	}
	return readerFunc(func(buf []byte) (int, error) {
		for len(rest) == 0 {
			if from == size {
				return 0, io.EOF
			}
			release() // the message before
			var scope context.Context
			scope, release = budget.WithScope(ctx)
			msg, err := s.bus.Next(scope, s.data.config.Name, subject, seq+1)
			if err != nil {
				return 0, s.wrap(err)
			}
			if msg == nil {
				return 0, ErrNoRecord
			}
			if n := len(index.offsets); n == 0 || index.offsets[n-1] < from {
				index.offsets, index.seqs = append(index.offsets, from), append(index.seqs, msg.Seq)
			}
			seq, rest = msg.Seq, msg.Data[min(max(offset-from, 0), int64(len(msg.Data))):]
			from += int64(len(msg.Data))
		}
		n := copy(buf, rest)
		rest = rest[n:]
		return n, nil
	})
}

type readerFunc func([]byte) (int, error)

// Read implements io.Reader.
func (f readerFunc) Read(buf []byte) (int, error) { return f(buf) }

// Purge deletes bytes that were written.
func (s *Batches) Purge(ctx context.Context, data string) error {
	found, err := s.bus.JetStream().Stream(ctx, s.data.config.Name)
	if err == nil {
		err = found.Purge(ctx, jetstream.WithPurgeSubject(s.bus.FileData(data)))
	}
	return s.wrap(err)
}

// Remove purges the bytes of a file, and deletes its record at a number.
func (s *Batches) Remove(ctx context.Context, data string, seq uint64) error {
	if err := s.Purge(ctx, data); err != nil {
		return err
	}
	_, err := s.bus.Delete(ctx, s.config.Name, seq)
	return s.wrap(err)
}
