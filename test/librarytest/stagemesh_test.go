package librarytest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// sign returns a runner that appends a word to each input.
func sign(word string) *inproc.Runner {
	return inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
		return []payload.Part{payload.OfBlob("text", "text/plain", fmt.Appendf(nil, "%s %s", item.Inputs[0].Blob.Data, word))}, nil
	})
}

// double returns a runner that doubles every row of x.
func double() *inproc.Runner {
	x := runner.PartSpec{Name: "x", Datatype: tensor.Int64, Shape: []int64{-1, 2}}
	spec := runner.Spec{Inputs: []runner.PartSpec{x}, Outputs: []runner.PartSpec{x}}
	return inproc.Rows(inproc.Settings{Spec: spec}, func(_ context.Context, in map[string]tensor.Tensor) (map[string]tensor.Tensor, error) {
		values, err := in["x"].Int64Values()
		if err != nil {
			return nil, err
		}
		for i := range values {
			values[i] *= 2
		}
		x, err := tensor.FromInt64(in["x"].Shape, values)
		return map[string]tensor.Tensor{"x": x}, err
	})
}

// spell returns a runner that answers in chunks, letter by letter.
func spell() *inproc.Runner {
	return inproc.New(inproc.Settings{}, func(_ context.Context, b runner.Batch, sink runner.Sink) error {
		for i, item := range b.Items {
			text := item.Inputs[0].Blob.Data
			for at := range text {
				// Nobody may want more of it; the outcome ends the item all the same.
				_ = sink.Chunk(i, []payload.Part{payload.OfBlob("letter", "text/plain", text[at:at+1])})
			}
			if err := sink.SetOutcome(i, runner.Output(payload.OfBlob("text", "text/plain", text))); err != nil {
				return err
			}
		}
		return nil
	})
}

// newMesh returns a mesh of the stages, in order also the steps of a pipeline
// named all.
func newMesh(t *testing.T, s stagemesh.Settings, stages ...stagemesh.Stage) *stagemesh.Mesh {
	t.Helper()
	m, err := stagemesh.New(s)
	if err != nil {
		t.Fatal(err)
	}
	all := pipeline.Pipeline{Name: "all"}
	for _, stage := range stages {
		if err := m.AddStage(stage); err != nil {
			t.Fatal(err)
		}
		all.Steps = append(all.Steps, pipeline.Step{Name: pipeline.StepName(stage.Name), Stage: stage.Name})
	}
	if len(stages) == 0 {
		return m
	}
	if err := m.AddPipeline(all); err != nil {
		t.Fatal(err)
	}
	return m
}

func ask(t *testing.T, m *stagemesh.Mesh, name, text string) (string, error) {
	t.Helper()
	answer, err := m.Infer(t.Context(), &request.Request{Pipeline: name, Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte(text))}})
	if err != nil {
		return "", err
	}
	return string(answer.Outputs[0].Blob.Data), nil
}

// expect asks and compares.
func expect(t *testing.T, m *stagemesh.Mesh, name, text, want string) {
	t.Helper()
	if got, err := ask(t, m, name, text); err != nil || got != want {
		t.Errorf("%s: got %q, %v, want %q", name, got, err, want)
	}
}

// It runs alone, as it measures a time.
func TestMeshIsReadySoon(t *testing.T) {
	m := newMesh(t, stagemesh.Settings{Gateway: gateway.Settings{Config: gateway.Config{Listen: "127.0.0.1:0"}}}, stagemesh.Stage{Name: "a", Runner: sign("a")}, stagemesh.Stage{Name: "b", Runner: sign("b")})
	begin := time.Now()
	meshtest.Start(t, m)
	took := time.Since(begin)
	t.Logf("ready after %s", took.Round(time.Millisecond))
	if took > 3*time.Second {
		t.Errorf("it took %s", took)
	}
	if err := m.Ready(); err != nil {
		t.Error(err)
	}
	if url := m.URL(); !strings.HasPrefix(url, "http://127.0.0.1:") || strings.HasSuffix(url, ":0") {
		t.Errorf("got the address %v", url)
	}
	if url := m.BrokerURL(); url != "" {
		t.Errorf("a broker that nobody can join is at %s", url)
	}
	expect(t, m, "all", "to", "to a b")
	expect(t, m, "stage:b", "to", "to b")
}

