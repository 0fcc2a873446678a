package runnertest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Sources of models with an effect. A model adds its option "add" to every row, and has the
// bytes of its option "size".
const (
	// InvalidSource, TooLargeSource and BadSource fail: by ErrInvalidModel, ErrOutOfMemory and
	// any other error.
	InvalidSource  = "invalid"
	TooLargeSource = "too large"
	BadSource      = "bad"
	// CrashSource panics, or ends the process that loads it.
	CrashSource = "crash"
	// HoldSource loads until it is cancelled.
	HoldSource = "hold"
	// LoadsSource has as many bytes as models are being loaded.
	LoadsSource = "loads"
)

// ModelLimits are the limits of a runner under TestModels.
func ModelLimits() runner.ModelLimits {
	return runner.ModelLimits{
		Capacity: model.Size{Host: 1 << 20}, DefaultSize: model.Size{Host: 1 << 10}, LoadSlots: 2, LoadTimeout: time.Minute,
	}
}

// Errors of a ModelRuntime, for those who have others for them.
var (
	ErrInvalidSource = errors.New("this source is invalid")
	ErrTooLarge      = errors.New("this source is too large")
)

// ModelRuntime loads models in Go as TestModels expects.
type ModelRuntime struct{ loads atomic.Int64 }

// Load returns what the model adds to rows.
func (r *ModelRuntime) Load(ctx context.Context, source string, options map[string]string) (add int64, err error) {
	r.loads.Add(1)
	defer r.loads.Add(-1)
	switch source {
	case InvalidSource:
		return 0, ErrInvalidSource
	case TooLargeSource:
		return 0, ErrTooLarge
	case BadSource:
		return 0, ErrBad
	case CrashSource:
		panic("this source crashes its runner")
	case HoldSource:
		<-ctx.Done()
		return 0, ctx.Err()
	}
	return strconv.ParseInt(options["add"], 10, 64)
}

// Size returns the size of a model in bytes.
func (r *ModelRuntime) Size(source string, options map[string]string) int64 {
	if source == LoadsSource {
		return r.loads.Load()
	}
	size, _ := strconv.ParseInt(options["size"], 10, 64)
	return size
}

// AnswerModel answers rows by a model that adds a number to them.
func AnswerModel(ctx context.Context, add int64, in tensor.Tensor) (tensor.Tensor, error) {
	out, err := AnswerTensor(ctx, in)
	if err != nil {
		return out, err
	}
	rows, err := out.Int64Values()
	if err != nil {
		return out, err
	}
	for i := range rows {
		rows[i] += add
	}
	return tensor.FromInt64(in.Shape, rows)
}

// TestModels tests the runners of newRunner, which are ModelLoaders with ModelLimits.
func TestModels(t *testing.T, newRunner New) {
	t.Helper()
	runAll(t, newRunner, repositoryTests())
	runAll(t, newRunner, map[string]func(*testing.T, New){
		"IDsAreAnyText":        testAnyID,
		"ManyModelsLoadAtOnce": testManyModels,
		"LimitsAreReported":    testModelLimits,
		"FailedLoadHasItsKind": testFailedLoad,
		"CancelledLoadEnds":    testCancelledLoad,
		"SizesAreReported":     testSizes,
		"LoadSlotsBoundLoads":  testLoadSlots,
		"StopEndsLoads":        testStopEndsLoads,
	})
}

// TestRepository tests the runners of newRunner one after the other: ModelLoaders of one server
// that knows neither limits nor sizes, whose failures have no kinds, and which is slow with many
// models.
func TestRepository(t *testing.T, newRunner New) {
	t.Helper()
	for name, test := range repositoryTests() {
		t.Run(name, func(t *testing.T) { test(t, newRunner) })
	}
}

func repositoryTests() map[string]func(*testing.T, New) {
	return map[string]func(*testing.T, New){
		"ModelsAnswerAsThemselves": testModelsAnswer,
		"UnloadedModelIsGone":      testUnloadedModelIsGone,
		"AbsentUnloadSucceeds":     testAbsentUnload,
		"LoadsRunBesideBatches":    testLoadsBesideBatch,
		"CrashDuringLoadFailsIt":   testCrashDuringLoad,
		"SecondLoadKeepsTheModel":  testSecondLoad,
	}
}

// modelBed is a bed of a runner with models.
type modelBed struct {
	*bed
	runner.ModelLoader
}

func startModels(t *testing.T, newRunner New) modelBed {
	t.Helper()
	b := start(t, newRunner, 1)
	return modelBed{b, b.Runner.(runner.ModelLoader)}
}

func modelOf(id model.ID, add int64) model.Model {
	return model.Model{ID: id, Type: "adder", Options: model.NewOptions(map[string]string{"add": strconv.FormatInt(add, 10), "size": "4096"})}
}

func sourced(id model.ID, source string) model.Model {
	m := modelOf(id, 0)
	m.Source = source
	return m
}

func (b modelBed) load(m model.Model) runner.LoadedModel {
	b.Helper()
	loaded, err := b.Load(b.timeout(), m)
	if err != nil {
		b.Fatalf("load of %s: %v", m.ID, err)
	}
	return loaded
}

