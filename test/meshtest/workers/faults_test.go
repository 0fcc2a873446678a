package workers

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/stagehost"
)

const size = 32

// wave returns the texts of the nth batch. The place of the poison item is another one in
// each of size batches.
func wave(n int, poison string) []string {
	out := texts(fmt.Sprint("good ", n), size)
	out[(n*7)%size] = fmt.Sprint(poison, " ", n)
	return out
}

// check fails the test unless the poison item of a wave has a fault of that reason, and
// the others their answers. It returns the number of faults.
func check(t *testing.T, answers []answer, poison string, reason fault.Reason) (faults int) {
	t.Helper()
	for _, a := range answers {
		if strings.HasPrefix(a.text, poison+" ") {
			a.checkFault(t, reason, "")
			faults++
			continue
		}
		a.checkEcho(t)
	}
	return faults
}

func TestCrashingPoisonFailsAlone(t *testing.T) {
	t.Parallel()
	// The poison item is at each place of a batch.
	const batches = size
	m := start(t, spec{file: "obedient.py", workers: 2, batch: full(size)})
	faults := 0
	for i := range batches {
		faults += check(t, m.inferAll(wave(i, "die")), "die", fault.RunnerCrashed)
	}
	if faults != batches {
		t.Errorf("%d of %d poisonous items were blamed", faults, batches)
	}
	whole := 0
	for _, e := range m.files.all("run") {
		if len(e.Texts) == size {
			whole++
		}
	}
	if whole != batches {
		t.Errorf("%d batches of %d items ran", whole, size)
	}
	t.Logf("%d items in %d batches, %d processes ended", batches*size, batches, m.exits())
	// Once with its neighbours, twice alone.
	if n := m.exits(); n != 3*batches {
		t.Errorf("%d processes ended for %d poisonous items", n, batches)
	}
}

func TestRaisingPoisonFailsAlone(t *testing.T) {
	t.Parallel()
	const batches, atOnce = 2 * size, 4
	m := start(t, spec{file: "obedient.py", workers: 2, batch: full(size)})
	var mu sync.Mutex
	var waves sync.WaitGroup
	faults, next := 0, make(chan int)
	for range atOnce {
		waves.Go(func() {
			for i := range next {
				n := check(t, m.inferAll(wave(i, "raise")), "raise", fault.RunnerFailed)
				mu.Lock()
				faults += n
				mu.Unlock()
			}
		})
	}
	for i := range batches {
		next <- i
	}
	close(next)
	waves.Wait()
	if faults != batches {
		t.Errorf("%d of %d poisonous items failed", faults, batches)
	}
	if n := m.exits(); n != 0 {
		t.Errorf("%d processes ended of exceptions", n)
	}
}

func TestOutOfMemoryHalvesTheBatchAndBlamesNobody(t *testing.T) {
	t.Parallel()
	const fits = 5
	m := start(t, spec{file: "obedient.py", options: map[string]any{"fits": fits}, batch: full(size)})
	for _, a := range m.inferAll(texts("fine", size)) {
		a.checkEcho(t)
	}
	var sizes []int
	for _, e := range m.files.all("run") {
		sizes = append(sizes, len(e.Texts))
	}
	t.Logf("batches of %v", sizes)
	// 1 + 2 + 4, and 8 that fit.
	if len(sizes) != 15 {
		t.Errorf("there were batches of %v", sizes)
	}
	m.checkNoExit()
}

func TestTooLargeItemIsOutOfMemory(t *testing.T) {
	t.Parallel()
	m := start(t, spec{file: "obedient.py", options: map[string]any{"fits": size}, batch: full(size)})
	texts := texts("fine", size)
	texts[7] = "huge"
	for _, a := range m.inferAll(texts) {
		if a.text == "huge" {
			a.checkFault(t, fault.RunnerOutOfMemory, "memory")
			continue
		}
		a.checkEcho(t)
	}
}

