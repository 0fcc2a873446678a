package call_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// echo answers an item with its input.
func (b *bed) echo(env *envelope.Envelope) { b.end(env, 1, []byte(textOf(env.Parts))) }

func TestResponseBelongsToItsRequest(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.serves(b.echo)
	for i := range 20 {
		text := fmt.Sprint("request ", i)
		response, err := b.service.Infer(t.Context(), ask(text))
		if err != nil || textOf(response.Outputs) != text || response.RequestID == "" || response.Timeline.Total <= 0 {
			t.Errorf("%s: %+v, %v", text, response, err)
		}
	}
}

func TestRejectionsNameTheStage(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		prepare func(*bed)
		size    int
		reason  fault.Reason
		retry   bool
	}{
		"no host":    {func(*bed) {}, 1, fault.NoCapacity, true},
		"no queue":   {func(b *bed) { b.alive() }, 1, fault.NoCapacity, true},
		"full queue": {func(b *bed) { b.queue(1); b.alive(); b.fill() }, 1, fault.QueueFull, true},
		"too large":  {func(b *bed) { b.queue(1); b.alive() }, 8 << 20, fault.PayloadTooLarge, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			test.prepare(b)
			begin := time.Now()
			r := ask("")
			r.Inputs = blob(make([]byte, test.size))
			response, err := b.service.Infer(t.Context(), r)
			f := wantFault(t, response, err, test.reason)
			if f.Stage != string(stage) || f.Step != string(stage) || (f.RetryAfter > 0) != test.retry {
				t.Errorf("stage %q, step %q, retry after %s", f.Stage, f.Step, f.RetryAfter)
			}
			if took := time.Since(begin); took > atOnce {
				t.Errorf("it took %s", took)
			}
		})
	}
}

// fill puts an item into the queue.
func (b *bed) fill() {
	b.t.Helper()
	if _, err := b.nc.Request(b.host.Stage(stage, "memory", "normal"), []byte("item"), testbed.Patience); err != nil {
		b.t.Fatal(err)
	}
}

// A stage's first report is awaited: without it it is not known which queues there
// are.
func TestQueuesOfASlowHostAreAwaited(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	report, err := proto.Marshal(&meshv1.AliveResponse{Durabilities: []inferencev1.Durability{inferencev1.Durability_DURABILITY_FILE}})
	if err != nil {
		t.Fatal(err)
	}
	questions := 0
	if _, err := b.nc.Subscribe(b.host.Subjects.Alive(stage), func(msg *nats.Msg) {
		if questions++; questions > 1 {
			_ = msg.Respond(report)
		}
	}); err != nil {
		t.Fatal(err)
	}
	if err := b.nc.FlushTimeout(testbed.Patience); err != nil {
		t.Fatal(err)
	}
	response, err := b.service.Infer(t.Context(), ask(""))
	_ = wantFault(t, response, err, fault.NotSupported)
}

// The last report about the stage's hosts is not the problem.
func TestMissingBrokerIsReported(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	response, err := b.service.Infer(t.Context(), ask("x"))
	_ = wantFault(t, response, err, fault.NoCapacity)
	b.broker.Stop()
	testbed.Eventually(t, "the connection is lost", func() bool { return b.service.Ready() != nil })
	response, err = b.service.Infer(t.Context(), ask("x"))
	if f := wantFault(t, response, err, fault.BrokerUnavailable); f.RetryAfter <= 0 {
		t.Errorf("retry after %s", f.RetryAfter)
	}
	for what, err := range map[string]error{"gateway": b.service.Ready(), "pipeline": b.service.PipelineReady(t.Context(), whole, true)} {
		if f := fault.From(err); f.Reason != fault.BrokerUnavailable {
			t.Errorf("the %s: %v", what, err)
		}
	}
	b.broker.Restore()
}

