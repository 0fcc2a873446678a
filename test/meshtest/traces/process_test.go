package traces_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// hostProcess is the variable that makes the test binary a host.
const hostProcess = "TRACES_HOST"

// holdSettings name a file that the first run of all hosts makes.
type holdSettings struct {
	File string `yaml:"file"`
}

// newHold returns a runner whose first run never ends. All later ones answer.
func newHold(s holdSettings) (*inproc.Runner, error) {
	return inproc.Each(inproc.Settings{}, func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
		file, err := os.OpenFile(s.File, os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return item.Inputs, nil //nolint:nilerr // another run has made it
		}
		err = file.Close()
		<-ctx.Done()
		return nil, errors.Join(err, ctx.Err())
	}), nil
}

// host starts a host of the stage one as a process, and returns when it is ready.
func (b *bed) host(file string) *testbed.Process {
	b.Helper()
	mesh := filepath.Join(b.TempDir(), "mesh.yaml")
	text := fmt.Sprintf(`{mesh: %s, registry: {none: true}, stages: {one: {runner: {hold: {file: %s}}, queue: {ack_wait: 1s}}}}`, b.name, file)
	if err := os.WriteFile(mesh, []byte(text), 0o600); err != nil {
		b.Fatal(err)
	}
	c := exec.Command(os.Args[0], "one", "--config", mesh, "--nats", b.BrokerURL())
	c.Env = append(os.Environ(), hostProcess+"=1", "OTEL_EXPORTER_OTLP_ENDPOINT="+b.jaeger.GRPC())
	p := testbed.StartProcess(b, c)
	p.Match(regexp.MustCompile("is ready"))
	return p
}

// The dead host leaves no span, and the time that it had the item is the queue's.
func TestKilledHostLeavesNoSpan(t *testing.T) {
	t.Parallel()
	b := start(t, func(s *stagemesh.Settings, _ *tracing.Config) { s.NATS.Listen = "127.0.0.1:0" }, stagemesh.Stage{Name: "one"})
	file := filepath.Join(t.TempDir(), "held")
	first := b.host(file)
	r, answered := tracedRequest("x"), make(chan error, 1)
	r.Timeout = testbed.Patience
	go func() {
		_, err := b.Infer(context.WithoutCancel(t.Context()), r)
		answered <- err
	}()
	testbed.Eventually(t, "the host runs the item", func() bool {
		select {
		case err := <-answered:
			t.Fatalf("the request ended: %v", err)
		default:
		}
		_, err := os.Stat(file)
		return err == nil
	})
	first.Kill()
	b.host(file)
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	spans := b.tree(r.Trace, `
infer (server, MESH-gateway)
  publish one (producer, MESH-gateway)
    queue one (internal, MESH-one)
    process one (consumer, MESH-one)
      wait one (internal, MESH-one)
      run one (internal, MESH-one)
      reply (client, MESH-one)
`)
	process := b.one(spans, "process one")
	b.has(process, map[string]any{"stagemesh.delivery": 2})
	if len(process.Events) != 1 || process.Events[0] != "redelivered" {
		t.Errorf("events %v", process.Events)
	}
	if queue := b.one(spans, "queue one"); queue.Took < time.Second/2 {
		t.Errorf("it was queued for %s", queue.Took)
	}
}

// A replay continues the trace of its request.
func TestDeadLetterAndItsReplay(t *testing.T) {
	t.Parallel()
	var heals atomic.Bool
	b := start(t, nil, serves("one", inproc.New(inproc.Settings{}, func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
		if !heals.Load() {
			return fmt.Errorf("%w: as always", runner.ErrCrashed)
		}
		return sink.SetOutcome(0, runner.Output(batch.Items[0].Inputs...))
	})))
	r := tracedRequest("x")
	r.Durability = pipeline.File
	if _, err := b.Infer(t.Context(), r); err == nil {
		t.Fatal("it did not fail")
	}
	var dead testbed.JaegerSpan
	testbed.Eventually(t, "the dead letter is in the trace", func() bool {
		for _, s := range b.jaeger.Spans(r.Trace.ID()) {
			if s.Name == "process one" {
				dead = s
			}
		}
		return dead.ID != ""
	})
	if got := strings.Join(dead.Events, " "); !strings.HasSuffix(got, "dead letter") || !strings.Contains(got, "quarantined") {
		t.Errorf("events %s", got)
	}
	b.has(dead, map[string]any{"error.type": "RUNNER_CRASHED", "error": true})
	heals.Store(true)
	operators := adminv1connect.NewDeadLetterServiceClient(&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, b.AdminURL())
	if _, err := operators.ReplayDeadLetter(t.Context(), connect.NewRequest(&adminv1.ReplayDeadLetterRequest{Seq: 1})); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the replay is in the trace", func() bool {
		return len(spansNamed(b.jaeger.Spans(r.Trace.ID()), "process one")) == 2
	})
}