func TestFaultsReachTheRightCaller(t *testing.T) {
	t.Parallel()
	m := start(t, spec{file: "picky.py", batch: full(3)})
	for name, test := range map[string]struct {
		text   string
		reason fault.Reason
		// message is for the caller, logged for the operator.
		message, logged string
	}{
		"preprocess refuses an item": {"seven", fault.InvalidInput, "is not a number", ""},
		"preprocess raises":          {"crash", fault.RunnerFailed, "", "what the code looked for"},
		"an output is missing":       {"-1", fault.RunnerFailed, "request id", "returned no output 'double'"},
		"an output of another type":  {"-2", fault.RunnerFailed, "request id", "got a buffer of format 'd', expected FP32"},
		"a row too many":             {"-3", fault.RunnerFailed, "request id", "one for each row"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, a := range m.inferAll([]string{"1", test.text, "10"}) {
				if a.text == test.text {
					a.checkFault(t, test.reason, test.message)
					t.Logf("%s: %v", a.text, a.fault)
					continue
				}
				if a.fault != nil {
					t.Errorf("%s beside %s is answered with %v", a.text, test.text, a.fault)
					continue
				}
				values, err := a.response.Outputs[0].Tensor.FP32Values()
				if err != nil || len(values) != 1 || values[0] != map[string]float32{"1": 2, "10": 20}[a.text] {
					t.Errorf("%s is answered with %v, %v", a.text, values, err)
				}
			}
			if test.logged != "" {
				t.Log(m.log.Line(t, test.logged, "worker=0", "incarnation=1"))
			}
		})
	}
	m.checkNoExit()
}

func TestStageDecidesHowMuchOfAnExceptionCallersGet(t *testing.T) {
	t.Parallel()
	for level, test := range map[stagehost.ExposeErrors]struct{ hasMessage, hasTrace bool }{
		"":                        {},
		stagehost.ExposeNone:      {},
		stagehost.ExposeMessage:   {hasMessage: true},
		stagehost.ExposeTraceback: {hasMessage: true, hasTrace: true},
	} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			m := start(t, spec{file: "raising.py", host: func(s *stagehost.Settings) { s.ExposeErrors = level }})
			for text, message := range map[string]string{
				"predict":    "ValueError: cannot read 'weights.bin' of ",
				"preprocess": "KeyError: '" + strings.Repeat("k", 1000),
				"output":     "BadOutput: predict returned no output 'text'",
			} {
				f := m.infer(text).fault
				if f == nil || f.Reason != fault.RunnerFailed || len(f.Message) > 1<<10 || strings.Contains(f.Message, "/models") {
					t.Fatalf("%s is answered with %v", text, f)
				}
				if has := strings.HasPrefix(f.Message, message); has != test.hasMessage {
					t.Errorf("the caller gets %q", f.Message)
				}
				trace := f.Metadata["traceback"]
				if has := strings.HasPrefix(trace, "Traceback") && strings.Contains(trace, "in "+text); has != (test.hasTrace && text == "predict") && text != "preprocess" || len(trace) > 3<<10 || trace != "" && !test.hasTrace {
					t.Errorf("the traceback of %s is %q", text, trace)
				}
				m.log.Line(t, "level=ERROR", "failed on an item", "request="+f.Metadata["request_id"], message[:8])
			}
			f := m.infer("exit").fault
			if f == nil || f.Reason != fault.RunnerCrashed || !strings.HasSuffix(f.Message, "(exit code 7)") {
				t.Errorf("a worker that exits is %v", f)
			}
		})
	}
}

func TestTimeoutSaysWhetherItsWorkerHangs(t *testing.T) {
	t.Parallel()
	m := start(t, spec{file: "obedient.py", batch: batch.Settings{Mode: batch.Eager, MaxSize: 1}, host: func(s *stagehost.Settings) { s.MaxInFlight = 7 }})
	held := m.send(t.Context(), "hold on", func(r *request.Request) { r.Timeout = time.Second })
	testbed.Eventually(t, "the worker has it", func() bool { return len(m.files.all("run")) == 1 })
	m.inferWith(t.Context(), "waits", func(r *request.Request) { r.Timeout = 400 * time.Millisecond }).
		checkFault(t, fault.DeadlineExceeded, ", it waits in the queue of the stage")
	a := m.receive(held)
	a.checkFault(t, fault.DeadlineExceeded, ", a worker has run it for ")
	if a.fault.Step == "" || !strings.Contains(a.fault.Message, "at step "+a.fault.Step+", stage "+a.fault.Stage+", ") {
		t.Errorf("got %v at step %q", a.fault, a.fault.Step)
	}
}

