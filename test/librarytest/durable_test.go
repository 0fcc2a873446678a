package librarytest

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// durable returns a request for all stages that waits on file.
func durable(text string) *request.Request {
	return &request.Request{
		Pipeline: "all", Durability: pipeline.File,
		Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte(text))},
	}
}

// result asks for a stored answer, which is text.
func result(t *testing.T, m *stagemesh.Mesh, id string) string {
	t.Helper()
	answer, err := m.Result(t.Context(), id, testbed.Patience)
	if err != nil {
		t.Fatal(err)
	}
	if answer.RequestID != id {
		t.Errorf("got the answer to %s, want that to %s", answer.RequestID, id)
	}
	return string(answer.Outputs[0].Blob.Data)
}

func TestStoredAnswerOutlivesItsProcess(t *testing.T) {
	t.Parallel()
	settings := stagemesh.Settings{NATS: meshfile.NATS{StoreDir: t.TempDir()}}
	first := newMesh(t, settings, stagemesh.Stage{Name: "a", Runner: sign("a")})
	if err := first.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	answer, err := first.Infer(t.Context(), durable("to"))
	meshtest.Stop(t, first)
	if err != nil {
		t.Fatal(err)
	}
	second := meshtest.Start(t, newMesh(t, settings, stagemesh.Stage{Name: "a", Runner: sign("other")}))
	if got := result(t, second, answer.RequestID); got != "to a" {
		t.Errorf("got %q", got)
	}
}

// waiting returns a runner that says when it runs, and then waits for done.
func waiting(runs chan<- struct{}, done <-chan struct{}) *inproc.Runner {
	return inproc.Each(inproc.Settings{}, func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
		runs <- struct{}{}
		select {
		case <-done:
			return item.Inputs, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	})
}

func TestDurableRequestOutlivesItsCaller(t *testing.T) {
	t.Parallel()
	runs, done := make(chan struct{}, 1), make(chan struct{})
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "a", Runner: waiting(runs, done)}))
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	left := make(chan error, 1)
	go func() {
		_, err := m.Infer(ctx, durable("to"))
		left <- err
	}()
	testbed.Receive(t, "run", runs)
	leave()
	f := fault.From(testbed.Receive(t, "caller's leave", left))
	if f.Reason != fault.Cancelled {
		t.Fatalf("got %v", f)
	}
	close(done)
	if got := result(t, m, f.Metadata["request_id"]); got != "to" {
		t.Errorf("got %q", got)
	}
}

// until returns a runner that sends a chunk, and then waits until nobody wants
// its item any more.
func until() *inproc.Runner {
	return inproc.New(inproc.Settings{}, func(ctx context.Context, b runner.Batch, sink runner.Sink) error {
		for i, item := range b.Items {
			if err := sink.Chunk(i, item.Inputs); err != nil {
				return err
			}
		}
		<-ctx.Done()
		return ctx.Err()
	})
}

func TestRequestIsCancelledByItsID(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "a", Runner: until()}))
	id := ""
	_, err := m.Stream(t.Context(), durable("to"), func(c request.Chunk) error {
		id = c.RequestID
		return m.Cancel(t.Context(), id)
	})
	if f := fault.From(err); f.Reason != fault.Cancelled {
		t.Errorf("got %v", err)
	}
	_, err = m.Result(t.Context(), id, testbed.Patience)
	if f := fault.From(err); f.Reason != fault.Cancelled {
		t.Errorf("the stored answer is %v", err)
	}
}

func TestUnknownRequestHasNoResult(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "a", Runner: sign("a")}))
	id := uuid.NewString()
	if _, err := m.Result(t.Context(), id, 0); fault.From(err).Reason != fault.NotFound {
		t.Errorf("got %v", err)
	}
	if err := m.Cancel(t.Context(), id); err != nil {
		t.Errorf("got %v", err)
	}
	if err := m.Cancel(t.Context(), "no id"); fault.From(err).Reason != fault.InvalidRequest {
		t.Errorf("got %v", err)
	}
}

// Another stream has the subjects of the stage's queue on file, which so cannot be created.
func TestLostFileQueueRefusesDurableRequestsOnly(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{NATS: meshfile.NATS{URL: broker.URL()}}, stagemesh.Stage{Name: "a", Runner: sign("a")}))
	js, err := jetstream.New(broker.Client())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Infer(t.Context(), durable("to")); err != nil {
		t.Fatal(err)
	}
	var queue jetstream.StreamConfig
	for s := range js.ListStreams(t.Context()).Info() {
		if strings.HasSuffix(s.Config.Name, "_a_file") {
			queue = s.Config
		}
	}
	if err := js.DeleteStream(t.Context(), queue.Name); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "other", Subjects: queue.Subjects}); err != nil {
		t.Fatal(err)
	}
	refused := func() *fault.Fault {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := m.Infer(ctx, durable("to"))
		return fault.From(err)
	}
	var f *fault.Fault
	testbed.Eventually(t, "durable requests are refused", func() bool {
		f = refused()
		return f.Reason == fault.NoCapacity && strings.Contains(f.Message, "overlap")
	})
	if f.Stage != "a" || f.RetryAfter <= 0 {
		t.Errorf("the refusal is %v, retry after %s", f, f.RetryAfter)
	}
	if _, err := m.Infer(t.Context(), &request.Request{Pipeline: "all", Inputs: durable("to").Inputs}); err != nil {
		t.Errorf("a request in memory: %v", err)
	}
	if err := js.DeleteStream(t.Context(), "other"); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "durable requests are answered", func() bool {
		answer, err := m.Infer(t.Context(), durable("to"))
		return err == nil && string(answer.Outputs[0].Blob.Data) == "to a"
	})
}
