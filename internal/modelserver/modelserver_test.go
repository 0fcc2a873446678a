package modelserver_test

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stagemesh/stagemesh/proto/gen/go/mmesh"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/internal/modelserver"
	"github.com/stagemesh/stagemesh/internal/modelserver/modelservertest"
	"github.com/stagemesh/stagemesh/internal/passthrough"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newRunner(t *testing.T, s modelserver.Settings) *modelserver.Runner {
	t.Helper()
	r, err := modelserver.New(s)
	if err != nil {
		t.Fatal(err)
	}
	r.SetHost(runner.HostInfo{Models: &model.Size{}})
	t.Cleanup(func() {
		if err := r.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return r
}

// start starts a runner of a server.
func start(t *testing.T, server *modelservertest.Server) *modelserver.Runner {
	t.Helper()
	r := newRunner(t, modelserver.Settings{Address: server.Start(t)})
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return r
}

func load(t *testing.T, r *modelserver.Runner, m model.Model) runner.LoadedModel {
	t.Helper()
	out, err := r.Load(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func adder(id model.ID) model.Model {
	return model.Model{ID: id, Options: model.NewOptions(map[string]string{"add": "10", "size": "4096"})}
}

func TestServerIsAModelLoader(t *testing.T) {
	t.Parallel()
	runnertest.TestModels(t, func(t *testing.T, slots int) runner.Runner {
		return newRunner(t, modelserver.Settings{Address: (&modelservertest.Server{}).Start(t), Concurrency: slots})
	})
}

// outcomes is a sink.
type outcomes chan runner.Outcome

func (outcomes) Chunk(int, []payload.Part) error { return runner.ErrCancelled }

func (o outcomes) SetOutcome(_ int, outcome runner.Outcome) error {
	o <- outcome
	return nil
}

func itemOf(rows ...int64) runner.Item {
	x, err := tensor.FromInt64([]int64{int64(len(rows))}, rows)
	if err != nil {
		panic(err) // the shape fits the rows
	}
	return runner.Item{Inputs: []payload.Part{payload.OfTensor("x", x)}, Rows: 1}
}

// ask runs items on a model and returns the first rows of their outcomes, sorted.
func ask(ctx context.Context, t *testing.T, r *modelserver.Runner, id string, items ...runner.Item) (rows []int64, faults []*fault.Fault, err error) {
	t.Helper()
	slot, err := r.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	to := make(outcomes, len(items))
	err = slot.Do(ctx, runner.Batch{Items: items, Model: payload.ModelRef{Model: id}}, to)
	close(to)
	for o := range to {
		if o.Fault != nil {
			faults = append(faults, o.Fault)
			continue
		}
		values, err := o.Parts[0].Tensor.Int64Values()
		if err != nil {
			t.Error(err)
		}
		rows = append(rows, values[0])
	}
	slices.Sort(rows)
	return rows, faults, err
}

func TestItemsOfABatchFailAlone(t *testing.T) {
	t.Parallel()
	r := start(t, &modelservertest.Server{})
	load(t, r, adder("a"))
	typed := itemOf(1)
	typed.Parameters = payload.Parameters{"typed": payload.Bool(true)}
	rows, faults, err := ask(t.Context(), t, r, "a", typed, itemOf(runnertest.Bad), itemOf(2), runner.Item{})
	if err != nil || !slices.Equal(rows, []int64{11, 12}) || len(faults) != 2 {
		t.Fatalf("rows %d, faults %v, %v", rows, faults, err)
	}
	for _, f := range faults {
		if f.Reason != fault.RunnerFailed && f.Reason != fault.InvalidInput || f.Code.Number() == 0 {
			t.Errorf("a fault without the server's code: %+v", f)
		}
	}
}

func TestCancelledItemEndsAlone(t *testing.T) {
	t.Parallel()
	r := start(t, &modelservertest.Server{})
	load(t, r, adder("a"))
	cancelled := make(chan struct{})
	close(cancelled)
	held := itemOf(runnertest.Hold)
	held.Cancelled = cancelled
	rows, faults, err := ask(t.Context(), t, r, "a", held, itemOf(2))
	if err != nil || !slices.Equal(rows, []int64{12}) || len(faults) != 1 || faults[0].Reason != fault.Cancelled {
		t.Errorf("rows %d, faults %v, %v", rows, faults, err)
	}
}

func TestLostModelIsGone(t *testing.T) {
	t.Parallel()
	for name, unknown := range map[string]error{
		"any server": nil,
		"Triton":     status.Error(codes.Unavailable, "Request for unknown model: 'a' has no available versions"),
		"MLServer":   status.Error(codes.InvalidArgument, "Model a not found"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := &modelservertest.Server{Unknown: unknown}
			r := start(t, server)
			load(t, r, adder("a"))
			server.Forget("a")
			if _, _, err := ask(t.Context(), t, r, "a", itemOf(1)); !errors.Is(err, runner.ErrModelGone) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestHiddenSizeIsAsked(t *testing.T) {
	t.Parallel()
	server := &modelservertest.Server{HidesSizes: true}
	if got := load(t, start(t, server), adder("a")); got.Size != (model.Size{Host: 4096}) {
		t.Errorf("size %+v", got.Size)
	}
	if calls := server.Calls(); !slices.Equal(calls[len(calls)-2:], []string{"load a", "size a"}) {
		t.Errorf("calls %q", calls)
	}
}

func TestFailedLoadIsUndone(t *testing.T) {
	t.Parallel()
	for source, undone := range map[string]bool{runnertest.BadSource: true, runnertest.InvalidSource: false} {
		server := &modelservertest.Server{}
		r := start(t, server)
		if _, err := r.Load(t.Context(), model.Model{ID: "a", Source: source}); err == nil {
			t.Error("the load succeeds")
		}
		if calls := server.Calls(); slices.Contains(calls, "unload a") != undone {
			t.Errorf("calls %q after a load that is %s", calls, source)
		}
	}
}

// A server unloads everything before it says that it is ready, so it is not asked again.
func TestStatusIsAskedUntilReady(t *testing.T) {
	t.Parallel()
	server := &modelservertest.Server{StartsSlowly: 1}
	r := start(t, server)
	load(t, r, adder("a"))
	generation, _ := r.Models()
	before := server.Calls()
	ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
	defer cancel()
	_, _, _ = ask(ctx, t, r, "a", itemOf(runnertest.Hold)) // it lasts for longer than the pause between questions
	if now, _ := r.Models(); now != generation || !slices.Equal(server.Calls(), before) {
		t.Errorf("generation %d after %d, calls %q", now, generation, server.Calls())
	}
}

func TestServerThatRestartsLosesItsModels(t *testing.T) {
	t.Parallel()
	server := &modelservertest.Server{}
	r := start(t, server)
	load(t, r, adder("a"))
	before, changed := r.Models()
	running := make(chan error, 1)
	go func() {
		_, _, err := ask(t.Context(), t, r, "a", itemOf(runnertest.Hold))
		running <- err
	}()
	server.Stop()
	<-changed
	if err := <-running; !errors.Is(err, runner.ErrCrashed) && !errors.Is(err, runner.ErrNotStarted) {
		t.Errorf("the batch that ran got %v", err)
	}
	if _, err := r.Load(t.Context(), adder("b")); !errors.Is(err, runner.ErrNotStarted) {
		t.Errorf("a load without a server got %v", err)
	}
	if _, err := r.Health(); err == nil {
		t.Error("the runner is healthy without a server")
	}
	began := time.Now()
	if _, _, err := ask(t.Context(), t, r, "a", itemOf(1)); !errors.Is(err, runner.ErrNotStarted) || time.Since(began) < 2*time.Second {
		t.Errorf("a batch that waits for a server got %v after %s", err, time.Since(began))
	}
	server.Restart()
	for {
		now, changed := r.Models()
		if now != 0 {
			if now == before {
				t.Error("the new server has the old generation")
			}
			break
		}
		<-changed
	}
	if _, _, err := ask(t.Context(), t, r, "a", itemOf(1)); !errors.Is(err, runner.ErrModelGone) {
		t.Errorf("a batch for the lost model got %v", err)
	}
	load(t, r, adder("a"))
	if rows, _, err := ask(t.Context(), t, r, "a", itemOf(1)); err != nil || rows[0] != 11 {
		t.Errorf("rows %d, %v", rows, err)
	}
}

func TestStartNeedsModelsAndAServer(t *testing.T) {
	t.Parallel()
	server := &modelservertest.Server{StartsSlowly: 1000}
	r := newRunner(t, modelserver.Settings{Address: server.Start(t)})
	ctx, cancel := context.WithCancel(t.Context())
	started := make(chan error, 1)
	go func() { started <- r.Start(ctx) }()
	testbed.Eventually(t, "the server is asked again", func() bool { return len(server.Calls()) > 1 })
	cancel()
	if err := testbed.Receive(t, "end", started); err == nil || !strings.Contains(err.Error(), "STARTING") {
		t.Errorf("a server that does not become ready: %v", err)
	}
	r.SetHost(runner.HostInfo{})
	if err := r.Start(t.Context()); !errors.Is(err, modelserver.ErrNoModels) {
		t.Errorf("a stage without models: %v", err)
	}
}

func TestFailingServerIsToldFromOneThatStarts(t *testing.T) {
	t.Parallel()
	const starting, failing, ready = int32(mmesh.RuntimeStatusResponse_STARTING), int32(mmesh.RuntimeStatusResponse_FAILING), int32(mmesh.RuntimeStatusResponse_READY)
	var at atomic.Int32
	server := &modelservertest.Server{Options: []grpc.ServerOption{modelservertest.EditStatus(func(s *mmesh.RuntimeStatusResponse) {
		s.Status = mmesh.RuntimeStatusResponse_Status(at.Load())
	})}}
	r := newRunner(t, modelserver.Settings{Address: server.Start(t)})
	var log testbed.Log
	r.SetHost(runner.HostInfo{Models: &model.Size{}, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	started := make(chan error, 1)
	go func() { started <- r.Start(t.Context()) }()
	becomes := func(status int32, name string) {
		t.Helper()
		at.Store(status)
		testbed.Eventually(t, name, func() bool {
			_, err := r.Health()
			return err != nil && strings.Contains(err.Error(), name)
		})
		_, err := r.Health()
		if errors.Is(err, runner.ErrStartFailed) != (status == failing) {
			t.Errorf("%s is %v", name, err)
		}
	}
	becomes(starting, "STARTING")
	log.Line(t, "level=WARN", "waiting for the model server", "STARTING")
	becomes(failing, "FAILING")
	log.Line(t, "level=ERROR", "the model server fails", "FAILING")
	becomes(starting, "STARTING")
	at.Store(ready)
	if err := testbed.Receive(t, "end of the start", started); err != nil {
		t.Fatal(err)
	}
	log.Line(t, "level=INFO", "the model server is ready")
	load(t, r, adder("a"))

	at.Store(failing)
	server.Stop()
	server.Restart()
	becomes(failing, "FAILING")
	if _, err := r.Load(t.Context(), adder("a")); !errors.Is(err, runner.ErrNotStarted) || !strings.Contains(err.Error(), "FAILING") {
		t.Errorf("a load meanwhile: %v", err)
	}
	at.Store(ready)
	testbed.Eventually(t, "it recovers", func() bool { _, err := r.Health(); return err == nil })
	load(t, r, adder("a"))
	if n := strings.Count(log.String(), "level=ERROR"); n != 2 {
		t.Errorf("it failed twice, and %d times in the log:\n%s", n, log.String())
	}
}

// meter counts the calls of each model that run, each until the gate is closed. The model "zero"
// is loaded with a limit of 0.
type meter struct {
	gate      chan struct{}
	mu        sync.Mutex
	now, most map[string]int
}

func (m *meter) intercept(ctx context.Context, in any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if call, ok := in.(*oipv2.ModelInferRequest); ok {
		defer m.count(call.GetModelName(), -1)
		m.count(call.GetModelName(), 1)
		<-m.gate
	}
	out, err := next(ctx, in)
	if loaded, ok := out.(*mmesh.LoadModelResponse); ok && in.(*mmesh.LoadModelRequest).GetModelId() == "zero" {
		loaded.MaxConcurrency = 0
	}
	return out, err
}

func (m *meter) count(id string, by int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now[id] += by
	m.most[id] = max(m.most[id], m.now[id])
}

func (m *meter) running(id string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.now[id]
}

func TestServerLimitsTheCallsOfAModel(t *testing.T) {
	t.Parallel()
	const items = 8
	for name, want := range map[string]map[string]int{
		"limited":       {"a": 3, "b": 3, "zero": 1}, // the server's loads return 3
		"without limit": {"a": items, "b": items, "zero": items},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			calls := &meter{gate: make(chan struct{}), now: map[string]int{}, most: map[string]int{}}
			r := start(t, &modelservertest.Server{Options: []grpc.ServerOption{
				modelservertest.EditStatus(func(s *mmesh.RuntimeStatusResponse) { s.LimitModelConcurrency = want["a"] < items }),
				grpc.ChainUnaryInterceptor(calls.intercept),
			}})
			var batches errgroup.Group
			for id, most := range want {
				got := load(t, r, adder(model.ID(id))).MaxConcurrency
				if most < items && got != most || most == items && got != 0 {
					t.Errorf("the load of %s returns %d", id, got)
				}
				for half := range 2 { // the host runs batches of a model at once, too
					batches.Go(func() error {
						var batch []runner.Item
						for i := range items / 2 {
							batch = append(batch, itemOf(int64(items*half+i)))
						}
						rows, faults, err := ask(t.Context(), t, r, id, batch...)
						if len(rows) != len(batch) {
							t.Errorf("%s: rows %d, faults %v", id, rows, faults)
						}
						return err
					})
				}
			}
			for id, most := range want {
				testbed.Eventually(t, "its calls run", func() bool { return calls.running(id) == most })
			}
			if want["a"] < items { // an item that waits for its turn may be cancelled
				gone := itemOf(1)
				cancelled := make(chan struct{})
				close(cancelled)
				gone.Cancelled = cancelled
				if _, faults, err := ask(t.Context(), t, r, "a", gone); err != nil || len(faults) != 1 || faults[0].Reason != fault.Cancelled {
					t.Errorf("a cancelled item: %v, %v", faults, err)
				}
			}
			close(calls.gate)
			if err := batches.Wait(); err != nil {
				t.Error(err)
			}
			if !maps.Equal(calls.most, want) {
				t.Errorf("%v calls ran at a time, want %v", calls.most, want)
			}
		})
	}
}

// passTo passes a call of a method on to a model. The gateway has field 2 of the message for the ID.
func passTo(t *testing.T, r *modelserver.Runner, id, method string, message []byte) (runner.Outcome, error) {
	t.Helper()
	call := payload.OfBlob("request", "application/grpc+proto", message)
	call.Parameters = payload.Parameters{passthrough.Method: payload.String(method), passthrough.IDPath: payload.String("2")}
	slot, err := r.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	to := make(outcomes, 1)
	err = slot.Do(t.Context(), runner.Batch{Items: []runner.Item{{Inputs: []payload.Part{call}}}, Model: payload.ModelRef{Model: id}}, to)
	close(to)
	return <-to, err
}

func TestServerListsItsMethods(t *testing.T) {
	t.Parallel()
	const predict, other, infer = "predict.Predictor/Predict", "predict.Predictor/Other", "inference.GRPCInferenceService/ModelInfer"
	// The message has a field 1 that is a message, which may have the ID in its field 1.
	message, byGateway, byServer := []byte{1<<3 | 2, 0}, []byte{1<<3 | 2, 0, 2<<3 | 2, 1, 'a'}, []byte{1<<3 | 2, 3, 1<<3 | 2, 1, 'a'}
	paths := func(of map[string][]uint32) map[string]*mmesh.RuntimeStatusResponse_MethodInfo {
		out := map[string]*mmesh.RuntimeStatusResponse_MethodInfo{}
		for method, path := range of {
			out[method] = &mmesh.RuntimeStatusResponse_MethodInfo{IdInjectionPath: path}
		}
		return out
	}
	for name, row := range map[string]struct {
		methods map[string][]uint32
		any     bool
		want    map[string][]byte // the answers; the other methods are refused
		infers  bool
	}{
		"none":               {want: map[string][]byte{predict: byGateway, other: byGateway}, infers: true},
		"a path":             {methods: map[string][]uint32{predict: {1, 1}, infer: {1}}, want: map[string][]byte{predict: byServer}, infers: true},
		"no path":            {methods: map[string][]uint32{predict: nil}, want: map[string][]byte{predict: byGateway}},
		"others are allowed": {methods: map[string][]uint32{predict: {1, 1}}, any: true, want: map[string][]byte{predict: byServer, other: byGateway}, infers: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, &modelservertest.Server{Options: []grpc.ServerOption{modelservertest.EditStatus(func(s *mmesh.RuntimeStatusResponse) {
				s.MethodInfos, s.AllowAnyMethod = paths(row.methods), row.any
			})}})
			load(t, r, adder("a"))
			check := func(method string, f *fault.Fault, isTaken bool) {
				t.Helper()
				switch {
				case isTaken && f != nil:
					t.Errorf("%s: %v", method, f)
				case !isTaken && (f == nil || f.Reason != fault.NotSupported || f.GRPCCode() != code.Code_UNIMPLEMENTED || !strings.Contains(f.Message, method) || !strings.Contains(f.Message, predict)):
					t.Errorf("%s is not refused, with those that are taken: %v", method, f)
				}
			}
			for _, method := range []string{predict, other} {
				out, err := passTo(t, r, "a", method, message)
				check(method, out.Fault, row.want[method] != nil)
				if err != nil || len(out.Parts) > 0 && !slices.Equal(out.Parts[0].Blob.Data, row.want[method]) {
					t.Errorf("%s has the message %v, want %x, %v", method, out.Parts, row.want[method], err)
				}
			}
			_, faults, err := ask(t.Context(), t, r, "a", itemOf(1))
			if err != nil {
				t.Error(err)
			}
			check(infer, append(faults, nil)[0], row.infers)
		})
	}
	for name, path := range map[string][]uint32{"a field that cannot be": {1, 0}, "too long": slices.Repeat([]uint32{1}, 17)} {
		server := &modelservertest.Server{Options: []grpc.ServerOption{modelservertest.EditStatus(func(s *mmesh.RuntimeStatusResponse) {
			s.MethodInfos = paths(map[string][]uint32{predict: path})
		})}}
		r := newRunner(t, modelserver.Settings{Address: server.Start(t)})
		ctx, cancel := context.WithCancel(t.Context())
		started := make(chan error, 1)
		go func() { started <- r.Start(ctx) }()
		testbed.Eventually(t, "the server fails", func() bool {
			_, err := r.Health()
			return errors.Is(err, runner.ErrStartFailed) && strings.Contains(err.Error(), predict)
		})
		cancel()
		if err := testbed.Receive(t, "end", started); err == nil {
			t.Errorf("%s: the server is taken", name)
		}
	}
}

func TestServerWithTLSLoadsModels(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	address := (&modelservertest.Server{TLS: authority.Server("localhost")}).Start(t)
	r := newRunner(t, modelserver.Settings{Address: address, CAFile: authority.File})
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	load(t, r, adder("a"))
	if rows, _, err := ask(t.Context(), t, r, "a", itemOf(1)); err != nil || rows[0] != 11 {
		t.Errorf("rows %d, %v", rows, err)
	}
	for name, s := range map[string]modelserver.Settings{
		"without TLS":          {Address: address},
		"of another authority": {Address: address, CAFile: testbed.NewAuthority(t).File},
		"without its file":     {Address: address, CAFile: "none.pem"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := newRunner(t, s).Start(ctx); err == nil {
			t.Errorf("a client %s is taken", name)
		}
	}
}

func TestSettingsAreChecked(t *testing.T) {
	t.Parallel()
	for key, s := range map[string]modelserver.Settings{
		"address":      {Address: "unix:"},
		"control":      {Address: "unix:/a", Control: "http"},
		"data_address": {Address: "unix:/a", DataAddress: "b"},
		"concurrency":  {Address: "[::1]:8085", Concurrency: -1},
	} {
		if _, err := modelserver.New(s); err == nil || !strings.HasPrefix(err.Error(), key+": ") {
			t.Errorf("%s: %v", key, err)
		}
	}
}

func TestServerWithARepositoryLoadsModels(t *testing.T) {
	t.Parallel()
	server := &modelservertest.Server{}
	address := server.Start(t)
	other := newRunner(t, modelserver.Settings{Address: address})
	if err := other.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	load(t, other, adder("left"))

	r := newRunner(t, modelserver.Settings{Address: address, Control: modelserver.ControlRepository})
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, _, err := ask(t.Context(), t, r, "left", itemOf(1)); !errors.Is(err, runner.ErrModelGone) {
		t.Errorf("a model that was there before: %v", err)
	}
	if _, err := r.Load(t.Context(), model.Model{ID: "missing"}); !errors.Is(err, runner.ErrInvalidModel) {
		t.Errorf("a model that is not in the repository: %v", err)
	}
	load(t, r, model.Model{ID: "a"})
	if rows, _, err := ask(t.Context(), t, r, "a", itemOf(1)); err != nil || rows[0] != 11 {
		t.Errorf("rows %d, %v", rows, err)
	}
	for range 2 {
		if err := r.Unload(t.Context(), "a"); err != nil {
			t.Error(err)
		}
	}
	if _, _, err := ask(t.Context(), t, r, "a", itemOf(1)); !errors.Is(err, runner.ErrModelGone) {
		t.Errorf("a model that is unloaded: %v", err)
	}
}
