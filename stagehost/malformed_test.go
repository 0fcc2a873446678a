package stagehost_test

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// wellFormed is an item as a gateway would send it, changed by an edit.
func wellFormed(t *testing.T, edit func(*meshv1.Envelope)) []byte {
	t.Helper()
	e := &meshv1.Envelope{
		Mesh: string(mesh), Gateway: string(gateway), Pipeline: "pipeline",
		RequestId: "0198c0de-0000-7000-8000-000000000001", ExecutionId: "0198c0de-0000-7000-8000-000000000002",
		Route:    []*meshv1.Step{{Name: "step", Stage: string(stage)}},
		Deadline: timestamppb.New(time.Now().Add(time.Hour)), AdmittedAt: timestamppb.Now(),
		Durability: inferencev1.Durability_DURABILITY_MEMORY,
		Parts:      []*inferencev1.Part{{Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{Data: []byte("x")}}}},
	}
	edit(e)
	data, err := proto.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func randomBytes(n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(rand.Uint32())
	}
	return out
}

func TestMalformedItemIsCountedAndRemoved(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, echo))
	nc := b.broker.Client()
	subject := b.bus.Stage(stage, pipeline.Memory, pipeline.Normal)
	whole := wellFormed(t, func(*meshv1.Envelope) {})
	step := &meshv1.Step{Name: "step", Stage: string(stage)}
	tests := []struct {
		name string
		data []byte
	}{
		{"nothing", nil},
		{"one byte", []byte{0xff}},
		{"text", []byte("GET / HTTP/1.1\r\n\r\n")},
		{"random bytes", append([]byte{0xff}, randomBytes(4096)...)},
		{"as large as may be", bytes.Repeat([]byte{0xff}, b.bus.MaxPayload()-1024)},
		{"cut short", whole[:len(whole)-2]},
		{"another mesh's", wellFormed(t, func(e *meshv1.Envelope) { e.Mesh = "other" })},
		{"no mesh", wellFormed(t, func(e *meshv1.Envelope) { e.Mesh = "" })},
		{"another stage's", wellFormed(t, func(e *meshv1.Envelope) { e.Route[0].Stage = "other" })},
		{"a stage that is not a name", wellFormed(t, func(e *meshv1.Envelope) { e.Route[0].Stage = "a.b.>" })},
		{"a name of a megabyte", wellFormed(t, func(e *meshv1.Envelope) { e.Route[0].Name = strings.Repeat("n", 1<<20) })},
		{"a gateway that is a wildcard", wellFormed(t, func(e *meshv1.Envelope) { e.Gateway = ">" })},
		{"a request id that is none", wellFormed(t, func(e *meshv1.Envelope) { e.RequestId = "1" })},
		{"an execution id that is a subject", wellFormed(t, func(e *meshv1.Envelope) { e.ExecutionId = "a.b" })},
		{"no execution id", wellFormed(t, func(e *meshv1.Envelope) { e.ExecutionId = "" })},
		{"no route", wellFormed(t, func(e *meshv1.Envelope) { e.Route = nil })},
		{"a route that is too long", wellFormed(t, func(e *meshv1.Envelope) {
			for len(e.Route) <= pipeline.MaxSteps {
				e.Route = append(e.Route, step)
			}
		})},
		{"past the end of its route", wellFormed(t, func(e *meshv1.Envelope) { e.Position = 1 })},
		{"far past the end of its route", wellFormed(t, func(e *meshv1.Envelope) { e.Position = 1<<32 - 1 })},
		{"no deadline", wellFormed(t, func(e *meshv1.Envelope) { e.Deadline = nil })},
		{"a deadline that is not a time", wellFormed(t, func(e *meshv1.Envelope) { e.Deadline.Nanos = -1 })},
		{"a durability of another version", wellFormed(t, func(e *meshv1.Envelope) { e.Durability = 99 })},
		{"too many parts", wellFormed(t, func(e *meshv1.Envelope) {
			for range 300 {
				e.Parts = append(e.Parts, e.Parts[0])
			}
		})},
		{"a part that is nothing", wellFormed(t, func(e *meshv1.Envelope) { e.Parts[0].Body = nil })},
		{"a tensor that lies about its size", wellFormed(t, func(e *meshv1.Envelope) {
			e.Parts[0].Body = &inferencev1.Part_Tensor{Tensor: &inferencev1.Tensor{Datatype: "FP32", Shape: []int64{1 << 40, 1 << 40}, Raw: []byte{1}}}
		})},
	}
	for i, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if err := nc.Publish(subject, test.data); err != nil {
				t.Fatal(err)
			}
			h.awaitCount("stagemesh.stage.malformed", int64(i+1))
			c := b.ask("good")
			c.t = t
			checkEcho(t, c)
		})
	}
	b.emptied()
	if n := h.counts.Of("stagemesh.stage.redelivered"); n > 0 {
		t.Errorf("%d items came again", n)
	}
}

