package result_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/result"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const mesh pipeline.MeshName = "test"

var settings = result.Settings{Retention: time.Hour, MaxBytes: 64 << 20, Version: 1}

func ensured(t *testing.T, b *bus.Bus, s result.Settings) *result.Store {
	t.Helper()
	store := result.New(b, s)
	if err := store.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	return store
}

func newRequest() pipeline.RequestID { return pipeline.RequestID(uuid.NewString()) }

func answer(request pipeline.RequestID, text string) *envelope.Result {
	now := time.Now().UTC()
	return &envelope.Result{
		Reply: &envelope.Reply{
			Mesh: mesh, RequestID: request, ExecutionID: pipeline.ExecutionID(uuid.NewString()), Seq: 1,
			Parts: []payload.Part{payload.OfBlob("x", "text/plain", []byte(text))},
		},
		Tenant: "tenant", Pipeline: "pipeline", AdmittedAt: now.Add(-time.Second), FinishedAt: now,
	}
}

func put(t *testing.T, b *bus.Bus, r *envelope.Result) (bus.Receipt, error) {
	t.Helper()
	m, err := b.Result(r)
	if err != nil {
		t.Fatal(err)
	}
	type sent struct {
		receipt bus.Receipt
		err     error
	}
	done := make(chan sent, 1)
	b.Send(m, func(receipt bus.Receipt, err error) { done <- sent{receipt, err} })
	got := bustest.Receive(t, "answer to a put", done)
	return got.receipt, got.err
}

func text(r *envelope.Result) string { return string(r.Reply.Parts[0].Blob.Data) }

func TestStoredResultIsReturnedByAnyStore(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	b := broker.Connect(mesh)
	ensured(t, b, settings)
	want := answer(newRequest(), "yes")
	if receipt, err := put(t, b, want); err != nil || receipt.Duplicate {
		t.Fatalf("put: %+v, %v", receipt, err)
	}
	got, err := result.New(broker.Connect(mesh), settings).Get(t.Context(), want.Reply.RequestID)
	if err != nil {
		t.Fatal(err)
	}
	if text(got) != "yes" || got.Tenant != want.Tenant || got.Pipeline != want.Pipeline || !got.AdmittedAt.Equal(want.AdmittedAt) || !got.FinishedAt.Equal(want.FinishedAt) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestOnlyTheFirstAnswerIsKept(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	b := broker.Connect(mesh)
	store := ensured(t, b, settings)
	request := newRequest()
	const writers = 16
	var first atomic.Value
	var duplicates atomic.Int64
	var puts sync.WaitGroup
	for i := range writers {
		puts.Go(func() {
			text := strings.Repeat("x", i+1)
			receipt, err := put(t, b, answer(request, text))
			switch {
			case err != nil:
				t.Error(err)
			case receipt.Duplicate:
				duplicates.Add(1)
			default:
				first.Store(text)
			}
		})
	}
	puts.Wait()
	if n := duplicates.Load(); n != writers-1 {
		t.Errorf("%d of %d answers were not the first", n, writers)
	}
	got, err := store.Get(t.Context(), request)
	if err != nil || text(got) != first.Load() {
		t.Errorf("kept %v, %v; the first was %v", got, err, first.Load())
	}
}

func TestRequestWithoutAResultSaysSo(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Connect(mesh)
	if _, err := result.New(b, settings).Get(t.Context(), newRequest()); !errors.Is(err, result.ErrNone) {
		t.Errorf("without a stream: %v, want %v", err, result.ErrNone)
	}
	if _, err := put(t, b, answer(newRequest(), "")); !errors.Is(err, bus.ErrNoResults) {
		t.Errorf("put without a stream: %v, want %v", err, bus.ErrNoResults)
	}
	if _, err := ensured(t, b, settings).Get(t.Context(), newRequest()); !errors.Is(err, result.ErrNone) {
		t.Errorf("with a stream: %v, want %v", err, result.ErrNone)
	}
}

func TestWaitReturnsWhenTheResultIsStored(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	b := broker.Connect(mesh)
	ensured(t, b, settings)
	reader := result.New(broker.Connect(mesh), settings)
	for range 50 {
		request := newRequest()
		got := make(chan *envelope.Result, 1)
		go func() {
			r, err := reader.Wait(t.Context(), request)
			if err != nil {
				t.Error(err)
			}
			got <- r
		}()
		begin := time.Now()
		if _, err := put(t, b, answer(request, "late")); err != nil {
			t.Fatal(err)
		}
		r := bustest.Receive(t, "result", got)
		if text(r) != "late" {
			t.Errorf("got %+v", r)
		}
		if took := time.Since(begin); took > 4*time.Second {
			t.Errorf("heard of the result after %s", took)
		}
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Connect(mesh)
	store := ensured(t, b, settings)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := store.Wait(ctx, newRequest()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want %v", err, context.DeadlineExceeded)
	}
}

func TestResultsSurviveTheBroker(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	b := broker.Connect(mesh)
	store := ensured(t, b, settings)
	request := newRequest()
	if _, err := put(t, b, answer(request, "kept")); err != nil {
		t.Fatal(err)
	}
	broker.Stop()
	broker.Restore()
	bustest.Eventually(t, "the result is there again", func() bool {
		r, err := store.Get(t.Context(), request)
		return err == nil && text(r) == "kept"
	})
	if receipt, err := put(t, b, answer(request, "second")); err != nil || !receipt.Duplicate {
		t.Errorf("a second answer: %+v, %v", receipt, err)
	}
}

func TestFullStreamRefusesAndKeeps(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Connect(mesh)
	s := settings
	s.MaxBytes = 64 << 10
	store := ensured(t, b, s)
	var kept []pipeline.RequestID
	for {
		request := newRequest()
		_, err := put(t, b, answer(request, strings.Repeat("x", 10<<10)))
		if errors.Is(err, bus.ErrQueueFull) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		kept = append(kept, request)
	}
	for _, request := range kept {
		if _, err := store.Get(t.Context(), request); err != nil {
			t.Errorf("a result that was taken: %v", err)
		}
	}
	if len(kept) < 5 {
		t.Errorf("%d results of 10 KiB fit into 64 KiB", len(kept))
	}
}

func TestResultsExpire(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Connect(mesh)
	s := settings
	s.Retention = time.Second
	store := ensured(t, b, s)
	request := newRequest()
	if _, err := put(t, b, answer(request, "")); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the result expires", func() bool {
		_, err := store.Get(t.Context(), request)
		return errors.Is(err, result.ErrNone)
	})
}

func TestOnlyAHigherVersionChangesTheStream(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Connect(mesh)
	ensured(t, b, settings)
	retention := func() time.Duration {
		stream, err := b.JetStream().Stream(t.Context(), b.ResultStream())
		if err != nil {
			t.Fatal(err)
		}
		return stream.CachedInfo().Config.MaxAge
	}
	same := settings
	same.Retention = 2 * time.Hour
	ensured(t, b, same)
	if got := retention(); got != time.Hour {
		t.Errorf("the same version changed the retention to %s", got)
	}
	same.Version++
	ensured(t, b, same)
	if got := retention(); got != 2*time.Hour {
		t.Errorf("retention %s after a higher version, want 2h", got)
	}
}
