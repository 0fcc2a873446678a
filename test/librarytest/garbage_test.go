package librarytest

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// random returns bytes that no parser expects.
func random(n int) []byte {
	out := make([]byte, n)
	_, _ = rand.Read(out)
	return append([]byte{0xff, 0}, out...)
}

// Whatever is on any subject where a process stores a value: what can be made again is replaced, what
// cannot stays and is INTERNAL, and everything else goes on, also after a restart.
func TestUnreadableValuesStopNobodyElse(t *testing.T) {
	t.Parallel()
	record, err := proto.Marshal(&meshv1.JobRecord{Job: &inferencev1.Job{Id: strings.Repeat("x", 100), State: inferencev1.JobState_JOB_STATE_RUNNING}})
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{
		"random":             random(200),
		"empty":              {},
		"truncated protobuf": record[:len(record)/2],
		"truncated JSON":     []byte(`{"owner": "x", "nightly": {"Pool"`),
		"another JSON":       []byte(`["owner", 7]`),
		"null":               []byte("null"),
		"wrong types":        []byte(`{"owner": 7, "nightly": "main", "id": [], "status": {}, "q": 1}`),
		"other content":      []byte(`{"id": "x", "data": "*", "nightly": {"Pool": ""}}`),
		"huge":               bytes.Repeat([]byte("[{"), 400<<10),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			checkUnreadable(t, data)
		})
	}
}