// The caller gets a fault, where the item names him.
func TestMalformedItemWithACallerIsAnswered(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, echo), ackWait(longTime))
	nc := b.broker.Client()
	part := func(name string) *inferencev1.Part {
		return &inferencev1.Part{Name: name, Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{Data: []byte("x")}}}
	}
	tests := []struct {
		name   string
		edit   func(*meshv1.Envelope)
		reason fault.Reason
		says   string
		step   string
	}{
		{"two parts of one name", func(e *meshv1.Envelope) { e.Parts = []*inferencev1.Part{part("a"), part("a")} }, fault.InvalidInput, `"a"`, "step"},
		{"two kept parts of one name", func(e *meshv1.Envelope) { e.Kept = []*inferencev1.Part{part("k"), part("k")} }, fault.InvalidInput, `"k"`, "step"},
		{"a part that is nothing", func(e *meshv1.Envelope) { e.Parts[0] = &inferencev1.Part{Name: "n"} }, fault.InvalidInput, "parts.n: neither blob nor tensor", "step"},
		{"a part by reference", func(e *meshv1.Envelope) { e.Parts[0].Body = &inferencev1.Part_Ref{} }, fault.NotSupported, "by reference", "step"},
		{"another stage's", func(e *meshv1.Envelope) { e.Route[0].Stage = "other" }, fault.Internal, "request id", "step"},
		{"past the end of its route", func(e *meshv1.Envelope) { e.Position = 1 }, fault.Internal, "request id", string(stage)},
		{"a step that is not a name", func(e *meshv1.Envelope) { e.Route[0].Name = "a.b" }, fault.Internal, "request id", string(stage)},
		{"a durability of another version", func(e *meshv1.Envelope) { e.Durability = 99 }, fault.Internal, "request id", "step"},
	}
	for i, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c := b.expect(chunkOf(test.name))
			c.t = t
			data := wellFormed(t, func(e *meshv1.Envelope) {
				e.RequestId, e.ExecutionId = string(c.env.RequestID), string(c.env.ExecutionID)
				test.edit(e)
			})
			if err := nc.Publish(b.bus.Stage(stage, pipeline.Memory, pipeline.Normal), data); err != nil {
				t.Fatal(err)
			}
			f := c.fault(test.reason)
			if f.Stage != string(stage) || f.Step != test.step || f.Host == "" || !strings.Contains(f.Message, test.says) {
				t.Errorf("the fault is %q at stage %q, step %q, host %q", f.Message, f.Stage, f.Step, f.Host)
			}
			h.awaitCount("stagemesh.stage.malformed", int64(i+1))
		})
	}
	b.emptied()
	h.awaitItems(0)
}

func TestMalformedItemOfAJobLeavesItsResult(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host(inproc.Each(inproc.Settings{}, echo), ackWait(longTime))
	c := b.expect(chunkOf("x"))
	data := wellFormed(t, func(e *meshv1.Envelope) {
		e.RequestId, e.ExecutionId = string(c.env.RequestID), string(c.env.ExecutionID)
		e.StoreResult, e.Parts[0].Body = true, nil
	})
	if err := b.broker.Client().Publish(b.bus.Stage(stage, pipeline.Memory, pipeline.Normal), data); err != nil {
		t.Fatal(err)
	}
	c.fails(fault.InvalidInput)
	if r := b.stored(c.env.RequestID); r.Fault == nil || r.Fault.Reason != fault.InvalidInput {
		t.Errorf("stored %+v", r)
	}
}

// Damage at random: some of it leaves an item that can be read.
func TestDamagedItemsAreSurvived(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, echo))
	nc := b.broker.Client()
	whole := wellFormed(t, func(*meshv1.Envelope) {})
	const damaged = 500
	for range damaged {
		data := bytes.Clone(whole)
		for range 1 + rand.IntN(4) {
			data[rand.IntN(len(data))] = byte(rand.Uint32())
		}
		if rand.IntN(2) == 0 {
			data = data[:rand.IntN(len(data))]
		}
		if err := nc.Publish(b.bus.Stage(stage, pipeline.Memory, pipeline.High), data); err != nil {
			t.Fatal(err)
		}
	}
	checkEcho(t, b.ask("good"))
	b.emptied()
	t.Logf("%d of %d were malformed", h.counts.Of("stagemesh.stage.malformed"), damaged)
}

func TestGarbageBesideTheQueueIsSurvived(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host(inproc.Each(inproc.Settings{}, echo))
	nc := b.broker.Client()
	for _, subject := range []string{b.bus.Subjects.Alive(stage), b.bus.Subjects.Cancel(), b.bus.Subjects.Reply(gateway, "garbage")} {
		for _, data := range [][]byte{nil, {0xff}, randomBytes(1024), make([]byte, b.bus.MaxPayload()-1024)} {
			if err := nc.PublishMsg(&nats.Msg{Subject: subject, Reply: "nobody.listens", Data: data, Header: nats.Header{"Status": {"503"}}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := nc.FlushTimeout(testbed.Patience); err != nil {
		t.Fatal(err)
	}
	checkEcho(t, b.ask("good"))
	if _, err := b.bus.Alive(t.Context(), stage); err != nil {
		t.Errorf("alive: %v", err)
	}
	b.emptied()
}