// loadAside loads on a goroutine.
func (b modelBed) loadAside(ctx context.Context, m model.Model) <-chan error {
	ended := make(chan error, 1)
	go func() {
		_, err := b.Load(ctx, m)
		ended <- err
	}()
	return ended
}

func (b modelBed) await(ended <-chan error) error {
	b.Helper()
	select {
	case err := <-ended:
		return err
	case <-b.timeout().Done():
		b.Fatal("it does not end")
		return nil
	}
}

// ask runs a batch of one row on a model.
func (b modelBed) ask(ctx context.Context, id model.ID, row int64) (int64, error) {
	b.Helper()
	s := b.newSink(1)
	item := newItem(row)
	err := b.acquire().Do(ctx, runner.Batch{Items: []runner.Item{item}, Rows: 1, Model: payload.ModelRef{Model: string(id)}}, s)
	s.close()
	switch o := s.outcomes[0]; {
	case err != nil:
		return 0, err
	case o == nil || o.Fault != nil:
		return 0, fmt.Errorf("outcome %+v", o)
	default:
		rows, err := rowsOfParts(o.Parts)
		if err != nil || len(rows) != 1 {
			return 0, fmt.Errorf("rows %d, %w", rows, err)
		}
		return rows[0], nil
	}
}

// checkAdds checks that a model answers as itself.
func (b modelBed) checkAdds(id model.ID, add int64) {
	b.Helper()
	if got, err := b.ask(b.timeout(), id, 7); err != nil || got != 7+add {
		b.Errorf("model %s makes 7 to %d, not %d: %v", id, got, 7+add, err)
	}
}

func (b modelBed) checkGone(id model.ID) {
	b.Helper()
	if got, err := b.ask(b.timeout(), id, 7); !errors.Is(err, runner.ErrModelGone) {
		b.Errorf("a batch of model %q got %d, %v", id, got, err)
	}
}

func (b modelBed) unload(id model.ID) {
	b.Helper()
	if err := b.Unload(b.timeout(), id); err != nil {
		b.Fatalf("unload of %s: %v", id, err)
	}
}

// awaitLoads waits until so many models are being loaded.
func (b modelBed) awaitLoads(n int64) {
	b.Helper()
	ctx, tick := b.timeout(), time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		size, err := b.Size(ctx, sourced("loads", LoadsSource))
		if err != nil {
			b.Fatalf("%d loads never run: %v", n, err)
		}
		if size.Host == n {
			return
		}
		<-tick.C
	}
}

func testModelsAnswer(t *testing.T, newRunner New) {
	b := startModels(t, newRunner)
	b.checkGone("")
	b.load(modelOf("a", 10))
	b.load(modelOf("b", 20))
	for range 3 {
		b.checkAdds("a", 10)
		b.checkAdds("b", 20)
		b.checkGone("c")
	}
}

func testAnyID(t *testing.T, newRunner New) {
	b := startModels(t, newRunner)
	b.load(modelOf("Ирис/7 ö", 20))
	b.checkAdds("Ирис/7 ö", 20)
	b.unload("Ирис/7 ö")
	b.checkGone("Ирис/7 ö")
}

func testModelLimits(t *testing.T, newRunner New) {
	b := startModels(t, newRunner)
	if got := b.ModelLimits(); got != ModelLimits() {
		t.Errorf("limits %+v, want %+v", got, ModelLimits())
	}
	if generation, _ := b.Models(); generation == 0 {
		t.Error("a runner that has started has no generation")
	}
}

func testUnloadedModelIsGone(t *testing.T, newRunner New) {
	b := startModels(t, newRunner)
	b.checkGone("a")
	b.load(modelOf("a", 10))
	b.load(modelOf("b", 20))
	b.unload("a")
	b.checkGone("a")
	b.checkAdds("b", 20)
	b.load(modelOf("a", 11))
	b.checkAdds("a", 11)
}

func testAbsentUnload(t *testing.T, newRunner New) {
	b := startModels(t, newRunner)
	b.unload("a")
	b.load(modelOf("a", 10))
	b.unload("a")
	b.unload("a")
}

func testFailedLoad(t *testing.T, newRunner New) {
	b := startModels(t, newRunner)
	b.load(modelOf("a", 10))
	for source, want := range map[string]error{InvalidSource: runner.ErrInvalidModel, TooLargeSource: runner.ErrOutOfMemory, BadSource: nil} {
		_, err := b.Load(b.timeout(), sourced("b", source))
		if err == nil || want != nil && !errors.Is(err, want) {
			t.Errorf("a source that is %s: %v", source, err)
		}
		for _, other := range []error{runner.ErrInvalidModel, runner.ErrOutOfMemory, runner.ErrCrashed, runner.ErrNotStarted} {
			if !errors.Is(want, other) && errors.Is(err, other) {
				t.Errorf("a source that is %s: %v is %v", source, err, other)
			}
		}
		b.checkGone("b")
	}
	b.load(modelOf("b", 20))
	b.checkAdds("a", 10)
	b.checkAdds("b", 20)
}

