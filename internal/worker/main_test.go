package worker_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// patience bounds every wait, brief is how long something is watched that must not
// happen.
const (
	patience = 30 * time.Second
	brief    = 100 * time.Millisecond
)

func TestMain(m *testing.M) {
	switch mode := os.Getenv(modeVariable); mode {
	case "":
		goleak.VerifyTestMain(m)
	case host:
		beHost()
	case noop:
		os.Exit(beNoop()) //nolint:forbidigo // this is main
	case tokens:
		os.Exit(beTokens()) //nolint:forbidigo // this is main
	case fakeModels:
		os.Exit(beFakeModels()) //nolint:forbidigo // this is main
	case rawEcho:
		os.Exit(beRawEcho()) //nolint:forbidigo // this is main
	default:
		os.Exit(be(mode)) //nolint:forbidigo // this is main
	}
}

// settings returns the settings of a runner whose workers are in the mode. Limits are short
// where tests wait for them, and long where they must not be what helps.
func settings(t testing.TB, mode string) worker.Settings {
	t.Helper()
	if mode == "" {
		mode = "plain"
	}
	return worker.Settings{
		Stage: "test", Command: []string{os.Args[0]}, MaxSize: 8,
		Env: map[string]string{
			modeVariable: mode,
			// A process with the race detector would sleep for a second at its end.
			"GORACE":     "atexit_sleep_ms=0",
			"STATE":      filepath.Join(t.TempDir(), "state"),
			"GOCOVERDIR": t.TempDir(),
		},
		Limits: worker.Limits{
			Backoff: time.Millisecond, MaxBackoff: 10 * time.Millisecond, CrashLoop: 1000,
			StartLimit: patience, StopLimit: patience, RunLimit: patience, HeartbeatLimit: patience,
			StableAfter: time.Hour,
		},
	}
}

// bed is a runner under test, and what became of its workers.
type bed struct {
	*testing.T
	*worker.Runner
	edges chan worker.Transition
	log   *record
}

// newBed returns a runner that is not started, and stops it with the test.
func newBed(t *testing.T, s worker.Settings) *bed {
	t.Helper()
	b := &bed{T: t, edges: make(chan worker.Transition, 1<<12), log: &record{}}
	s.OnTransition = func(e worker.Transition) { b.edges <- e }
	s.Logger = slog.New(slog.NewTextHandler(b.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	r, err := worker.New(s)
	if err != nil {
		t.Fatal(err)
	}
	b.Runner = r
	t.Cleanup(func() {
		b.stop()
		if t.Failed() {
			t.Log(b.log.String())
		}
	})
	return b
}

func start(t *testing.T, s worker.Settings) *bed {
	t.Helper()
	b := newBed(t, s)
	if err := b.Start(b.patient()); err != nil {
		t.Fatalf("Start: %v", err)
	}
	return b
}

func (b *bed) stop() {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.Context()), patience)
	defer cancel()
	if err := b.Stop(ctx); err != nil {
		b.Errorf("Stop: %v", err)
	}
}

// patient returns a context that ends with the test, or when it took too long.
func (b *bed) patient() context.Context {
	ctx, cancel := context.WithTimeout(b.Context(), patience)
	b.Cleanup(cancel)
	return ctx
}

// await waits for a worker to come to a state, and returns the edge.
func (b *bed) await(to worker.State) worker.Transition {
	b.Helper()
	return b.awaitEdge(func(e worker.Transition) bool { return e.To == to }, to.String())
}

func (b *bed) awaitEdge(is func(worker.Transition) bool, what string) worker.Transition {
	b.Helper()
	late := time.After(patience)
	for {
		select {
		case e := <-b.edges:
			if is(e) {
				return e
			}
		case <-late:
			b.Fatalf("no worker came to %s", what)
		}
	}
}

// pid returns the process of worker 0 that is ready.
func (b *bed) pid() int {
	b.Helper()
	e := b.await(worker.Ready)
	return e.PIDs[0]
}

func (b *bed) acquire() runner.Slot {
	b.Helper()
	slot, err := b.Acquire(b.patient())
	if err != nil {
		b.Fatalf("no slot falls idle: %v", err)
	}
	return slot
}

// do runs items as one batch on the next idle slot.
func (b *bed) do(items ...runner.Item) ([]*runner.Outcome, error) {
	b.Helper()
	return b.doOn(b.Context(), b.acquire(), items...)
}