func TestWorkerOutputIsLogged(t *testing.T) {
	t.Parallel()
	m := start(t, spec{file: "obedient.py", workers: 2})
	before := m.infer("print hello from within\nand a second line")
	before.checkEcho(t)
	for _, words := range []string{`"hello from within"`, `"and a second line"`} {
		line := m.log.Line(t, "msg="+words, "stream=stdout", "worker="+before.worker(), "incarnation=1", "stage=work")
		t.Log(strings.TrimSpace(line))
	}
}

// The worker misbehaves whenever a batch has that text. The tests of the runner have more
// cases; this one has what the callers get.
func TestMisbehavingWorkerFailsItsCallers(t *testing.T) {
	t.Parallel()
	for text, test := range map[string]struct {
		// reason is the reason of the item's fault, or "" for the right answer; beside is the reason of
		// its neighbours'.
		reason, beside fault.Reason
		// crashes is how many workers are replaced.
		crashes int
		cause   string
	}{
		"bytewise":      {"", "", 0, ""},
		"garbage":       {fault.RunnerCrashed, "", 3, "a frame begins with 48 54 54 50"},
		"half":          {fault.RunnerCrashed, "", 3, "a batch took too long"},
		"more items":    {fault.RunnerOutputInvalid, fault.RunnerOutputInvalid, 1, "there is no item 3"},
		"fewer items":   {fault.RunnerOutputInvalid, fault.RunnerOutputInvalid, 1, "neither outputs nor a fault"},
		"unknown batch": {fault.RunnerOutputInvalid, fault.RunnerOutputInvalid, 1, "does not have"},
		"twice":         {"", "", 1, "does not have"},
	} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			m := start(t, spec{
				file: "raw.py", workers: 2, batch: full(3),
				worker: func(s *worker.Settings) { s.RunLimit = time.Second },
			})
			for _, a := range m.inferAll([]string{"beside", text, "beside too"}) {
				want := test.beside
				if a.text == text {
					want = test.reason
				}
				if want == "" {
					a.checkEcho(t)
					continue
				}
				a.checkFault(t, want, "")
			}
			for range 4 {
				for _, a := range m.inferAll(texts("after", 3)) {
					a.checkEcho(t)
				}
			}
			causes := crashCauses(t, m, test.crashes)
			if !strings.Contains(causes, test.cause) {
				t.Errorf("the causes are %s, want %q", causes, test.cause)
			}
		})
	}
}

// crashCauses waits for so many crashes, and returns their causes.
func crashCauses(t *testing.T, m *mesh, n int) string {
	t.Helper()
	testbed.Eventually(t, fmt.Sprintf("%d processes end", n), func() bool { return m.exits() >= n })
	if got := m.exits(); got != n {
		t.Errorf("%d processes ended, want %d", got, n)
	}
	var causes []string
	for _, e := range m.transitions() {
		if e.Cause != nil {
			causes = append(causes, e.Cause.Error())
		}
	}
	return strings.Join(causes, "; ")
}

func TestWorkerSilentInFrameBlocksNoOther(t *testing.T) {
	t.Parallel()
	const limit = 2 * time.Second
	m := start(t, spec{
		file: "raw.py", workers: 2, worker: func(s *worker.Settings) { s.RunLimit = limit },
	})
	ctx, leave := context.WithCancel(t.Context())
	silent := m.send(ctx, "half")
	m.log.Line(t, "msg=silent")
	for _, a := range m.inferAll(texts("meanwhile", 32)) {
		a.checkEcho(t)
		if a.took > limit/2 {
			t.Errorf("%q waited %s for one that is silent", a.text, a.took)
		}
	}
	select {
	case a := <-silent:
		t.Errorf("the silent one is answered with %v, %v", a.response, a.fault)
	default:
	}
	leave()
	m.receive(silent).checkFault(t, fault.Cancelled, "")
}
