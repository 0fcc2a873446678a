package store_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

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
	m, err := store.NewResults(b, store.Settings{}).Result(r)
	if err != nil {
		t.Fatal(err)
	}
	type sent struct {
		receipt bus.Receipt
		err     error
	}
	done := make(chan sent, 1)
	b.Publish(m, func(receipt bus.Receipt, err error) { done <- sent{receipt, err} })
	got := testbed.Receive(t, "answer to a put", done)
	return got.receipt, got.err
}

func text(r *envelope.Result) string { return string(r.Reply.Parts[0].Blob.Data) }

func TestAnyProcessReadsAStoredResult(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	newResults(t, b, settings)
	want := answer(newRequest(), "yes")
	if receipt, err := put(t, b, want); err != nil || receipt.Duplicate {
		t.Fatalf("put: %+v, %v", receipt, err)
	}
	got, err := store.NewResults(broker.Connect(mesh), settings).Get(t.Context(), want.Reply.RequestID)
	if err != nil {
		t.Fatal(err)
	}
	if text(got) != "yes" || got.Tenant != want.Tenant || got.Pipeline != want.Pipeline || !got.AdmittedAt.Equal(want.AdmittedAt) || !got.FinishedAt.Equal(want.FinishedAt) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestFirstReplyWins(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	results := newResults(t, b, settings)
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
	got, err := results.Get(t.Context(), request)
	if err != nil || text(got) != first.Load() {
		t.Errorf("kept %v, %v; the first was %v", got, err, first.Load())
	}
}

func TestMissingResultIsErrNoResult(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	if _, err := store.NewResults(b, settings).Get(t.Context(), newRequest()); !errors.Is(err, store.ErrNoResult) {
		t.Errorf("without a stream: %v, want %v", err, store.ErrNoResult)
	}
	if _, err := put(t, b, answer(newRequest(), "")); !errors.Is(err, bus.ErrNoResults) {
		t.Errorf("put without a stream: %v, want %v", err, bus.ErrNoResults)
	}
	if _, err := newResults(t, b, settings).Get(t.Context(), newRequest()); !errors.Is(err, store.ErrNoResult) {
		t.Errorf("with a stream: %v, want %v", err, store.ErrNoResult)
	}
}

func TestWaitReturnsWhenTheResultIsStored(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	newResults(t, b, settings)
	reader := store.NewResults(broker.Connect(mesh), settings)
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
		r := testbed.Receive(t, "result", got)
		if text(r) != "late" {
			t.Errorf("got %+v", r)
		}
		if took := time.Since(begin); took > 4*time.Second {
			t.Errorf("received the result after %s", took)
		}
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	results := newResults(t, b, settings)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := results.Wait(ctx, newRequest()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want %v", err, context.DeadlineExceeded)
	}
}

func TestResultsSurviveTheBroker(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	results := newResults(t, b, settings)
	request := newRequest()
	if _, err := put(t, b, answer(request, "kept")); err != nil {
		t.Fatal(err)
	}
	broker.Stop()
	broker.Restore()
	testbed.Eventually(t, "the result is there again", func() bool {
		r, err := results.Get(t.Context(), request)
		return err == nil && text(r) == "kept"
	})
	if receipt, err := put(t, b, answer(request, "second")); err != nil || !receipt.Duplicate {
		t.Errorf("a second answer: %+v, %v", receipt, err)
	}
}

func TestFullResultStreamRefusesAndKeeps(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	s := settings
	s.MaxBytes = 64 << 10
	results := newResults(t, b, s)
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
		if _, err := results.Get(t.Context(), request); err != nil {
			t.Errorf("a result that was taken: %v", err)
		}
	}
	if len(kept) < 5 {
		t.Errorf("%d results of 10 KiB fit into 64 KiB", len(kept))
	}
}

func TestResultsExpire(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	s := settings
	s.Retention = time.Second
	results := newResults(t, b, s)
	request := newRequest()
	if _, err := put(t, b, answer(request, "")); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the result expires", func() bool {
		_, err := results.Get(t.Context(), request)
		return errors.Is(err, store.ErrNoResult)
	})
}

func TestUnreadableResultIsReportedOnce(t *testing.T) {
	t.Parallel()
	log := &testbed.Log{}
	b := testbed.StartBroker(t).Connect(mesh, func(s *bus.Settings) { s.Logger = slog.New(slog.NewTextHandler(log, nil)) })
	results := ensure(t, store.NewResults(b, store.Settings{}))
	if _, err := b.JetStream().Publish(t.Context(), b.Result("r"), []byte("\xff")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := results.Get(t.Context(), "r"); err == nil || errors.Is(err, store.ErrNoResult) {
			t.Errorf("got %v", err)
		}
	}
	if n := strings.Count(log.String(), "kind=result"); n != 1 {
		t.Errorf("it is reported %d times:\n%s", n, log.String())
	}
}