func (b *bed) doOn(ctx context.Context, slot runner.Slot, items ...runner.Item) ([]*runner.Outcome, error) {
	b.Helper()
	s := &sink{T: b.T, outcomes: make([]*runner.Outcome, len(items)), chunks: make([][]payload.Part, len(items))}
	batch := runner.Batch{Items: items}
	for _, item := range items {
		batch.Rows += item.Rows
	}
	err := slot.Do(ctx, batch, s)
	return s.close(), err
}

// works makes sure that every slot of the runner runs batches.
func (b *bed) works() {
	b.Helper()
	for range b.Concurrency() {
		outcomes, err := b.do(item(1, 2), item(3))
		if err != nil {
			b.Errorf("the runner does not work: %v", err)
			return
		}
		b.echoes(outcomes, []int64{1, 2}, []int64{3})
	}
}

// echoes makes sure that the outcomes are the rows.
func (b *bed) echoes(outcomes []*runner.Outcome, want ...[]int64) {
	b.Helper()
	for i, o := range outcomes {
		switch got, err := rowsOf(o); {
		case err != nil:
			b.Errorf("item %d: %v", i, err)
		case fmt.Sprint(got) != fmt.Sprint(want[i]):
			b.Errorf("item %d got %d, want %d", i, got, want[i])
		}
	}
}

func rowsOf(o *runner.Outcome) ([]int64, error) {
	if o == nil {
		return nil, errors.New("it has no outcome")
	}
	if o.Fault != nil {
		return nil, o.Fault
	}
	part, ok := payload.Find(o.Parts, "y")
	if !ok || part.Tensor == nil {
		return nil, fmt.Errorf("it has no tensor y, but %d parts", len(o.Parts))
	}
	return part.Tensor.Int64Values()
}

func item(rows ...int64) runner.Item {
	return runner.Item{
		RequestID: fmt.Sprint("request", rows), Rows: len(rows),
		Inputs: []payload.Part{payload.OfTensor("x", int64s(rows...))},
	}
}

// sink keeps what items become.
type sink struct {
	*testing.T
	mu       sync.Mutex
	outcomes []*runner.Outcome
	chunks   [][]payload.Part
	refuse   bool
	closed   bool
}

func (s *sink) Chunk(i int, parts []payload.Part) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.outcomes[i] != nil {
		s.Errorf("a chunk for item %d comes too late", i)
	}
	if s.refuse {
		return runner.ErrCancelled
	}
	s.chunks[i] = append(s.chunks[i], parts...)
	return nil
}

func (s *sink) SetOutcome(i int, o runner.Outcome) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.outcomes[i] != nil {
		s.Errorf("an outcome for item %d comes too late", i)
		return runner.ErrOutcomeSet
	}
	s.outcomes[i] = &o
	return nil
}

func (s *sink) close() []*runner.Outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return s.outcomes
}

// record is a log.
type record struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (r *record) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(p)
}

func (r *record) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.String()
}

// has waits until a line of the log has all of the words.
func (b *bed) logs(words ...string) string {
	b.Helper()
	var found string
	b.eventually("a line of the log with "+strings.Join(words, ", "), func() bool {
		for line := range strings.Lines(b.log.String()) {
			all := true
			for _, w := range words {
				all = all && strings.Contains(line, w)
			}
			if all {
				found = line
				return true
			}
		}
		return false
	})
	return found
}

// eventually waits until something is so.
func (b *bed) eventually(what string, is func() bool) {
	b.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !is(); <-tick.C {
		if time.Now().After(end) {
			b.Fatalf("waited in vain for %s", what)
		}
	}
}

// beHost is a host of its own, which prints its processes.
func beHost() {
	s := worker.Settings{
		Stage: "host", Command: []string{os.Args[0]}, Env: map[string]string{modeVariable: os.Getenv("WORKERS")},
		Replicas: []worker.Replica{{}, {Ranks: 2}},
		OnTransition: func(e worker.Transition) {
			if e.To == worker.Ready {
				fmt.Fprintln(os.Stdout, "pids", e.PIDs)
			}
		},
		Logger: slog.New(slog.NewTextHandler(os.Stdout, nil)),
	}
	r, err := worker.New(s)
	if err == nil {
		err = r.Start(context.Background())
	}
	if err != nil {
		panic(err)
	}
	fmt.Fprintln(os.Stdout, "ready")
	select {}
}