func TestRowsOfManyCallersComeBackToThem(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "one", Runner: double()}, stagemesh.Stage{Name: "two", Runners: []runner.Runner{double(), double()}}))
	var calls sync.WaitGroup
	for i := range int64(100) {
		calls.Go(func() {
			x, err := tensor.FromInt64([]int64{2, 2}, []int64{i, -i, i + 1, 7})
			if err != nil {
				t.Error(err)
				return
			}
			answer, err := m.Infer(t.Context(), &request.Request{Pipeline: "all", Inputs: []payload.Part{payload.OfTensor("x", x)}})
			if err != nil {
				t.Errorf("%d: %v", i, err)
				return
			}
			got, err := answer.Outputs[0].Tensor.Int64Values()
			if want := []int64{4 * i, -4 * i, 4*i + 4, 28}; err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("got %v, %v, want %v", got, err, want)
			}
		})
	}
	calls.Wait()
}

func TestStreamHandsOutChunksBeforeTheOutcome(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "sign", Runner: sign("me")}, stagemesh.Stage{Name: "spell", Runner: spell()}))
	r := &request.Request{Pipeline: "all", Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("to"))}}
	var letters []string
	answer, err := m.Stream(t.Context(), r, func(c request.Chunk) error {
		letters = append(letters, string(c.Outputs[0].Blob.Data))
		if c.Seq != uint64(len(letters)) || c.RequestID == "" {
			t.Errorf("letter %d is message %d of request %q", len(letters), c.Seq, c.RequestID)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(letters, "-"); got != "t-o- -m-e" {
		t.Errorf("got the chunks %s", got)
	}
	if got := string(answer.Outputs[0].Blob.Data); got != "to me" || len(answer.Timeline.Steps) != 2 {
		t.Errorf("got the outcome %q after %d steps", got, len(answer.Timeline.Steps))
	}
}

func TestErrorOfEmitEndsTheStream(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "spell", Runner: spell()}))
	enough := errors.New("enough")
	calls := 0
	_, err := m.Stream(t.Context(), &request.Request{Pipeline: "all", Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("long"))}}, func(request.Chunk) error {
		calls++
		return enough
	})
	if f := fault.From(err); f.Reason != fault.Cancelled || !errors.Is(err, enough) || calls != 1 {
		t.Errorf("got %v after %d calls", err, calls)
	}
	expect(t, m, "all", "on", "on")
}

func TestUnstartedMeshReturnsErrNotStarted(t *testing.T) {
	t.Parallel()
	m := newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "a", Runner: sign("a")})
	if err := m.Ready(); !errors.Is(err, stagemesh.ErrNotStarted) {
		t.Errorf("ready: %v", err)
	}
	if err := m.Wait(t.Context()); !errors.Is(err, stagemesh.ErrNotStarted) {
		t.Errorf("wait: %v", err)
	}
	_, err := ask(t, m, "all", "to")
	if f, ok := errors.AsType[*fault.Fault](err); !ok || !errors.Is(err, stagemesh.ErrNotStarted) {
		t.Errorf("infer: %v, %v", f, err)
	}
	if _, err := m.Stream(t.Context(), &request.Request{Pipeline: "all"}, nil); !errors.Is(err, stagemesh.ErrNotStarted) {
		t.Errorf("stream: %v", err)
	}
	if _, err := m.Result(t.Context(), "", 0); !errors.Is(err, stagemesh.ErrNotStarted) {
		t.Errorf("result: %v", err)
	}
	if err := m.Cancel(t.Context(), ""); !errors.Is(err, stagemesh.ErrNotStarted) {
		t.Errorf("cancel: %v", err)
	}
	if m.URL() != "" || m.BrokerURL() != "" {
		t.Errorf("got the addresses %v and %q", m.URL(), m.BrokerURL())
	}
	meshtest.Stop(t, m)
	// That was not its end.
	meshtest.Start(t, m)
	expect(t, m, "all", "to", "to a")
}

// registrations is a meter that counts its callbacks.
type registrations struct {
	noop.Meter
	atomic.Int64
}

// RegisterCallback implements metric.Meter.
func (r *registrations) RegisterCallback(metric.Callback, ...metric.Observable) (metric.Registration, error) {
	r.Add(1)
	return &registration{of: r}, nil
}

// registration is one callback.
type registration struct {
	noop.Registration

	of   *registrations
	once sync.Once
}

// Unregister implements metric.Registration.
func (r *registration) Unregister() error {
	r.once.Do(func() { r.of.Add(-1) }) // a host unregisters its own when it ends
	return nil
}

