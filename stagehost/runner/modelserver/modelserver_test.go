package modelserver_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/modelserver"
	"github.com/stagemesh/stagemesh/stagehost/runner/modelserver/modelservertest"
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
		panic(err) // the shape is that of the rows
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
