package meshtest_test

import (
	"context"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// each answers one item after the other.
func each(answer inproc.EachFunc) runner.Runner { return inproc.Each(inproc.Settings{}, answer) }

func unchanged(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil }

// held is a runner that reports each batch, and answers with the inputs when the test
// releases it.
type held struct {
	runner.Runner
	entered chan int
	release chan struct{}
}

const roomy = 1 << 10

// newHeld returns a runner that passes a batch for each value of release, and
// all once that is closed. It gives up with its context.
func newHeld() *held {
	h := &held{entered: make(chan int, roomy), release: make(chan struct{})}
	h.Runner = inproc.New(inproc.Settings{}, func(ctx context.Context, b runner.Batch, sink runner.Sink) error {
		h.entered <- len(b.Items)
		select {
		case <-h.release:
		case <-ctx.Done():
			return ctx.Err()
		}
		for i, item := range b.Items {
			if err := sink.SetOutcome(i, runner.Output(item.Inputs...)); err != nil {
				return err
			}
		}
		return nil
	})
	return h
}

// answer is what became of a call.
type answer struct {
	response *request.Response
	fault    *fault.Fault
	took     time.Duration
}

func (a answer) text() string { return string(a.response.Outputs[0].Blob.Data) }

// unhurried is an edit: whatever a gateway may wait for before it answers takes longer than a test
// waits for the answer.
func unhurried(s *gateway.Settings) {
	s.Timeout, s.HostGrace, s.Bus.AckTimeout = call.DefaultMaxTimeout, call.DefaultMaxTimeout, time.Hour
}

// infer sends a request and waits for its answer.
func infer(ctx context.Context, g meshtest.Gateway, r *request.Request) answer {
	begin := time.Now()
	response, err := g.Service().Infer(ctx, r)
	return answer{response: response, fault: meshtest.FaultOf(err), took: time.Since(begin)}
}

// start sends a request; the channel gets its answer.
func send(ctx context.Context, g meshtest.Gateway, r *request.Request) <-chan answer {
	out := make(chan answer, 1)
	go func() { out <- infer(ctx, g, r) }()
	return out
}

// want fails the test unless the answer is a fault of that reason.
func (a answer) want(t *testing.T, reason fault.Reason) *fault.Fault {
	t.Helper()
	if a.fault == nil || a.fault.Reason != reason {
		t.Fatalf("answered with %+v, %v after %s; want %s", a.response, a.fault, a.took, reason)
	}
	return a.fault
}

// fails is want for a test that asks no more of the fault.
func (a answer) checkFault(t *testing.T, reason fault.Reason) {
	t.Helper()
	_ = a.want(t, reason)
}

// ok fails the test unless the answer is an output.
func (a answer) checkOK(t *testing.T) answer {
	t.Helper()
	if a.fault != nil {
		t.Fatalf("answered with %v after %s", a.fault, a.took)
	}
	return a
}

func await(t *testing.T, from <-chan answer) answer {
	t.Helper()
	return testbed.Receive(t, "answer", from)
}

func requestFor(pipeline, input string) *request.Request {
	return &request.Request{Pipeline: pipeline, Inputs: text(input)}
}