func TestStopMayBeCalledMoreThanOnce(t *testing.T) {
	t.Parallel()
	var callbacks registrations
	m := newMesh(t, stagemesh.Settings{Meter: &callbacks}, stagemesh.Stage{Name: "a", Runner: sign("a")})
	if err := m.Validate(); err != nil || callbacks.Load() != 0 {
		t.Errorf("validated: %v, %d callbacks", err, callbacks.Load())
	}
	meshtest.Start(t, m)
	if n := callbacks.Load(); n < 5 {
		t.Errorf("a mesh that serves has %d callbacks", n)
	}
	var stops sync.WaitGroup
	for range 3 {
		stops.Go(func() { meshtest.Stop(t, m) })
	}
	stops.Wait()
	meshtest.Stop(t, m)
	if n := callbacks.Load(); n != 0 {
		t.Errorf("a stopped mesh leaves %d callbacks to its meter", n)
	}
	if err := m.Ready(); err == nil {
		t.Error("a stopped mesh is ready")
	}
	if m.URL() != "" {
		t.Errorf("a stopped mesh listens at %v", m.URL())
	}
	_, err := ask(t, m, "all", "to")
	if _, ok := errors.AsType[*fault.Fault](err); !ok {
		t.Errorf("infer: %v", err)
	}
}

func TestMeshIsStartedOnce(t *testing.T) {
	t.Parallel()
	m := newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "a", Runner: sign("a")})
	meshtest.Start(t, m)
	if err := m.Start(t.Context()); !errors.Is(err, stagemesh.ErrStarted) {
		t.Errorf("start: %v", err)
	}
	if err := m.AddStage(stagemesh.Stage{Name: "b", Runner: sign("b")}); !errors.Is(err, stagemesh.ErrStarted) {
		t.Errorf("stage: %v", err)
	}
	if err := m.AddPipeline(pipeline.OfStage("a")); !errors.Is(err, stagemesh.ErrStarted) {
		t.Errorf("pipeline: %v", err)
	}
	expect(t, m, "all", "to", "to a")
}

func TestReadyIsSafeDuringStart(t *testing.T) {
	t.Parallel()
	slow := make(chan struct{})
	loading := make(chan struct{})
	setup := func(ctx context.Context) error {
		close(loading)
		select {
		case <-slow:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	echo := func(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil }
	m := newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "a", Runner: inproc.Each(inproc.Settings{Setup: setup}, echo)})
	started := make(chan error, 1)
	go func() { started <- m.Start(t.Context()) }()
	<-loading
	if err := m.Ready(); err == nil || !strings.Contains(err.Error(), "start") {
		t.Errorf("got %v", err)
	}
	if m.URL() != "" {
		t.Errorf("got the address %v", m.URL())
	}
	_, err := ask(t, m, "all", "to")
	if f := fault.From(err); f.Reason != fault.NoCapacity {
		t.Errorf("got %v", err)
	}
	close(slow)
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	if err := m.Ready(); err != nil {
		t.Error(err)
	}
	meshtest.Stop(t, m)
}

// counted returns a stage whose runner counts how often it is running.
func counted(name pipeline.StageName, running *atomic.Int64) stagemesh.Stage {
	settings := inproc.Settings{
		Setup:    func(context.Context) error { running.Add(1); return nil },
		Teardown: func() error { running.Add(-1); return nil },
	}
	return stagemesh.Stage{Name: name, Runner: inproc.Each(settings, func(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil })}
}

