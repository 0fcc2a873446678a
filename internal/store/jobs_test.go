package store_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const queue pipeline.QueueName = "nightly"

func newJobs(t *testing.T, b *bus.Bus, q store.JobQueueSettings) *store.Jobs {
	t.Helper()
	s := ensure(t, store.NewJobs(b, store.Settings{MaxBytes: 16 << 20}))
	q.MaxBytes = 16 << 20
	if err := s.EnsureQueue(t.Context(), queue, q); err != nil {
		t.Fatal(err)
	}
	return s
}

func mustSubmit(t *testing.T, s *store.Jobs, id pipeline.JobID, tenant string) uint64 {
	t.Helper()
	job := &meshv1.QueuedJob{Job: &inferencev1.Job{Id: id.String()}}
	seq, added, err := s.Submit(t.Context(), id, tenant, store.JobHeader{Deadline: time.Now().Add(time.Hour), Priority: -1, Tokens: 7}, job)
	if err != nil || !added {
		t.Fatalf("added %t, %v", added, err)
	}
	return seq
}

func recordOf(state inferencev1.JobState) *meshv1.JobRecord {
	return &meshv1.JobRecord{Job: &inferencev1.Job{State: state}}
}

const (
	running   = inferencev1.JobState_JOB_STATE_RUNNING
	succeeded = inferencev1.JobState_JOB_STATE_SUCCEEDED
	cancelled = inferencev1.JobState_JOB_STATE_CANCELLED
)