func testLoadsBesideBatch(t *testing.T, newRunner New) {
	b := startModels(t, newRunner)
	b.load(modelOf("a", 10))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := b.ask(ctx, "a", Hold)
		ended <- err
	}()
	for range 3 {
		b.load(modelOf("b", 20))
		b.unload("b")
	}
	b.load(modelOf("b", 20))
	select {
	case err := <-ended:
		t.Errorf("the batch that is held has ended: %v", err)
	default:
	}
	cancel()
	if err := b.await(ended); err == nil {
		t.Error("the batch that is held has an answer")
	}
	b.checkAdds("b", 20)
	b.checkAdds("a", 10)
}

func testCancelledLoad(t *testing.T, newRunner New) {
	b := startModels(t, newRunner)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := b.loadAside(ctx, sourced("a", HoldSource))
	b.awaitLoads(1)
	cancel()
	if err := b.await(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled load: %v", err)
	}
	b.awaitLoads(0)
	b.checkGone("a")
	b.load(modelOf("a", 10))
	b.checkAdds("a", 10)
	if _, err := b.Load(ctx, modelOf("b", 20)); !errors.Is(err, context.Canceled) {
		t.Errorf("a load whose context has ended: %v", err)
	}
	b.checkGone("b")
}

func testCrashDuringLoad(t *testing.T, newRunner New) {
	b := startModels(t, newRunner)
	b.load(modelOf("a", 10))
	before, _ := b.Models()
	_, err := b.Load(b.timeout(), sourced("b", CrashSource))
	if err == nil {
		t.Fatal("a load that crashes succeeds")
	}
	if !errors.Is(err, runner.ErrCrashed) {
		b.checkGone("b")
		b.checkAdds("a", 10)
		return
	}
	for ctx := b.timeout(); ; {
		generation, changed := b.Models()
		if generation != 0 && generation != before {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("the generation is %d, and was %d", generation, before)
		}
	}
	b.checkGone("a")
	b.load(modelOf("a", 10))
	b.checkAdds("a", 10)
}

func testSizes(t *testing.T, newRunner New) {
	b := startModels(t, newRunner)
	check := func(m model.Model, want int64) {
		t.Helper()
		if size, err := b.Size(b.timeout(), m); err != nil || size != (model.Size{Host: want}) {
			t.Errorf("size of %s: %+v, %v; want %d", m.ID, size, err, want)
		}
	}
	a := modelOf("a", 10)
	check(a, 4096)
	check(model.Model{ID: "unknown"}, 0)
	if loaded := b.load(a); loaded.Size != (model.Size{Host: 4096}) || loaded.MaxConcurrency != 3 {
		t.Errorf("loaded: %+v", loaded)
	}
	check(a, 4096)
	b.unload("a")
	check(a, 4096)
}

func testLoadSlots(t *testing.T, newRunner New) {
	b := startModels(t, newRunner)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	first := b.loadAside(ctx, sourced("a", HoldSource))
	second := b.loadAside(ctx, sourced("b", HoldSource))
	b.awaitLoads(2)
	if _, err := b.Load(b.timeout(), modelOf("c", 30)); !errors.Is(err, runner.ErrNotStarted) {
		t.Errorf("a third load beside two: %v", err)
	}
	b.awaitLoads(2)
	cancel()
	_, _ = b.await(first), b.await(second)
	b.load(modelOf("c", 30))
	b.checkAdds("c", 30)
}

func testStopEndsLoads(t *testing.T, newRunner New) {
	b := startModels(t, newRunner)
	ctx := b.timeout()
	ended := b.loadAside(ctx, sourced("a", HoldSource))
	b.awaitLoads(1)
	if err := b.Stop(ctx); err != nil {
		t.Errorf("Stop: %v", err)
	}
	if err := b.await(ended); err == nil || ctx.Err() != nil {
		t.Errorf("the load got %v", err)
	}
}

func testSecondLoad(t *testing.T, newRunner New) {
	b := startModels(t, newRunner)
	first := b.load(modelOf("a", 10))
	if again := b.load(modelOf("a", 10)); again != first {
		t.Errorf("%+v, and then %+v", first, again)
	}
	b.checkAdds("a", 10)
	b.unload("a")
	b.checkGone("a")
}

func testManyModels(t *testing.T, newRunner New) {
	b := startModels(t, newRunner)
	const models = 100
	slots, ended := make(chan struct{}, ModelLimits().LoadSlots), make(chan error, models)
	ctx := b.timeout()
	for i := range models {
		go func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			id := model.ID(fmt.Sprint("m", i))
			_, err := b.Load(ctx, modelOf(id, int64(i)))
			if err == nil && i%2 == 1 {
				err = b.Unload(ctx, id)
			}
			ended <- err
		}()
	}
	for range models {
		if err := b.await(ended); err != nil {
			t.Error(err)
		}
	}
	for i := range models {
		if id := model.ID(fmt.Sprint("m", i)); i%2 == 1 {
			b.checkGone(id)
		} else {
			b.checkAdds(id, int64(i))
		}
	}
}
