package jobs

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// ofBatches returns a service that has files and batches, and does nothing else.
func ofBatches(t *testing.T) *Service {
	t.Helper()
	b := testbed.StartBroker(t).Connect("m")
	settings := store.BatchSettings{Queue: "q", Settings: store.Settings{MaxBytes: 16 << 20}}.WithDefaults()
	calls, err := call.New(call.Settings{Gateway: "g", Meter: noop.Meter{}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	s := &Service{calls: calls, batches: store.NewBatches(b, settings), settings: Settings{Batches: settings, Logger: slog.New(slog.DiscardHandler)}}
	s.metrics.ended, s.metrics.lines = noop.Int64Counter{}, noop.Int64Counter{}
	if err := s.batches.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

// wantFile checks the bytes of a file.
func (s *Service) wantFile(ctx context.Context, t *testing.T, id, want string) {
	t.Helper()
	_, from, err := s.OpenFile(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(from); string(got) != want {
		t.Errorf("the file has %q, %v, not %q", got, err, want)
	}
}

func TestUploadOfACallerWhoHangsUpIsWhole(t *testing.T) {
	t.Parallel()
	s := ofBatches(t)
	ctx, hangUp := context.WithCancel(budget.WithTenant(t.Context(), "a"))
	file, err := s.CreateFile(ctx, strings.NewReader("content"), func() (FileOptions, error) {
		hangUp()
		return FileOptions{Purpose: purposeBatch}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	s.wantFile(budget.WithTenant(t.Context(), "a"), t, file.ID, "content")
}

// A record whose answer was lost may be stored, so its bytes stay; the next try's bytes go.
func TestOutputIsKeptThroughLostAnswers(t *testing.T) {
	t.Parallel()
	s, id := ofBatches(t), uuid.Must(uuid.NewV7())
	ctx := budget.WithTenant(t.Context(), "a")
	write := func(content string) *store.FileRecord {
		data, size, err := s.batches.Write(ctx, "", nil, func(to io.Writer) error {
			_, err := io.WriteString(to, content)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		file := newFile(id, "output.jsonl", purposeOutput, size, 3600)
		file.Data = data
		return file
	}
	first, second := write("first"), write("second")
	lost, cancel := context.WithCancel(ctx)
	cancel()
	if err := s.putFile(lost, "a", first); err == nil {
		t.Fatal("an answer came although nobody waited for it")
	}
	for _, file := range []*store.FileRecord{first, first, second} {
		if err := s.putFile(ctx, "a", file); err != nil {
			t.Fatal(err)
		}
		s.wantFile(ctx, t, first.ID, "first")
	}
	if _, err := io.ReadAll(s.batches.Open(ctx, second.Data, second.Bytes)); err == nil {
		t.Error("bytes that no record has are there")
	}
}

func TestBatchExpiresBeforeItIsValidated(t *testing.T) {
	t.Parallel()
	s := ofBatches(t)
	ctx := budget.WithTenant(t.Context(), "a")
	r := &batchRunner{Service: s, validating: places(1), writing: places(1)}
	if err := r.validating.Acquire(ctx, "b", 1); err != nil {
		t.Fatal(err)
	}
	id := uuid.Must(uuid.NewV7())
	record := store.BatchRecord{Batch: store.Batch{ID: recordID(store.BatchRecords, id), Status: store.BatchValidating, ExpiresAt: time.Now().Unix() + 1}}
	seq, err := s.batches.Put(ctx, store.BatchRecords, "a", record.ID, 0, record)
	if err != nil {
		t.Fatal(err)
	}
	lines, stop := context.WithCancel(ctx)
	stop()
	b := &batchRun{batchRunner: r, id: id, tenant: "a", log: s.settings.Logger, stop: stop, allEnded: make(chan struct{})}
	b.set(record, seq)
	b.run(ctx, lines)
	if got := b.get(); got.Status != store.BatchExpired || got.ExpiredAt == 0 {
		t.Errorf("the batch is %+v", got)
	}
}

func TestBatchWithoutItsInputFails(t *testing.T) {
	t.Parallel()
	s := ofBatches(t)
	ctx := budget.WithTenant(t.Context(), "a")
	id := uuid.Must(uuid.NewV7())
	record := store.BatchRecord{
		Batch: store.Batch{ID: recordID(store.BatchRecords, id), Status: store.BatchInProgress, ExpiresAt: time.Now().Unix() + 3600, RequestCounts: store.BatchCounts{Total: 1}},
		Input: "gone", InputBytes: 9,
	}
	seq, err := s.batches.Put(ctx, store.BatchRecords, "a", record.ID, 0, record)
	if err != nil {
		t.Fatal(err)
	}
	r := &batchRunner{Service: s, expanding: places(1), writing: places(1)}
	b := &batchRun{batchRunner: r, id: id, tenant: "a", log: s.settings.Logger, ended: make([]bool, 1), allEnded: make(chan struct{})}
	if b.set(record, seq); b.isInputGone(time.Now()) {
		t.Error("a broker may lag behind")
	}
	b.noInputSince = time.Now().Add(-inputWait)
	b.run(ctx, ctx)
	if got := b.get(); got.Status != store.BatchFailed || got.FailedAt == 0 || got.Errors.Data[0].Code != "input_file_not_found" {
		t.Errorf("the batch is %+v", got)
	}
}

// A file that cannot be read further may end with half a line.
func TestHalfALineIsNoRequest(t *testing.T) {
	t.Parallel()
	var lines []string
	err := eachRequest(io.MultiReader(strings.NewReader("{}\n{\"custom_id\":"), iotest.ErrReader(io.ErrUnexpectedEOF)), linePlace{}, func(_ linePlace, text []byte) error {
		lines = append(lines, string(text))
		return nil
	})
	if !errors.Is(err, io.ErrUnexpectedEOF) || len(lines) > 1 || len(lines) == 1 && lines[0] != "{}" {
		t.Errorf("got %q, %v", lines, err)
	}
}

func TestErrorOfALineHasItsPlace(t *testing.T) {
	t.Parallel()
	c := &batchCheck{seen: map[[16]byte]struct{}{}}
	c.check(1, []byte(`{"custom_id": "a", "body": {"messages": [{"content": "a", "temperature": NaN}]}}`))
	if len(c.errs) != 1 || c.errs[0].Message != "The line is not valid JSON at byte 73: invalid character 'N' at start of value." {
		t.Errorf("got %+v", c.errs)
	}
}