func TestStartThatFailsStopsEverything(t *testing.T) {
	t.Parallel()
	broken := errors.New("no weights")
	failing := stagemesh.Stage{Name: "broken", Runner: inproc.Each(inproc.Settings{
		Setup: func(context.Context) error { return broken },
	}, nil)}
	taken := testbed.Listen(t)
	address := taken.Addr().String()
	for name, test := range map[string]struct {
		settings stagemesh.Settings
		stage    stagemesh.Stage
		want     string
	}{
		"a runner":              {stagemesh.Settings{}, failing, "stage broken: start of the runner: no weights"},
		"the gateway's address": {stagemesh.Settings{Gateway: gateway.Settings{Config: gateway.Config{Listen: address}}}, stagemesh.Stage{Name: "b", Runner: sign("b")}, "gateway.listen: listen tcp " + address},
		"the admin address":     {stagemesh.Settings{Gateway: gateway.Settings{Config: gateway.Config{Admin: gateway.Admin{Listen: address}}}}, stagemesh.Stage{Name: "b", Runner: sign("b")}, "gateway.admin.listen: listen tcp " + address},
		"a stage's address":     {stagemesh.Settings{}, stagemesh.Stage{Name: "b", Runner: sign("b"), Config: stagehost.Config{Listen: address}}, "stages.b.listen: listen tcp " + address},
		"the broker's address":  {stagemesh.Settings{NATS: meshfile.NATS{Listen: address}}, stagemesh.Stage{Name: "b", Runner: sign("b")}, "the broker in the process did not start: nats.listen: "},
		"no address":            {stagemesh.Settings{NATS: meshfile.NATS{Listen: "nowhere:at:all"}}, stagemesh.Stage{Name: "b", Runner: sign("b")}, "the broker in the process did not start: nats.listen: "},
		"the broker's folder":   {stagemesh.Settings{NATS: meshfile.NATS{StoreDir: os.DevNull}}, stagemesh.Stage{Name: "b", Runner: sign("b")}, "the broker in the process did not start: "},
		"the settings":          {stagemesh.Settings{Gateway: gateway.Settings{Config: gateway.Config{AllowOrigins: []string{"*", "http://x"}}}}, stagemesh.Stage{Name: "b", Runner: sign("b")}, "gateway.allow_origins[0]: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var running atomic.Int64
			var callbacks registrations
			test.settings.Meter = &callbacks
			m := newMesh(t, test.settings, counted("counted", &running), test.stage)
			err := m.Start(t.Context())
			if err == nil || !strings.HasPrefix(err.Error(), test.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %v, want %s", err, test.want)
			}
			if n := running.Load(); n != 0 {
				t.Errorf("%d runners are left running", n)
			}
			if n := callbacks.Load(); n != 0 {
				t.Errorf("%d callbacks are left to the meter", n)
			}
			if err := m.Ready(); err == nil {
				t.Error("a mesh that did not start is ready")
			}
			// There is nothing to stop any more.
			meshtest.Stop(t, m)
		})
	}
}

func TestStartEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	setup := func(ctx context.Context) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	}
	m := newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "a", Runner: inproc.Each(inproc.Settings{Setup: setup}, nil)})
	if err := m.Start(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	meshtest.Stop(t, m)
}

func TestStartEndsWhileABrokerIsAway(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	m := newMesh(t, stagemesh.Settings{NATS: meshfile.NATS{URL: "nats://127.0.0.1:1"}}, stagemesh.Stage{Name: "a", Runner: inproc.Each(inproc.Settings{}, nil)})
	started := make(chan error, 1)
	go func() { started <- m.Start(ctx) }()
	testbed.Eventually(t, "the stage waits for the broker", func() bool { return errors.Is(m.Ready(), bus.ErrDisconnected) })
	cancel()
	if err := <-started; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestWaitNamesTheFailedPart(t *testing.T) {
	t.Parallel()
	lost := sign("a")
	m := newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "a", Runner: lost}, stagemesh.Stage{Name: "b", Runner: sign("b")})
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := lost.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := "stage a: the runner is lost: "
	if err := m.Wait(t.Context()); err == nil || !strings.HasPrefix(err.Error(), want) || strings.Contains(err.Error(), "\n") {
		t.Errorf("got %v, want %s", err, want)
	}
	if err := m.Stop(); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("stop: got %v", err)
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "a", Runner: sign("a")}))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.Wait(ctx); err != nil {
		t.Errorf("got %v", err)
	}
}

func TestMeshesAreIsolated(t *testing.T) {
	t.Parallel()
	// Of one name, each with a broker of its own; and of another name at the
	// broker of the first.
	one := meshtest.Start(t, newMesh(t, stagemesh.Settings{NATS: meshfile.NATS{Listen: "127.0.0.1:0"}}, stagemesh.Stage{Name: "a", Runner: sign("one")}))
	two := meshtest.Start(t, newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "a", Runner: sign("two")}))
	three := meshtest.Start(t, newMesh(t, stagemesh.Settings{Mesh: "other", NATS: meshfile.NATS{URL: one.BrokerURL()}}, stagemesh.Stage{Name: "a", Runner: sign("three")}))
	if three.BrokerURL() != one.BrokerURL() {
		t.Errorf("got the brokers %s and %s", one.BrokerURL(), three.BrokerURL())
	}
	var calls sync.WaitGroup
	for range 20 {
		for want, m := range map[string]*stagemesh.Mesh{"from one": one, "from two": two, "from three": three} {
			calls.Go(func() { expect(t, m, "all", "from", want) })
		}
	}
	calls.Wait()
	meshtest.Stop(t, two)
	expect(t, one, "all", "from", "from one")
	expect(t, three, "all", "from", "from three")
}