func checkUnreadable(t *testing.T, data []byte) {
	t.Helper()
	broker := testbed.StartBroker(t)
	b := startBatchesOf(t, "nightly", `url: "`+broker.URL()+`"`, "{pipelines: [p]}")
	names, jobs := bus.SubjectsOf("m"), store.NewJobs(broker.Connect("m"), store.Settings{})
	js, err := jetstream.New(broker.Client())
	if err != nil {
		t.Fatal(err)
	}
	// One of each kind.
	keyed := func(key string) *request.Request {
		return &request.Request{Pipeline: "p", Durability: pipeline.File, IdempotencyKey: key, Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("x"))}}
	}
	answer, err := b.Infer(t.Context(), keyed("taken"))
	if err != nil {
		t.Fatal(err)
	}
	file, _, _ := b.upload(lineOf("a", `{"model": "p"}`)+"\n", "purpose", "batch")
	batch := b.create("24h", lineOf("a", `{"model": "p"}`)+"\n")
	b.await(batch, "completed")
	ended := b.job("x")
	if err := jobs.SetPaused(t.Context(), "nightly", true); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the queue is paused", func() bool {
		_, text := jobCall(t, b.Mesh, http.MethodGet, "/v1/jobs/"+b.submit("x")+"/explain", "")
		return strings.Contains(text, "paused")
	})
	waits := b.submit("x")
	id := func(text string) pipeline.JobID {
		out, err := pipeline.ParseJobID(text)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	fresh := uuid.Must(uuid.NewV7())
	stay := []string{
		names.JobRecord(id(waits), ""), names.JobRecord(id(ended), ""), names.JobRecord(pipeline.NewJobID("nightly"), ""), names.Claim("", "p", "taken"), names.Claim("", "p", "other"),
		names.Result(pipeline.RequestID(uuid.NewString())), names.BatchRecord(store.BatchRecords, "", batch), names.BatchRecord(store.FileRecords, "", file.ID),
		names.BatchRecord(store.BatchRecords, "", "batch_"+hex.EncodeToString(fresh[:])), names.BatchRecord(store.FileRecords, "", "file-"+hex.EncodeToString(fresh[:])),
	}
	control := []string{
		names.JobControl(store.PoolLease, "main"), names.JobControl(store.BatchLease, "all"), names.JobControl("quota", "main"), names.JobControl("paused", "queues"), names.JobControl("queues", "all"),
	}
	others := []string{
		names.Result(pipeline.RequestID(answer.RequestID)), // the stream keeps the first one, and this one after it
		names.RunRecordSubject("e", 0), "m.dead.echo", "m.dead.queue:nightly", names.FileData(uuid.NewString()), names.Job(pipeline.NewJobID("nightly"), ""), "m.job.nightly._.no-uuid",
		names.JobChunks(id(ended), ""), "m.table.pipelines.other", "m.table.models.x.y", "m.table.hosts.x", "m.table.x", "m.instances.s.i",
	}
	for _, subject := range append(append(stay[:len(stay):len(stay)], control...), others...) {
		if _, err := js.Publish(t.Context(), subject, data); err != nil && !strings.Contains(err.Error(), "no response") {
			t.Fatalf("%s: %v", subject, err)
		}
	}
	if err := jobs.SetPaused(t.Context(), "nightly", false); err != nil {
		t.Error(err)
	}
	for isRestarted := false; ; isRestarted = true {
		for _, r := range []*request.Request{{Pipeline: "p", Inputs: keyed("").Inputs}, keyed(""), keyed(uuid.NewString())} {
			if _, err := b.Infer(t.Context(), r); err != nil {
				t.Errorf("a request, key %q: %v", r.IdempotencyKey, err)
			}
		}
		b.job("x")
		b.await(b.create("24h", lineOf("a", `{"model": "p"}`)+"\n"), "completed")
		for _, key := range []string{"taken", "other"} {
			if _, err := b.Infer(t.Context(), keyed(key)); fault.From(err).Reason != fault.Internal {
				t.Errorf("the key %s: %v", key, err)
			}
		}
		for _, path := range []string{"/v1/jobs/" + waits, "/v1/jobs/" + ended, "/v1/files/" + file.ID, "/v1/files/" + file.ID + "/content", "/v1/batches/" + batch} {
			if got, text := jobCall(t, b.Mesh, http.MethodGet, path, ""); got.StatusCode != http.StatusInternalServerError || strings.Contains(text, "BROKER_UNAVAILABLE") {
				t.Errorf("%s: %d %s", path, got.StatusCode, text)
			}
		}
		for _, path := range []string{"/v1/files", "/v1/batches", "/v1/queues/nightly/jobs"} {
			if got, text := jobCall(t, b.Mesh, http.MethodGet, path, ""); got.StatusCode != http.StatusOK {
				t.Errorf("%s: %d %s", path, got.StatusCode, text)
			}
		}
		testbed.Eventually(t, "the queue is empty", func() bool {
			waiting, _, err := jobs.Backlog(t.Context(), "nightly")
			return err == nil && waiting == 0
		})
		if isRestarted {
			break
		}
		meshtest.Stop(t, b.Mesh)
		b = startBatchesOf(t, "nightly", `url: "`+broker.URL()+`"`, "{pipelines: [p]}")
	}
	last := func(subject string) []byte {
		name, err := js.StreamNameBySubject(t.Context(), subject)
		if err != nil {
			t.Fatal(err)
		}
		s, err := js.Stream(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		msg, err := s.GetLastMsgForSubject(t.Context(), subject)
		if err != nil {
			t.Fatalf("%s: %v", subject, err)
		}
		return msg.Data
	}
	for _, subject := range stay {
		if !bytes.Equal(last(subject), data) {
			t.Errorf("%s was replaced", subject)
		}
	}
	for _, subject := range control {
		if kind := strings.Split(subject, ".")[2]; kind != "quota" && bytes.Equal(last(subject), data) { // without limits nobody has one
			t.Errorf("%s is still unreadable", subject)
		}
	}
	if n := b.meter.Of("stagemesh.unreadable.values kind=batch record"); n == 0 {
		t.Error("nothing was counted")
	}
}

// submit submits a job, and returns its ID.
func (b *batchBed) submit(body string) string {
	b.t.Helper()
	answer, text := jobCall(b.t, b.Mesh, http.MethodPost, "/v1/queues/nightly/jobs?pipeline=p", body)
	if answer.StatusCode != http.StatusAccepted {
		b.t.Fatalf("%d %s", answer.StatusCode, text)
	}
	return strings.TrimPrefix(answer.Header.Get("Location"), "/v1/jobs/")
}

// job has a job run, and returns its ID.
func (b *batchBed) job(body string) string {
	b.t.Helper()
	id := b.submit(body)
	testbed.Eventually(b.t, "the job has its result", func() bool {
		answer, _ := jobCall(b.t, b.Mesh, http.MethodGet, fmt.Sprintf("/v1/jobs/%s/result?wait=%s", id, time.Second), "")
		return answer.StatusCode == http.StatusOK
	})
	return id
}

// An answer that can have no content is no success.
func TestFileWhoseContentIsGoneIsNotFound(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := startBatchesOf(t, "nightly", `url: "`+broker.URL()+`"`, "{pipelines: [p]}")
	file, _, _ := b.upload("x\n", "purpose", "batch")
	js, err := jetstream.New(broker.Client())
	if err != nil {
		t.Fatal(err)
	}
	name, err := js.StreamNameBySubject(t.Context(), bus.SubjectsOf("m").FileData(uuid.NewString()))
	if err != nil {
		t.Fatal(err)
	}
	contents, err := js.Stream(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	if err := contents.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	if status, answer := b.call("GET", "/v1/files/"+file.ID+"/content", "", nil, nil); status != http.StatusNotFound {
		t.Errorf("%d %s", status, answer)
	}
}
