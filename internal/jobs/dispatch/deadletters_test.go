package dispatch

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func (b *meshBed) deadLetters() []store.DeadLetter {
	b.t.Helper()
	page, err := store.NewDeadLetters(b.conn, store.Settings{}).List(b.t.Context(), store.DeadLetterQuery{})
	if err != nil || len(page.Unreadable) > 0 {
		b.t.Fatal(err, page.Unreadable)
	}
	return page.DeadLetters
}

func TestJobsThatFailForGoodAreDeadLettersAndMayBeReplayed(t *testing.T) {
	t.Parallel()
	for reason, attempts := range map[fault.Reason]int{fault.RunnerCrashed: 1, fault.QueueLost: 2} {
		b := newMesh(t, func(c *Config) {
			q := c.Queues[string(queue)]
			q.Attempts = 2
			c.Queues[string(queue)] = q
		})
		var isWell atomic.Bool
		b.start(&stub{answer: func(_ context.Context, a Attempt) Answer {
			if isWell.Load() {
				return Answer{Infer: &inferencev1.InferResponse{RequestId: a.Job.GetJob().GetId()}}
			}
			return Answer{Fault: fault.New(reason, "no")}
		}})
		id := b.submit()
		b.wantEnd(id, hasFailed, reason, uint32(attempts))
		dead := b.deadLetters()
		if len(dead) != 1 || dead[0].Queue != queue || dead[0].Job != id.String() || dead[0].Fault.Reason != reason || dead[0].Deliveries != attempts || dead[0].Mesh != "test" {
			t.Fatalf("%s: dead letters %+v", reason, dead)
		}
		isWell.Store(true)
		replayed, err := store.NewDeadLetters(b.conn, store.Settings{}).Replay(t.Context(), dead[0].Seq, nil)
		if err != nil || replayed.JobID == id.String() {
			t.Fatalf("%+v, %v", replayed, err)
		}
		again, err := pipeline.ParseJobID(replayed.JobID)
		if err != nil {
			t.Fatal(err)
		}
		b.wantEnd(again, hasSucceeded, "", 1)
		if r := b.end(again); r.GetInfer().GetRequestId() != again.String() || r.GetJob().GetDeadline().AsTime().Before(r.GetJob().GetAcceptedAt().AsTime()) {
			t.Errorf("%v", r)
		}
		if dead := b.deadLetters(); len(dead) > 0 {
			t.Errorf("dead letters %+v", dead)
		}
	}
}

func TestOnlyJobsThatFailForGoodAreDeadLetters(t *testing.T) {
	t.Parallel()
	b := newMesh(t)
	b.start(&stub{answer: func(context.Context, Attempt) Answer { return Answer{Fault: fault.New(fault.InvalidInput, "no image")} }})
	b.wantEnd(b.submit(), hasFailed, fault.InvalidInput, 1)
	if dead := b.deadLetters(); len(dead) > 0 {
		t.Errorf("dead letters %+v", dead)
	}
}

func TestForeignBytesAreADeadLetter(t *testing.T) {
	t.Parallel()
	b := newMesh(t)
	// One has no header of a job, the other only no job.
	if _, err := b.conn.JetStream().Publish(t.Context(), b.conn.Subjects.Job(pipeline.NewJobID(queue), ""), []byte("no header")); err != nil {
		t.Fatal(err)
	}
	msg := nats.NewMsg(b.conn.Subjects.Job(pipeline.NewJobID(queue), ""))
	msg.Data = []byte("\xff no job")
	msg.Header.Set("Job-Deadline", strconv.FormatInt(time.Now().Add(time.Hour).UnixNano(), 10))
	if _, err := b.conn.JetStream().PublishMsg(t.Context(), msg); err != nil {
		t.Fatal(err)
	}
	id := b.submit()
	b.start(&stub{})
	b.wantEnd(id, hasSucceeded, "", 1)
	testbed.Eventually(t, "both are dead letters", func() bool { return len(b.deadLetters()) == 2 })
	for _, dead := range b.deadLetters() {
		if text := string(dead.Item); text != "no header" && text != "\xff no job" || dead.Queue != queue || dead.Fault.Reason != fault.InvalidRequest {
			t.Errorf("%+v", dead)
		}
		if _, err := dead.ReplayableJob(); err == nil {
			t.Error("it may be replayed")
		}
	}
}

func TestReplayedJobMayHaveAnotherBody(t *testing.T) {
	t.Parallel()
	b := newMesh(t)
	var got atomic.Value
	b.start(&stub{answer: func(_ context.Context, a Attempt) Answer {
		text := string(a.Job.GetInfer().GetInputs()[0].GetBlob().GetData())
		if got.Store(text); text == "bad" {
			return Answer{Fault: fault.New(fault.RunnerCrashed, "no")}
		}
		return Answer{Infer: new(inferencev1.InferResponse)}
	}})
	id, deadline := pipeline.NewJobID(queue), time.Now().Add(time.Hour)
	job := &meshv1.QueuedJob{
		Job: &inferencev1.Job{Id: id.String(), Queue: string(queue), AcceptedAt: timestamppb.Now(), Deadline: timestamppb.New(deadline)},
		Payload: &meshv1.QueuedJob_Infer{Infer: &inferencev1.InferRequest{Inputs: []*inferencev1.Part{
			{Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{Data: []byte("bad")}}},
		}}},
	}
	if _, _, err := b.jobs.Submit(t.Context(), id, "", store.JobHeader{Deadline: deadline}, job); err != nil {
		t.Fatal(err)
	}
	b.wantEnd(id, hasFailed, fault.RunnerCrashed, 1)
	letters := store.NewDeadLetters(b.conn, store.Settings{})
	if page, err := letters.List(t.Context(), store.DeadLetterQuery{Queue: "other"}); err != nil || len(page.DeadLetters) > 0 {
		t.Errorf("another queue: %v, %v", page, err)
	}
	page, err := letters.List(t.Context(), store.DeadLetterQuery{Queue: queue})
	if err != nil || len(page.DeadLetters) != 1 {
		t.Fatal(page, err)
	}
	replayed, err := letters.Replay(t.Context(), page.DeadLetters[0].Seq, []byte("good"))
	if err != nil {
		t.Fatal(err)
	}
	again, err := pipeline.ParseJobID(replayed.JobID)
	if err != nil {
		t.Fatal(err)
	}
	b.wantEnd(again, hasSucceeded, "", 1)
	if got.Load() != "good" {
		t.Errorf("it ran with %q", got.Load())
	}
}