func TestJobIsInItsQueueUntilItIsRemoved(t *testing.T) {
	t.Parallel()
	s := newJobs(t, testbed.StartBroker(t).Connect(mesh), store.JobQueueSettings{})
	id := pipeline.NewJobID(queue)
	if _, err := s.Queued(t.Context(), id, "a"); !errors.Is(err, store.ErrNoJob) {
		t.Fatalf("before: %v", err)
	}
	seq := mustSubmit(t, s, id, "a")
	got, err := s.Queued(t.Context(), id, "a")
	if err != nil || got.Seq != seq || got.ID != id || got.Tenant != "a" || got.Priority != -1 || got.Tokens != 7 || got.Job.GetJob().GetId() != id.String() || time.Since(got.AcceptedAt).Abs() > time.Minute {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := s.Queued(t.Context(), id, "b"); !errors.Is(err, store.ErrNoJob) {
		t.Errorf("another tenant: %v", err)
	}
	if _, added, err := s.Submit(t.Context(), id, "a", store.JobHeader{Deadline: time.Now()}, got.Job); added || err != nil {
		t.Errorf("again: added %t, %v", added, err)
	}
	if next, err := s.NextQueued(t.Context(), queue, "*", 0); err != nil || next.ID != id {
		t.Errorf("next: %+v, %v", next, err)
	}
	if err := s.Remove(t.Context(), id, seq); err != nil {
		t.Fatal(err)
	}
	if _, err := s.QueuedAt(t.Context(), queue, seq, 0); !errors.Is(err, store.ErrNoJob) {
		t.Errorf("after: %v", err)
	}
}

func TestFullQueueRefusesExactly(t *testing.T) {
	t.Parallel()
	s := newJobs(t, testbed.StartBroker(t).Connect(mesh), store.JobQueueSettings{MaxJobs: 10})
	var accepted, refused int
	for range 20 {
		_, added, err := s.Submit(t.Context(), pipeline.NewJobID(queue), "", store.JobHeader{Deadline: time.Now().Add(time.Hour)}, &meshv1.QueuedJob{Job: new(inferencev1.Job)})
		switch {
		case added:
			accepted++
		case errors.Is(err, bus.ErrQueueFull):
			refused++
		default:
			t.Errorf("%v", err)
		}
	}
	if accepted != 10 || refused != 10 {
		t.Errorf("accepted %d, refused %d", accepted, refused)
	}
}

func TestOneOfManyEndsAJob(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	stores := []*store.Jobs{newJobs(t, broker.Connect(mesh), store.JobQueueSettings{}), newJobs(t, broker.Connect(mesh), store.JobQueueSettings{})}
	for range 20 {
		id := pipeline.NewJobID(queue)
		after, err := stores[0].PutRecord(t.Context(), id, "", 0, recordOf(running))
		if err != nil {
			t.Fatal(err)
		}
		var wins sync.Map
		var writers sync.WaitGroup
		for i := range 8 {
			writers.Go(func() {
				switch _, err := stores[i%2].PutRecord(t.Context(), id, "", after, recordOf(succeeded)); {
				case err == nil:
					wins.Store(i, true)
				case !errors.Is(err, store.ErrJobChanged):
					t.Errorf("%v", err)
				}
			})
		}
		writers.Wait()
		count := 0
		wins.Range(func(any, any) bool { count++; return true })
		if r, err := stores[1].Record(t.Context(), id, ""); count != 1 || err != nil || r.GetJob().GetState() != succeeded {
			t.Errorf("%d ends, %+v, %v", count, r, err)
		}
	}
}

func TestEndIsAwaited(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	s := newJobs(t, b, store.JobQueueSettings{})
	id := pipeline.NewJobID(queue)
	ended := make(chan store.StoredRecord, 1)
	go func() {
		var r store.StoredRecord
		_ = s.Await(t.Context(), b.JobRecord(id, ""), func() (bool, error) {
			r, _ = s.Record(t.Context(), id, "")
			return store.IsEnd(r.GetJob().GetState()), nil
		})
		ended <- r
	}()
	after, err := s.PutRecord(t.Context(), id, "", 0, recordOf(running))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.PutRecord(t.Context(), id, "", after, recordOf(cancelled)); err != nil {
		t.Fatal(err)
	}
	if r := <-ended; r.GetJob().GetState() != cancelled {
		t.Errorf("%+v", r)
	}
}

func TestQueueIsFollowed(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	s := newJobs(t, b, store.JobQueueSettings{})
	ids := []pipeline.JobID{pipeline.NewJobID(queue), pipeline.NewJobID(queue), pipeline.NewJobID(queue)}
	mustSubmit(t, s, ids[0], "a")
	if _, err := b.JetStream().Publish(t.Context(), b.Job(ids[1], ""), []byte("no job")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	got, caughtUp, followed := make(chan store.StoredJob, 3), make(chan struct{}), make(chan error)
	go func() {
		followed <- s.Follow(ctx, queue, func(j store.StoredJob) { got <- j }, func() { close(caughtUp) })
	}()
	first := <-got
	if first.ID != ids[0] || first.Tenant != "a" || first.Tokens != 7 || first.Size == 0 {
		t.Errorf("first %+v", first)
	}
	if second := <-got; second.ID != (pipeline.JobID{Queue: queue}) || second.Seq != first.Seq+1 {
		t.Errorf("second %+v", second)
	}
	<-caughtUp
	mustSubmit(t, s, ids[2], "")
	if third := <-got; third.ID != ids[2] || third.Tenant != "" {
		t.Errorf("third %+v", third)
	}
	cancel()
	if err := <-followed; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestUnendedRecordsAreFound(t *testing.T) {
	t.Parallel()
	s := newJobs(t, testbed.StartBroker(t).Connect(mesh), store.JobQueueSettings{})
	put := func(queue pipeline.QueueName, state inferencev1.JobState) uint64 {
		seq, err := s.PutRecord(t.Context(), pipeline.NewJobID(queue), "", 0, recordOf(state))
		if err != nil {
			t.Fatal(err)
		}
		return seq
	}
	old := put(queue, running)
	put(queue, succeeded)
	put("other", running)
	want := put(queue, running)
	for from, wanted := range map[uint64][]uint64{0: {old, want}, old + 1: {want}, want + 1: nil} {
		var found []uint64
		if err := s.UnendedRecords(t.Context(), []pipeline.QueueName{queue}, from, func(seq uint64) { found = append(found, seq) }); err != nil || !slices.Equal(found, wanted) {
			t.Errorf("from %d: %v, %v, want %v", from, found, err, wanted)
		}
	}
	if r, err := s.RecordAt(t.Context(), want); err != nil || r.ID.Queue != queue {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestControlIsSetByOne(t *testing.T) {
	t.Parallel()
	s := newJobs(t, testbed.StartBroker(t).Connect(mesh), store.JobQueueSettings{})
	if value, seq, err := s.Control(t.Context(), "lease", "gpu"); value != nil || seq != 0 || err != nil {
		t.Errorf("%q %d %v", value, seq, err)
	}
	first, err := s.SetControl(t.Context(), "lease", "gpu", 0, []byte("a"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.SetControl(t.Context(), "lease", "gpu", 0, []byte("b")); !errors.Is(err, store.ErrJobChanged) {
		t.Errorf("%v", err)
	}
	if _, err := s.SetControl(t.Context(), "lease", "gpu", first, []byte("c")); err != nil {
		t.Error(err)
	}
	if value, _, err := s.Control(t.Context(), "lease", "gpu"); string(value) != "c" || err != nil {
		t.Errorf("%q %v", value, err)
	}
}

// A cluster answers so while another write of the same value is in process; the test answers in place of one.
func TestWriteWaitsForOneInProcess(t *testing.T) {
	t.Parallel()
	const inProcess, changed = `"error":{"code":400,"err_code":10164}`, `"error":{"code":400,"err_code":10071}`
	for name, test := range map[string]struct {
		answers []string
		seq     uint64
		want    error
	}{
		"the other one is stored": {[]string{inProcess, inProcess, changed}, 0, store.ErrJobChanged},
		"the other one fails":     {[]string{inProcess, `"seq":7`}, 7, nil},
		"it never ends":           {[]string{inProcess}, 0, bus.ErrInProcess},
	} {
		broker := testbed.StartBroker(t)
		b := broker.Connect(mesh)
		jobs, nc, tries := store.NewJobs(b, store.Settings{}), broker.Client(), 0
		_, err := nc.Subscribe(b.JobControl("kind", "name"), func(msg *nats.Msg) {
			answer := test.answers[min(tries, len(test.answers)-1)]
			tries++
			_ = msg.Respond(fmt.Appendf(nil, `{"stream":%q,%s}`, b.JobControlStream(), answer)) // the test fails without it
		})
		if err := errors.Join(err, nc.Flush()); err != nil {
			t.Fatal(err)
		}
		if seq, err := jobs.SetControl(t.Context(), "kind", "name", 3, nil); seq != test.seq || !errors.Is(err, test.want) {
			t.Errorf("%s: got %d, %v", name, seq, err)
		}
	}
}

func TestNumberOfALostQueueRemovesNothing(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	owner := newJobs(t, b, store.JobQueueSettings{})
	s := owner
	old, next := pipeline.NewJobID(queue), pipeline.NewJobID(queue)
	seq := mustSubmit(t, s, old, "a")
	ctx, cancel := context.WithCancel(t.Context())
	found, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- owner.Follow(ctx, queue, func(store.StoredJob) {}, func() { close(found) }) }()
	defer func() {
		cancel()
		<-ended //nolint:errcheck // its stream was created again
	}()
	testbed.Receive(t, "the owner follows the queue", found)
	if err := b.JetStream().DeleteStream(t.Context(), b.JobStream(queue)); err != nil {
		t.Fatal(err)
	}
	s = newJobs(t, b, store.JobQueueSettings{})
	if again := mustSubmit(t, s, next, "a"); again != seq {
		t.Fatalf("the number is %d, was %d", again, seq)
	}
	for _, from := range []*store.Jobs{s, owner} {
		if err := from.Remove(t.Context(), old, seq); err != nil {
			t.Error(err)
		}
		if _, err := s.Queued(t.Context(), next, "a"); err != nil {
			t.Errorf("the other job: %v", err)
		}
	}
}

// Values of a newer version have a header with a version that this one does not know.
func TestValuesOfANewerVersionStay(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	s, keys, batches := newJobs(t, b, store.JobQueueSettings{}), newKeys(t, b, settings), ensure(t, store.NewBatches(b, store.BatchSettings{}))
	id, k := pipeline.NewJobID(queue), keyOf("k")
	file := "file-" + id.UUID.String()
	subjects := []string{
		b.JobControl(store.PoolLease, "p"), b.JobControl("paused", "queues"), b.JobRecord(id, ""), b.Job(id, ""),
		b.Claim(k.Tenant, k.Pipeline, k.Key), b.BatchRecord(store.FileRecords, "", file),
	}
	for _, subject := range subjects {
		_, err := b.JetStream().PublishMsg(t.Context(), &nats.Msg{Subject: subject, Data: []byte("{}"), Header: nats.Header{"Stagemesh-Version": {"2"}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	_, err := s.Record(t.Context(), id, "")
	_, queued := s.Queued(t.Context(), id, "")
	_, key := keys.Get(t.Context(), k)
	for what, err := range map[string]error{"record": err, "job": queued, "key": key, "pauses": s.SetPaused(t.Context(), queue, true)} {
		if !errors.Is(err, bus.ErrNewer) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := batches.Get(t.Context(), store.FileRecords, "", file, &store.FileRecord{}); !errors.Is(err, store.ErrNotRecord) {
		t.Errorf("file: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 7*time.Second) // longer than a lease that nobody renews
	defer cancel()
	if store.NewLease(s, store.PoolLease, "p", "me").Acquire(ctx, slog.New(slog.DiscardHandler), s.Ensure) {
		t.Error("the lease was taken over")
	}
	for _, subject := range subjects {
		name, err := b.JetStream().StreamNameBySubject(t.Context(), subject)
		if err != nil {
			t.Fatal(err)
		}
		if msg, err := b.Last(t.Context(), name, subject); !errors.Is(err, bus.ErrNewer) {
			t.Errorf("%s was replaced: %+v, %v", subject, msg, err)
		}
	}
}