func TestPipelineIsReadyWhileItsStagesHaveHosts(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	if f := fault.From(b.service.PipelineReady(t.Context(), whole, true)); f.Reason != fault.NoCapacity || f.Stage != string(stage) {
		t.Errorf("without a host: %v", f)
	}
	b.alive()
	testbed.Eventually(t, "the host is found", func() bool { return b.service.PipelineReady(t.Context(), whole, true) == nil })
	if f := fault.From(b.service.PipelineReady(t.Context(), "nothing", true)); f.Reason != fault.UnknownPipeline {
		t.Errorf("an unknown pipeline: %v", f)
	}
}

func TestPipelineWithoutAFileQueueIsServedAndNotReady(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	stop, err := b.host.ServeAlive(stage, "host", []pipeline.Durability{pipeline.Memory}, "the disk is gone", func() bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stop() })
	testbed.Eventually(t, "the host is found", func() bool { return b.service.PipelineReady(t.Context(), whole, false) == nil })
	if f := fault.From(b.service.PipelineReady(t.Context(), whole, true)); f.Reason != fault.NoCapacity || !strings.Contains(f.Message, "the disk is gone") {
		t.Errorf("it is ready: %v", f)
	}
	response, err := b.service.Infer(t.Context(), durable("x"))
	_ = wantFault(t, response, err, fault.NoCapacity)
}

// acks acknowledges as the stage's queue does: that it has the item, or had it before.
func (b *bed) acks(msg *nats.Msg, duplicate bool) {
	_ = msg.Respond(fmt.Appendf(nil, `{"stream":%q,"seq":1,"duplicate":%t}`, b.host.Stream(stage, pipeline.Memory), duplicate))
}

func TestTakenExecutionIDIsReplaced(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	var first *envelope.Envelope
	b.sees(func(msg *nats.Msg) {
		env := b.decode(msg)
		b.acks(msg, first == nil)
		if first == nil {
			first = env
			return
		}
		if env.ExecutionID == first.ExecutionID || env.RequestID != first.RequestID {
			t.Errorf("execution %s of request %s, after %s of %s", env.ExecutionID, env.RequestID, first.ExecutionID, first.RequestID)
		}
		b.echo(env)
	})
	response, err := b.service.Infer(t.Context(), ask("x"))
	if err != nil || textOf(response.Outputs) != "x" {
		t.Errorf("answered with %+v, %v", response, err)
	}
}

func TestUnconfirmedPublishIsRepeatedUnderItsID(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	service := b.start(b.broker.Connect(mesh, func(s *bus.Settings) { s.AckTimeout = 150 * time.Millisecond }),
		func(s *call.Settings) { s.Gateway = "impatient" })
	b.alive()
	var ids []string
	b.sees(func(msg *nats.Msg) {
		ids = append(ids, msg.Header.Get(nats.MsgIdHdr))
		if len(ids) == 3 {
			b.acks(msg, true)
			b.echo(b.decode(msg))
		}
	})
	response, err := service.Infer(t.Context(), ask("x"))
	if err != nil || textOf(response.Outputs) != "x" {
		t.Fatalf("answered with %+v, %v", response, err)
	}
	if len(ids) != 3 || ids[0] == "" || ids[0] != ids[1] || ids[1] != ids[2] {
		t.Errorf("published as %q", ids)
	}
}

// A reply may come although the queue never acknowledged the item.
func TestReplyEndsTheWaitForAConfirmation(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	b.sees(func(msg *nats.Msg) { b.echo(b.decode(msg)) })
	response, err := b.service.Infer(t.Context(), ask("x"))
	if err != nil || textOf(response.Outputs) != "x" {
		t.Errorf("answered with %+v, %v", response, err)
	}
}

func TestCallersDeadlineIsTheItems(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	var asked atomic.Int64
	b.serves(func(env *envelope.Envelope) {
		asked.Store(int64(env.Deadline.Sub(env.AdmittedAt)))
		b.echo(env)
	})
	const far, near = 20 * time.Second, 10 * time.Second
	ctx, cancel := context.WithTimeout(t.Context(), near)
	defer cancel()
	r := ask("x")
	for _, r.Timeout = range []time.Duration{far, near / 2} {
		if _, err := b.service.Infer(ctx, r); err != nil {
			t.Fatal(err)
		}
		if got := time.Duration(asked.Load()); got > min(near, r.Timeout)+time.Second {
			t.Errorf("with a timeout of %s the item has %s", r.Timeout, got)
		}
	}
}

