package fleet

import (
	"errors"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Queue looks at one of the broker's streams, past the mesh.
type Queue struct {
	fleet  *Fleet
	stream jetstream.Stream
}

// Queue returns a stage's queue, which a host has made.
func (f *Fleet) Queue(stage pipeline.StageName, d pipeline.Durability) Queue {
	f.t.Helper()
	return f.stream(bus.SubjectsOf(f.mesh).Stream(stage, d))
}

// Results returns the stream of stored answers.
func (f *Fleet) Results() Queue {
	f.t.Helper()
	return f.stream(bus.SubjectsOf(f.mesh).ResultStream())
}

func (f *Fleet) stream(name string) Queue {
	f.t.Helper()
	stream, err := f.jetStream().Stream(f.t.Context(), name)
	if err != nil {
		f.t.Fatalf("%s: %v", name, err)
	}
	return Queue{f, stream}
}

func (f *Fleet) jetStream() jetstream.JetStream {
	f.t.Helper()
	nc, err := nats.Connect(f.URL())
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		f.t.Fatal(err)
	}
	return js
}

// WipeRegistry removes all that the broker has of the registry, where that is in it.
func (f *Fleet) WipeRegistry() {
	f.t.Helper()
	js := f.jetStream()
	for _, what := range []string{"table", "instances"} {
		if err := js.DeleteStream(f.t.Context(), string(f.mesh)+"_"+what); err != nil {
			f.t.Fatal(err)
		}
	}
}

// State returns what the stream holds, and has held.
func (q Queue) State() jetstream.StreamState {
	q.fleet.t.Helper()
	info, err := q.stream.Info(q.fleet.t.Context())
	if err != nil {
		q.fleet.t.Fatal(err)
	}
	return info.State
}

// Redeliveries returns how often the broker has delivered an item that it had
// delivered before, to whomever, and whether or not it arrived: its deliveries,
// less the items that it has delivered. It is for a queue of which one class is
// used and nothing is withdrawn: there every place in the stream up to the last
// one that was delivered is an item that was.
func (q Queue) Redeliveries() int {
	q.fleet.t.Helper()
	again := 0
	consumers := q.stream.ListConsumers(q.fleet.t.Context())
	for info := range consumers.Info() {
		if info.Delivered.Consumer > 0 {
			again += int(info.Delivered.Consumer - info.Delivered.Stream)
		}
	}
	if err := consumers.Err(); err != nil {
		q.fleet.t.Fatal(err)
	}
	return again
}

// message returns what is at a place; ok is false where there is nothing.
func (q Queue) message(seq uint64) (data []byte, ok bool) {
	q.fleet.t.Helper()
	message, err := q.stream.GetMsg(q.fleet.t.Context(), seq)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, false
	}
	if err != nil {
		q.fleet.t.Fatal(err)
	}
	return message.Data, true
}

// Requests returns the ids of the requests whose items are in the queue.
func (q Queue) Requests() []string {
	q.fleet.t.Helper()
	return all(q, func(data []byte) (string, error) {
		env, err := envelope.Decode(data)
		if err != nil {
			return "", err
		}
		return string(env.RequestID), nil
	})
}

// Answers returns the stored answers.
func (q Queue) Answers() []*envelope.Result {
	q.fleet.t.Helper()
	return all(q, envelope.DecodeResult)
}

// all returns what is in the stream, in its order.
func all[T any](q Queue, decode func([]byte) (T, error)) []T {
	q.fleet.t.Helper()
	var out []T
	state := q.State()
	for seq := state.FirstSeq; seq <= state.LastSeq; seq++ {
		data, ok := q.message(seq)
		if !ok {
			continue
		}
		one, err := decode(data)
		if err != nil {
			q.fleet.t.Fatal(err)
		}
		out = append(out, one)
	}
	return out
}
