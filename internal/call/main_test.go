package call_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric/noop"
	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/route"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	mesh  pipeline.MeshName  = "test"
	stage pipeline.StageName = "stage"
	// whole is the pipeline of that stage alone.
	whole = "stage:stage"
	// atOnce is far below every timeout of a call.
	atOnce = 5 * time.Second
)

// bed is a request path on a broker.
type bed struct {
	t       *testing.T
	broker  *testbed.Broker
	service *call.Service
	// host is the connection of the stages, nc one past the bus.
	host *bus.Bus
	nc   *nats.Conn
	// logged are the service's warnings.
	logged *testbed.Log
	// stops ends each request path, once; stopsWith does so with a context and
	// returns what it ended with.
	stops     map[*call.Service]func()
	stopsWith map[*call.Service]func(context.Context) error
}

func newBed(t *testing.T, edits ...func(*call.Settings)) *bed {
	t.Helper()
	b := &bed{t: t, broker: testbed.StartBroker(t), logged: &testbed.Log{}, stops: map[*call.Service]func(){}, stopsWith: map[*call.Service]func(context.Context) error{}}
	b.host, b.nc = b.broker.Connect(mesh), b.broker.Client()
	b.service = b.start(b.broker.Connect(mesh), edits...)
	return b
}

// start starts a request path on the connection. It stops with the test, or by
// b.stops before.
func (b *bed) start(conn *bus.Bus, edits ...func(*call.Settings)) *call.Service {
	b.t.Helper()
	c, err := pipelines.New(pipelines.Settings{})
	if err != nil {
		b.t.Fatal(err)
	}
	s := call.Settings{
		Mesh: mesh, Gateway: "gateway", Router: route.New(c, nil, nil), Limits: call.Limits{Metadata: []string{"known"}},
		Logger: slog.New(slog.NewTextHandler(b.logged, &slog.HandlerOptions{Level: slog.LevelWarn})), Meter: noop.Meter{},
	}
	for _, edit := range edits {
		edit(&s)
	}
	service, err := call.New(s)
	if err != nil {
		b.t.Fatal(err)
	}
	if err := service.Start(conn); err != nil {
		b.t.Fatal(err)
	}
	var once sync.Once
	b.stopsWith[service] = func(ctx context.Context) (err error) {
		once.Do(func() { err = service.Stop(ctx) })
		return err
	}
	b.stops[service] = func() {
		ctx, cancel := context.WithTimeout(context.Background(), testbed.Patience)
		defer cancel()
		if err := b.stopsWith[service](ctx); err != nil {
			b.t.Errorf("stop: %v", err)
		}
	}
	b.t.Cleanup(b.stops[service])
	return service
}

// alive makes the stage one that has a host.
func (b *bed) alive() {
	b.t.Helper()
	stop, err := b.host.ServeAlive(stage, "host", nil, "", func() bool { return false })
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = stop() })
}

// queue makes a queue of so many items for the stage.
func (b *bed) queue(items int64) {
	b.t.Helper()
	_, err := b.host.EnsureQueue(b.t.Context(), bus.QueueSettings{
		Stage: stage, Durability: pipeline.Memory, MaxItems: items, MaxBytes: 64 << 20, MaxAge: time.Hour, AckWait: time.Minute, MaxDeliver: 20,
	})
	if err != nil {
		b.t.Fatal(err)
	}
}

// sees calls handle with each message published for the stage, one at a time, until
// the test ends, which waits for the last.
func (b *bed) sees(handle func(*nats.Msg)) {
	b.t.Helper()
	var handling sync.Mutex
	sub, err := b.nc.Subscribe(b.host.Stage(stage, pipeline.Memory, "*"), func(msg *nats.Msg) {
		handling.Lock()
		defer handling.Unlock()
		if b.t.Context().Err() == nil {
			handle(msg)
		}
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		_ = sub.Unsubscribe()
		handling.Lock()
		defer handling.Unlock()
	})
	if err := b.nc.FlushTimeout(testbed.Patience); err != nil {
		b.t.Fatal(err)
	}
}

// serves makes the stage one that answers every item.
func (b *bed) serves(answer func(*envelope.Envelope)) {
	b.t.Helper()
	b.queue(1000)
	b.alive()
	b.sees(func(msg *nats.Msg) { answer(b.decode(msg)) })
}

func (b *bed) decode(msg *nats.Msg) *envelope.Envelope {
	env, err := envelope.Decode(msg.Data)
	if err != nil {
		b.t.Errorf("item: %v", err)
	}
	return env
}

// chunk sends a chunk of an answer, and does not report when the next comes.
func (b *bed) chunk(env *envelope.Envelope, seq uint64, data []byte) { b.chunkOf(env, seq, data, 0) }

// chunkOf is chunk with the latest time of the next message.
func (b *bed) chunkOf(env *envelope.Envelope, seq uint64, data []byte, nextWithin time.Duration) {
	reply := env.NewReply()
	reply.Seq, reply.Chunk, reply.Parts, reply.NextWithin = seq, true, blob(data), nextWithin
	message, err := b.host.Reply(env.Gateway, reply)
	if err == nil {
		err = b.host.PublishUnacked(message)
	}
	if err != nil {
		b.t.Errorf("chunk %d: %v", seq, err)
	}
}

// end sends the end of an answer, and returns when the gateway has it.
func (b *bed) end(env *envelope.Envelope, seq uint64, data []byte) {
	b.endWith(env, seq, blob(data))
}

func (b *bed) endWith(env *envelope.Envelope, seq uint64, parts []payload.Part) {
	reply := env.NewReply()
	reply.Seq, reply.Parts = seq, parts
	message, err := b.host.Reply(env.Gateway, reply)
	if err != nil {
		b.t.Errorf("answer: %v", err)
		return
	}
	acknowledged := make(chan error, 1)
	b.host.Publish(message, func(_ bus.Receipt, err error) { acknowledged <- err })
	if err := <-acknowledged; err != nil {
		b.t.Errorf("answer: %v", err)
	}
}

func blob(data []byte) []payload.Part {
	return []payload.Part{payload.OfBlob("x", "text/plain", data)}
}

// ask is a request for the stage.
func ask(text string) *request.Request {
	return &request.Request{Pipeline: whole, Inputs: blob([]byte(text)), Timeout: testbed.Patience}
}

func textOf(parts []payload.Part) string { return string(parts[0].Blob.Data) }

// wantFault checks that a call failed for the reason.
func wantFault(t *testing.T, response *request.Response, err error, reason fault.Reason) *fault.Fault {
	t.Helper()
	f, ok := errors.AsType[*fault.Fault](err)
	if !ok || f.Reason != reason || response != nil {
		t.Fatalf("got %+v, %v, want %s", response, err, reason)
	}
	return f
}