func TestDeadlineFaultNamesTheTimeout(t *testing.T) {
	t.Parallel()
	for where, stand := range map[string]func(*bed){
		"while hosts are asked": func(b *bed) {
			silent, err := b.nc.SubscribeSync(b.host.Subjects.Alive(stage))
			if err == nil {
				err = b.nc.FlushTimeout(testbed.Patience)
			}
			if err != nil {
				b.t.Fatal(err)
			}
			b.t.Cleanup(func() { _ = silent.Unsubscribe() })
		},
		"in the queue": func(b *bed) { b.serves(func(*envelope.Envelope) {}) },
		"before that":  func(*bed) {},
	} {
		t.Run(where, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			stand(b)
			r := ask("x")
			r.Timeout = 400 * time.Millisecond
			if where == "before that" {
				r.Timeout = time.Microsecond // as tritonclient's timeout=1
			}
			response, err := b.service.Infer(t.Context(), r)
			f := wantFault(t, response, err, fault.DeadlineExceeded)
			want := "no answer within " + r.Timeout.String()
			if where == "in the queue" {
				want += ": at step " + f.Step + ", stage " + f.Stage + ", it waits in the queue of the stage"
			}
			if f.Message != want || !errors.Is(f, context.DeadlineExceeded) {
				t.Errorf("got %q, caused by %v", f.Message, errors.Unwrap(f))
			}
		})
	}
}

func TestMissingOutputIsReported(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.serves(b.echo)
	r := ask("x")
	r.Outputs = []string{"x"}
	if response, err := b.service.Infer(t.Context(), r); err != nil || len(response.Outputs) != 1 {
		t.Errorf("the output that is there: %+v, %v", response, err)
	}
	r.Outputs = []string{"x", "nothing"}
	response, err := b.service.Infer(t.Context(), r)
	_ = wantFault(t, response, err, fault.InvalidRequest)
}

// withClock is a clock that is so many nanoseconds behind the broker's.
func withClock(behind *atomic.Int64) func(*bus.Settings) {
	return func(s *bus.Settings) {
		s.Now = func() time.Time { return time.Now().Add(-time.Duration(behind.Load())) }
	}
}

// Deadlines are minted at the gateway, and hosts and other gateways go by them.
func TestGatewayWithAWrongClockTakesNoRequests(t *testing.T) {
	t.Parallel()
	for direction, offset := range map[string]time.Duration{"ahead of": time.Second, "behind": -time.Second} {
		t.Run(direction, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			b.alive()
			b.answerAll()
			var behind atomic.Int64
			behind.Store(int64(offset))
			s := b.start(b.broker.Connect(mesh, withClock(&behind)), func(s *call.Settings) { s.Gateway = "wrong" })
			testbed.Eventually(t, "the gateway is not ready", func() bool { return s.Ready() != nil })
			for _, r := range []*request.Request{ask("it"), withKey("key", "it")} {
				response, err := s.Infer(t.Context(), r)
				f := wantFault(t, response, err, fault.NoCapacity)
				if !strings.Contains(f.Message, "clock") || !strings.Contains(f.Message, direction) || f.RetryAfter <= 0 {
					t.Errorf("got %+v", f)
				}
			}
			behind.Store(0)
			testbed.Eventually(t, "the gateway is ready", func() bool { return s.Ready() == nil })
			answers(t, infer(t.Context(), s, withKey("key", "it")), "did it")
		})
	}
}

// The first request finds the clock wrong, where there was no queue to compare clocks by.
func TestClockIsCheckedBeforeTheFirstRequest(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	var behind atomic.Int64
	behind.Store(int64(time.Second))
	s := b.start(b.broker.Connect(mesh, withClock(&behind)), func(s *call.Settings) { s.Gateway = "wrong" })
	b.alive()
	b.answerAll()
	response, err := s.Infer(t.Context(), ask("it"))
	if f := wantFault(t, response, err, fault.NoCapacity); !strings.Contains(f.Message, "clock") {
		t.Errorf("got %+v", f)
	}
}
