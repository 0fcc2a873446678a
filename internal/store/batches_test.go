package store_test

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func newBatches(t *testing.T, maxBytes int64) (*store.Batches, *bus.Bus) {
	t.Helper()
	b := testbed.StartBroker(t).Connect(mesh)
	s := store.NewBatches(b, store.BatchSettings{Settings: store.Settings{MaxBytes: maxBytes}})
	if err := s.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s, b
}

func copyOf(from io.Reader) func(io.Writer) error {
	return func(to io.Writer) error {
		_, err := io.Copy(to, from)
		return err
	}
}

func TestFileIsReadAsWritten(t *testing.T) {
	t.Parallel()
	s, _ := newBatches(t, 16<<20)
	for _, size := range []int{0, 1, 512 << 10, 512<<10 + 1, 3 << 20} {
		content := make([]byte, size)
		for i := range content {
			content[i] = byte(i % 251)
		}
		data, n, err := s.Write(t.Context(), "", nil, copyOf(iotest.HalfReader(bytes.NewReader(content))))
		if err != nil || n != int64(size) {
			t.Fatalf("%d bytes: %d, %v", size, n, err)
		}
		got, err := io.ReadAll(s.Open(t.Context(), data, n))
		if err != nil || !bytes.Equal(got, content) {
			t.Errorf("%d bytes: got %d, %v", size, len(got), err)
		}
		if err := s.Purge(t.Context(), data); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(s.Open(t.Context(), data, n)); size > 0 && !errors.Is(err, store.ErrNoRecord) {
			t.Errorf("a file that was purged: %v", err)
		}
	}
}

func TestFailedWriteLeavesNothing(t *testing.T) {
	t.Parallel()
	s, b := newBatches(t, 1<<20)
	broken := errors.New("the reader is broken")
	for want, from := range map[error]io.Reader{
		broken:           io.MultiReader(bytes.NewReader(make([]byte, 300<<10)), iotest.ErrReader(broken)),
		bus.ErrQueueFull: bytes.NewReader(make([]byte, 2<<20)),
	} {
		if _, _, err := s.Write(t.Context(), "", nil, copyOf(from)); !errors.Is(err, want) {
			t.Errorf("got %v, want %v", err, want)
		}
	}
	left, err := b.JetStream().Stream(t.Context(), b.FileDataStream())
	if err != nil {
		t.Fatal(err)
	}
	if messages := left.CachedInfo().State.Msgs; messages > 0 {
		t.Errorf("%d messages are left", messages)
	}
}

func TestRecordsAreListedNewestFirst(t *testing.T) {
	t.Parallel()
	s, _ := newBatches(t, 1<<20)
	var ids []string
	for range 3 {
		id := uuid.Must(uuid.NewV7()).String()
		ids = append(ids, id)
		seq, err := s.Put(t.Context(), store.BatchRecords, "a", id, 0, store.Batch{Endpoint: "/v1"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Put(t.Context(), store.BatchRecords, "a", id, 0, store.Batch{}); !errors.Is(err, store.ErrJobChanged) {
			t.Errorf("another one as new: %v", err)
		}
		var got store.Batch
		if now, err := s.Get(t.Context(), store.BatchRecords, "a", id, &got); err != nil || now != seq || got.Endpoint != "/v1" {
			t.Errorf("%+v, %d, %v", got, now, err)
		}
	}
	slices.Reverse(ids)
	if got, err := s.List(t.Context(), store.BatchRecords, "a"); err != nil || !slices.Equal(got, ids) {
		t.Errorf("%v, %v", got, err)
	}
	for _, other := range [][2]string{{store.BatchRecords, "b"}, {store.FileRecords, "a"}, {store.BatchRecords, ""}} {
		if got, err := s.List(t.Context(), other[0], other[1]); err != nil || len(got) > 0 {
			t.Errorf("%v: %v, %v", other, got, err)
		}
		if _, err := s.Get(t.Context(), other[0], other[1], ids[0], new(store.Batch)); !errors.Is(err, store.ErrNoRecord) {
			t.Errorf("%v: %v", other, err)
		}
	}
}

func TestFileIsReadOnFromAnyPlace(t *testing.T) {
	t.Parallel()
	s, _ := newBatches(t, 16<<20)
	content := make([]byte, 1<<20+7)
	for i := range content {
		content[i] = byte(i % 251)
	}
	data, size, err := s.Write(t.Context(), "", nil, copyOf(bytes.NewReader(content)))
	if err != nil {
		t.Fatal(err)
	}
	index := new(store.FileIndex)
	if _, err := io.ReadAll(s.OpenAt(t.Context(), data, size, 0, index)); err != nil {
		t.Fatal(err)
	}
	for _, offset := range []int64{0, 1, 512<<10 - 1, 512 << 10, 512<<10 + 1, 1 << 20, size - 1, size} {
		got, err := io.ReadAll(s.OpenAt(t.Context(), data, size, offset, index))
		if err != nil || !bytes.Equal(got, content[offset:]) {
			t.Errorf("from %d: %d bytes, %v", offset, len(got), err)
		}
	}
}
