// Package traces tests what a real Jaeger gets of requests.
package traces_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// shared is the Jaeger of all tests.
var shared = sync.OnceValues(func() (*testbed.Jaeger, error) {
	folder, err := os.MkdirTemp("", "jaeger-")
	if err != nil {
		return nil, err
	}
	j, err := testbed.NewJaeger(folder)
	if err == nil {
		err = j.Start()
	}
	return j, err
})

func TestMain(m *testing.M) {
	if os.Getenv(hostProcess) != "" {
		if err := stagemesh.Serve(stagemesh.KindOf("hold", newHold)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // this is main
		}
		return
	}
	testbed.Tests{End: func() {
		if j, err := shared(); err == nil {
			j.End()
		}
	}}.Main(m)
}

func jaeger(t *testing.T) *testbed.Jaeger {
	t.Helper()
	j, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// bed is a mesh whose spans go to Jaeger.
type bed struct {
	*stagemesh.Mesh
	*testing.T

	jaeger *testbed.Jaeger
	name   string
	log    *testbed.Log
	// ops is the URL of the operations port.
	ops string
}

var beds atomic.Int64

// serves is a stage of a test.
func serves(name pipeline.StageName, r runner.Runner, edits ...func(*stagemesh.Stage)) stagemesh.Stage {
	s := stagemesh.Stage{Name: name, Runner: r}
	for _, edit := range edits {
		edit(&s)
	}
	return s
}

// start starts a mesh with a pipeline p of the stages. Unless the edit changes that, a request
// is traced if its caller traces it, and all items pass the broker.
func start(t *testing.T, edit func(*stagemesh.Settings, *tracing.Config), stages ...stagemesh.Stage) *bed {
	t.Helper()
	p := pipeline.Pipeline{Name: "p"}
	for _, stage := range stages {
		p.Steps = append(p.Steps, pipeline.Step{Name: pipeline.StepName(stage.Name), Stage: stage.Name})
	}
	return startPipeline(t, edit, p, stages...)
}

// startPipeline is start with another pipeline.
func startPipeline(t *testing.T, edit func(*stagemesh.Settings, *tracing.Config), p pipeline.Pipeline, stages ...stagemesh.Stage) *bed {
	t.Helper()
	b := &bed{T: t, jaeger: jaeger(t), name: fmt.Sprint("mesh", beds.Add(1)), log: &testbed.Log{}}
	none := 0.0
	s := stagemesh.Settings{Mesh: pipeline.MeshName(b.name), NoLocalHops: true, Logger: slog.New(slog.NewJSONHandler(b.log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	s.Gateway.Listen, s.Gateway.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	s.Gateway.Call.Sampling = tracing.Sampling{Sample: &none, ParentsPerSecond: 1000}
	c := tracing.Config{Endpoint: b.jaeger.GRPC()}
	if edit != nil {
		edit(&s, &c)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(b.log)
		}
	})
	port := b.runProgram(c)
	s.TracerProvider, s.Meter = port.TracerProvider(), port.Meter()
	b.ops = "http://" + port.Addr().String()
	var err error
	if b.Mesh, err = stagemesh.New(s); err != nil {
		t.Fatal(err)
	}
	for _, stage := range stages {
		if stage.Runner != nil { // else its hosts are other processes
			if err := b.AddStage(stage); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := b.AddPipeline(p); err != nil {
		t.Fatal(err)
	}
	meshtest.Start(t, b.Mesh)
	return b
}

// runProgram runs what a program has beside its work, until the test ends.
func (b *bed) runProgram(c tracing.Config) *program.Port {
	b.Helper()
	ctx, stop := context.WithCancel(context.Background())
	ready, ended := make(chan *program.Port, 1), make(chan error, 1)
	s := program.Settings{Listen: "127.0.0.1:0", Key: "--ops", Tracing: c, Logger: slog.New(slog.NewJSONHandler(b.log, nil))}
	go func() {
		ended <- program.Run(ctx, s, func(ctx context.Context, p *program.Port) error {
			ready <- p
			<-ctx.Done()
			return nil
		})
	}()
	b.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			b.Errorf("program: %v", err)
		}
	})
	select {
	case p := <-ready:
		return p
	case err := <-ended:
		ended <- err
		b.Fatal(err)
		return nil
	}
}

// echo answers with the input.
func echo() runner.Runner {
	return inproc.Each(inproc.Settings{Concurrency: 8}, func(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil })
}

// newTrace returns the context of a caller that traces its request.
func newTrace() envelope.Trace {
	id := fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64()|1)
	return envelope.Trace{Parent: "00-" + id + "-00f067aa0ba902b7-01"}
}

// tracedRequest returns a traced request of a text.
func tracedRequest(text string) *request.Request {
	return &request.Request{Pipeline: "p", Trace: newTrace(), Inputs: []payload.Part{payload.OfBlob("x", "text/plain", []byte(text))}}
}

// spans waits until the trace of a request has so many spans.
func (b *bed) spans(of envelope.Trace, n int) []testbed.JaegerSpan {
	b.Helper()
	return b.jaeger.Trace(b, of.ID(), n)
}

// tree checks the spans of a trace, in which MESH stands for the mesh's name.
func (b *bed) tree(of envelope.Trace, want string) []testbed.JaegerSpan {
	b.Helper()
	want = strings.ReplaceAll(strings.TrimPrefix(want, "\n"), "MESH", b.name)
	spans := b.spans(of, strings.Count(want, "\n"))
	if got := testbed.Tree(spans); got != want {
		b.Errorf("the trace is\n%swant\n%s", got, want)
	}
	return spans
}

// spansNamed returns the spans of a name.
func spansNamed(spans []testbed.JaegerSpan, name string) (out []testbed.JaegerSpan) {
	for _, s := range spans {
		if s.Name == name {
			out = append(out, s)
		}
	}
	return out
}

// one returns the only span of a name.
func (b *bed) one(spans []testbed.JaegerSpan, name string) testbed.JaegerSpan {
	b.Helper()
	found := spansNamed(spans, name)
	if len(found) != 1 {
		b.Fatalf("%d spans are %q:\n%s", len(found), name, testbed.Tree(spans))
	}
	return found[0]
}

// has checks tags of a span; nil stands for a tag that is not there.
func (b *bed) has(s testbed.JaegerSpan, tags map[string]any) {
	b.Helper()
	for key, want := range tags {
		if got := s.Tags[key]; fmt.Sprint(got) != fmt.Sprint(want) {
			b.Errorf("span %s: %s is %v, want %v", s.Name, key, got, want)
		}
	}
}

// metrics returns the metrics of the program.
func (b *bed) metrics() string {
	b.Helper()
	_, text := testbed.Get(b, b.ops+"/metrics")
	return text
}

// openMetrics returns the metrics in the format that has exemplars.
func (b *bed) openMetrics() string {
	b.Helper()
	r, err := http.NewRequestWithContext(b.Context(), http.MethodGet, b.ops+"/metrics", http.NoBody)
	if err != nil {
		b.Fatal(err)
	}
	r.Header.Set("Accept", "application/openmetrics-text")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(r)
	if err != nil {
		b.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		b.Fatal(err)
	}
	return string(text)
}
