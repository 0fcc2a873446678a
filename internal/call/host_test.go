package call_test

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/route"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// ackWait is so long that no item of a test is redelivered.
const ackWait = 10 * time.Minute

// fileQueue makes a queue of durable items for the stage, and the stage alive.
func (b *bed) fileQueue() bus.QueueInfo {
	b.t.Helper()
	b.alive()
	return b.ensureQueue(pipeline.File)
}

func (b *bed) memoryQueue() bus.QueueInfo {
	b.t.Helper()
	b.alive()
	return b.ensureQueue(pipeline.Memory)
}

func (b *bed) ensureQueue(d pipeline.Durability) bus.QueueInfo {
	b.t.Helper()
	info, err := b.host.EnsureQueue(b.t.Context(), bus.QueueSettings{
		Stage: stage, Durability: d, MaxItems: 10_000, MaxBytes: 64 << 20, MaxAge: time.Hour, AckWait: ackWait, MaxDeliver: 20,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return info
}

// pulls starts a host that pulls from the queue, and returns what it gets.
func (b *bed) pulls(d pipeline.Durability) <-chan pulled {
	b.t.Helper()
	info := b.ensureQueue(d)
	out := make(chan pulled, 10_000)
	puller, err := b.host.Pull(bus.PullSettings{
		Stage: stage, Durabilities: []pipeline.Durability{d}, Bound: 10_000, AckWait: ackWait,
		Malformed: func(err error) { b.t.Error(err) }, QueueMissing: func() {},
	}, func(delivery bus.Delivery) {
		env, err := envelope.Decode(delivery.Data)
		if err != nil {
			b.t.Error(err)
			return
		}
		out <- pulled{env, delivery}
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(puller.Close)
	puller.Use(d, info.Epoch)
	return out
}

// pulled is an item that a host has in flight.
type pulled struct {
	env      *envelope.Envelope
	delivery bus.Delivery
}

// store stores the text as the answer to the item, and reports whether it is
// the first.
func (b *bed) store(env *envelope.Envelope, text string) bool {
	reply := env.NewReply()
	reply.Parts = blob([]byte(text))
	return b.storeReply(env, reply)
}

func (b *bed) storeReply(env *envelope.Envelope, reply *envelope.Reply) bool {
	b.t.Helper()
	message, err := store.NewResults(b.host, store.Settings{}).Result(env.Result(reply, env.AdmittedAt.Add(1500*time.Millisecond)))
	if err != nil {
		b.t.Error(err)
		return false
	}
	type sent struct {
		receipt bus.Receipt
		err     error
	}
	done := make(chan sent, 1)
	b.host.Publish(message, func(r bus.Receipt, err error) { done <- sent{r, err} })
	got := testbed.Receive(b.t, "receipt of a stored answer", done)
	if got.err != nil {
		b.t.Errorf("store: %v", got.err)
	}
	return !got.receipt.Duplicate
}

// announce reports to the item's gateway that its result is stored.
func (b *bed) announce(env *envelope.Envelope) {
	reply := env.NewReply()
	reply.Stored = true
	b.sends(env, reply)
}

func (b *bed) sends(env *envelope.Envelope, reply *envelope.Reply) {
	message, err := b.host.Reply(env.Gateway, reply)
	if err == nil {
		err = b.host.PublishUnacked(message)
	}
	if err != nil {
		b.t.Errorf("reply: %v", err)
	}
}

// gateway starts one more request path of that name.
func (b *bed) gateway(name pipeline.GatewayID, edits ...func(*call.Settings)) *call.Service {
	b.t.Helper()
	edits = append(edits, func(s *call.Settings) { s.Gateway = name })
	return b.start(b.broker.Connect(mesh), edits...)
}

// cancelMessages returns the mesh's cancel messages.
func (b *bed) cancelMessages() <-chan *envelope.Cancel {
	b.t.Helper()
	out := make(chan *envelope.Cancel, 10_000)
	stop, err := b.host.ServeCancels(func(data []byte) {
		notice, err := envelope.DecodeCancel(data)
		if err != nil {
			return
		}
		out <- notice
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = stop() })
	return out
}

// answered is how a call in the background ended.
type answered struct {
	response *request.Response
	err      error
}

// infer makes a call in the background.
func infer(ctx context.Context, s *call.Service, r *request.Request) <-chan answered {
	out := make(chan answered, 1)
	go func() {
		response, err := s.Infer(ctx, r)
		out <- answered{response, err}
	}()
	return out
}

func durable(text string) *request.Request {
	r := ask(text)
	r.Durability = pipeline.File
	return r
}

// resultStream reports whether the mesh has a stream of results.
func (b *bed) resultStream() bool {
	b.t.Helper()
	_, err := b.host.JetStream().Stream(b.t.Context(), b.host.ResultStream())
	return err == nil
}

// ensureResults makes the stream of results, as a host would.
func (b *bed) ensureResults() {
	b.t.Helper()
	if err := store.NewResults(b.host, store.Settings{}).Ensure(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
}

// published calls handle with what is published for the stage with the
// durability.
func (b *bed) published(d pipeline.Durability, handle func(*nats.Msg)) {
	b.t.Helper()
	sub, err := b.nc.Subscribe(b.host.Stage(stage, d, "*"), handle)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = sub.Unsubscribe() })
	if err := b.nc.FlushTimeout(testbed.Patience); err != nil {
		b.t.Fatal(err)
	}
}

// metered makes a service count into the counts.
func metered(c *testbed.Counts) func(*call.Settings) {
	return func(s *call.Settings) { s.Meter = c }
}

func cancelled(how string) string { return "stagemesh.gateway.cancelled " + how }

// twoPipelines makes a service serve the pipelines one and two, of the stage
// alone.
func twoPipelines(t *testing.T) func(*call.Settings) {
	t.Helper()
	steps := []pipeline.Step{{Name: "stage", Stage: stage}}
	c, err := pipelines.New(pipelines.Settings{Seeds: []pipeline.Pipeline{{Name: "one", Steps: steps}, {Name: "two", Steps: steps}}})
	if err != nil {
		t.Fatal(err)
	}
	return func(s *call.Settings) { s.Router = route.New(c, nil, nil) }
}