func TestProcessesShareAMesh(t *testing.T) {
	t.Parallel()
	one := newMesh(t, stagemesh.Settings{NATS: meshfile.NATS{Listen: "127.0.0.1:0"}}, stagemesh.Stage{Name: "a", Runner: sign("a")})
	if err := one.AddPipeline(pipeline.Pipeline{Name: "both", Steps: []pipeline.Step{{Name: "a", Stage: "a"}, {Name: "b", Stage: "b"}}}); err != nil {
		t.Fatal(err)
	}
	meshtest.Start(t, one)
	_, err := ask(t, one, "both", "to")
	if f := fault.From(err); f.Reason != fault.NoCapacity {
		t.Errorf("without the other: %v", err)
	}
	two := meshtest.Start(t, newMesh(t, stagemesh.Settings{NATS: meshfile.NATS{URL: one.BrokerURL()}}, stagemesh.Stage{Name: "b", Runner: sign("b")}))
	expect(t, two, "all", "to", "to b")
	expect(t, two, "stage:a", "to", "to a")
	// What one has heard about b is good for a tenth of a second.
	testbed.Eventually(t, "the first process knows of the second", func() bool {
		_, err := ask(t, one, "both", "to")
		return err == nil
	})
	expect(t, one, "both", "to", "to a b")
}

// The variable that says where temporary files go is the process's, so this
// test does not run beside others.
func TestBrokerLeavesNoFilesBehind(t *testing.T) {
	folder := t.TempDir()
	t.Setenv("TMPDIR", folder)
	m := newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "a", Runner: sign("a")})
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if files, err := os.ReadDir(folder); err != nil || len(files) != 1 {
		t.Errorf("while it runs there are %v, %v", files, err)
	}
	meshtest.Stop(t, m)
	failing := newMesh(t, stagemesh.Settings{Gateway: gateway.Settings{Config: gateway.Config{Listen: "nowhere:at:all"}}}, stagemesh.Stage{Name: "a", Runner: sign("a")})
	if err := failing.Start(t.Context()); err == nil {
		t.Error("it has started")
	}
	if files, err := os.ReadDir(folder); err != nil || len(files) != 0 {
		t.Errorf("afterwards there are %v, %v", files, err)
	}
}

func TestConfiguredStoreFolderIsKept(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	m := newMesh(t, stagemesh.Settings{NATS: meshfile.NATS{StoreDir: folder}}, stagemesh.Stage{Name: "a", Runner: sign("a")})
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	meshtest.Stop(t, m)
	if files, err := os.ReadDir(folder); err != nil || len(files) == 0 {
		t.Errorf("it holds %v, %v", files, err)
	}
}

func TestInvalidStagesAreRejectedBeforeTheStart(t *testing.T) {
	t.Parallel()
	if _, err := stagemesh.New(stagemesh.Settings{Mesh: "Not A Name"}); err == nil {
		t.Error("the mesh's name is taken")
	}
	m := newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "a", Runner: sign("a")})
	for name, test := range map[string]struct {
		stage stagemesh.Stage
		want  string
	}{
		"a name":       {stagemesh.Stage{Name: "A", Runner: sign("a")}, "stage A: "},
		"no runner":    {stagemesh.Stage{Name: "b"}, "stage b: runner: is required"},
		"one ID twice": {stagemesh.Stage{Name: "b", Host: "h", Runners: []runner.Runner{sign("b"), sign("b")}}, `stage b: host: 2 hosts would have the ID "h"; leave it out, or have one`},
		"no size":      {stagemesh.Stage{Name: "b", Runner: sign("b"), Config: stagehost.Config{MaxInFlight: 1}}, "stage b: max_in_flight: "},
		"a name twice": {stagemesh.Stage{Name: "a", Runner: sign("a")}, "stage a: there is one of that name"},
	} {
		if err := m.AddStage(test.stage); err == nil || !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %s", name, err, test.want)
		}
	}
	if err := m.AddPipeline(pipeline.Pipeline{Name: "empty"}); err == nil {
		t.Error("a pipeline without steps is taken")
	}
	if err := m.Validate(); err != nil {
		t.Errorf("what was refused has stayed: %v", err)
	}
	if err := m.AddPipeline(pipeline.Pipeline{Name: "all", Steps: pipeline.OfStage("a").Steps}); err != nil {
		t.Fatal(err)
	}
	if err := m.Validate(); err == nil || !strings.Contains(err.Error(), "two pipelines have that name") {
		t.Errorf("got %v", err)
	}
}
