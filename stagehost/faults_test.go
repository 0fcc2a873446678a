package stagehost_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

const batchSize = 32

// askMany asks n requests whose texts are their numbers.
func (b *bed) askMany(n int) []*call {
	b.t.Helper()
	calls := make([]*call, n)
	for i := range calls {
		calls[i] = b.ask(strconv.Itoa(i))
	}
	return calls
}

// checkEcho makes sure that the calls are answered with their input.
func checkEcho(t *testing.T, calls ...*call) {
	t.Helper()
	for _, c := range calls {
		if got := first(c.output().Parts); got != c.text() {
			t.Errorf("request %s is answered with %q", c.text(), got)
		}
		c.answeredOnce()
	}
}

func TestBadItemFailsAlone(t *testing.T) {
	t.Parallel()
	chosen := fault.New(fault.InvalidInput, "this is not an image")
	for _, test := range []struct {
		name string
		err  func() error
		want fault.Reason
	}{
		{"by an error", func() error { return errors.New("no") }, fault.RunnerFailed},
		{"by a fault of its own", func() error { return fmt.Errorf("decode: %w", chosen) }, fault.InvalidInput},
		{"by a panic", func() error { panic("no") }, fault.RunnerFailed},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, b *bed) {
				h := b.host(inproc.Each(inproc.Settings{}, func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
					if first(item.Inputs) == "7" {
						return nil, test.err()
					}
					return echo(ctx, item)
				}), together(batchSize))
				calls := b.askMany(batchSize)
				f := calls[7].fault(test.want)
				if f.Stage != string(stage) || f.Step != "step" || f.Host == "" {
					t.Errorf("the fault happened at stage %q, step %q, host %q", f.Stage, f.Step, f.Host)
				}
				checkEcho(t, slices.Delete(calls, 7, 8)...)
				b.emptied()
				if n := h.counts.Of("stagemesh.stage.batches"); n != 1 {
					t.Errorf("%d batches for one that is settled item by item", n)
				}
			})
		})
	}
}

func TestFailedRunIsInTheTimeline(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		const took = 20 * time.Millisecond
		b.host(batches(func(ctx context.Context, _ runner.Batch, _ runner.Sink) error {
			ctx, cancel := context.WithTimeout(ctx, took)
			defer cancel()
			<-ctx.Done()
			return errors.New("broken")
		}))
		r := b.ask("x").next()
		if r.Fault == nil || r.Fault.Reason != fault.RunnerFailed || r.Timings[0].Run < took {
			t.Errorf("answered with %+v", r)
		}
	})
}

// The runner says only that the batch failed; the host finds out which items
// are at fault.
func TestBisectionFindsThePoisonItem(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		poison []int
		fail   func() error
		want   fault.Reason
		most   int64
	}{
		{"first of 32 fails", []int{0}, func() error { return errors.New("no") }, fault.RunnerFailed, 11},
		{"20th of 32 fails", []int{19}, func() error { return errors.New("no") }, fault.RunnerFailed, 11},
		{"last of 32 panics", []int{31}, func() error { panic("no") }, fault.RunnerFailed, 11},
		{"two of 32", []int{3, 28}, func() error { return errors.New("no") }, fault.RunnerFailed, 19},
		{"a reason of its own", []int{5}, func() error { return fault.New(fault.InvalidInput, "no") }, fault.InvalidInput, 11},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, b *bed) {
				h := b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
					for _, item := range batch.Items {
						if n, _ := strconv.Atoi(first(item.Inputs)); slices.Contains(test.poison, n) {
							return test.fail()
						}
					}
					return settleAll(batch, sink)
				}), together(batchSize))
				calls := b.askMany(batchSize)
				for i, c := range calls {
					if slices.Contains(test.poison, i) {
						c.fails(test.want)
						continue
					}
					checkEcho(t, c)
				}
				b.emptied()
				if n := h.counts.Of("stagemesh.stage.batches"); n > test.most {
					t.Errorf("%d batches, at most %d are needed", n, test.most)
				}
			})
		})
	}
}

func TestOutOfMemoryHalvesTheBatch(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
			for _, item := range batch.Items {
				if len(batch.Items) > 4 || first(item.Inputs) == "9" {
					return fmt.Errorf("allocate: %w", runner.ErrOutOfMemory)
				}
			}
			return settleAll(batch, sink)
		}), together(batchSize))
		calls := b.askMany(batchSize)
		if f := calls[9].fault(fault.RunnerOutOfMemory); f.Retryable() {
			t.Errorf("%v may be retried, though it ran alone twice", f)
		}
		checkEcho(t, slices.Delete(calls, 9, 10)...)
		b.emptied()
	})
}

func TestItemThatRanOutOfMemoryRunsAlone(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		runs := make(map[string]int)
		b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
			for i, item := range batch.Items {
				name := first(item.Inputs)
				out := runner.Output(item.Inputs...)
				if runs[name]++; name == "9" || name == "7" && len(batch.Items) > 1 {
					out = runner.Failed(fault.New(fault.RunnerOutOfMemory, "no space for it"))
				}
				if err := sink.SetOutcome(i, out); err != nil {
					return err
				}
			}
			return nil
		}), together(batchSize))
		calls := b.askMany(batchSize)
		if f := calls[9].fault(fault.RunnerOutOfMemory); f.Retryable() || f.Message != "no space for it" {
			t.Errorf("%v, though it ran alone twice", f)
		}
		checkEcho(t, slices.Delete(calls, 9, 10)...)
		b.emptied()
		if runs["7"] != 2 || runs["9"] != 3 || runs["1"] != 1 {
			t.Errorf("the items ran so often: %v", runs)
		}
	})
}

func TestItemSettledBeforeItsBatchFailsKeepsItsOutcome(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		var ran sync.Map
		b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
			for i, item := range batch.Items {
				if first(item.Inputs) == "20" {
					return errors.New("no")
				}
				if _, twice := ran.LoadOrStore(first(item.Inputs), true); twice {
					t.Errorf("item %s ran again after it had its outcome", first(item.Inputs))
				}
				if err := sink.SetOutcome(i, runner.Output(item.Inputs...)); err != nil {
					return err
				}
			}
			return nil
		}), together(batchSize))
		calls := b.askMany(batchSize)
		calls[20].fails(fault.RunnerFailed)
		checkEcho(t, slices.Delete(calls, 20, 21)...)
		b.emptied()
	})
}

func TestMissingOutcomeIsTheRunnersFault(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
			for i, item := range batch.Items {
				if first(item.Inputs) == "1" {
					continue
				}
				if err := sink.SetOutcome(i, runner.Output(item.Inputs...)); err != nil {
					return err
				}
			}
			return nil
		}), together(3))
		calls := b.askMany(3)
		calls[1].fails(fault.RunnerOutputInvalid)
		checkEcho(t, calls[0], calls[2])
		b.emptied()
	})
}

func TestSecondOutcomeIsRefused(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		refusals := make(chan error, 8)
		late := make(chan runner.Sink, 1)
		h := b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
			if err := settleAll(batch, sink); err != nil {
				return err
			}
			refusals <- sink.SetOutcome(0, runner.Failed(fault.New(fault.Internal, "second")))
			refusals <- sink.SetOutcome(-1, runner.Output())
			refusals <- sink.SetOutcome(len(batch.Items), runner.Output())
			refusals <- sink.Chunk(0, nil)
			refusals <- sink.Chunk(len(batch.Items), nil)
			late <- sink
			return nil
		}))
		c := b.ask("first")
		checkEcho(t, c)
		for _, want := range []error{runner.ErrOutcomeSet, runner.ErrNoSuchItem, runner.ErrNoSuchItem, runner.ErrOutcomeSet, runner.ErrNoSuchItem} {
			if err := <-refusals; !errors.Is(err, want) {
				t.Errorf("refused with %v, want %v", err, want)
			}
		}
		b.emptied()
		if err := (<-late).SetOutcome(0, runner.Output()); !errors.Is(err, runner.ErrOutcomeSet) {
			t.Errorf("an outcome after its batch is refused with %v", err)
		}
		c.answeredOnce()
		h.awaitCount("stagemesh.stage.faults OUTCOME_REFUSED", 4)
	})
}

func TestBatchThatDidNotStartIsRetried(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		losses int64
		lost   bool
	}{
		{"a few times", 3, false},
		{"always", 1 << 30, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, b *bed) {
				var starts atomic.Int64
				b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
					if len(batch.Items) != 4 {
						t.Errorf("the batch is run again as %d of its 4 items", len(batch.Items))
					}
					if starts.Add(1) <= test.losses {
						return fmt.Errorf("worker gone: %w", runner.ErrNotStarted)
					}
					return settleAll(batch, sink)
				}), together(4))
				calls := b.askMany(4)
				for _, c := range calls {
					if test.lost {
						c.fails(fault.RunnerFailed)
						continue
					}
					checkEcho(t, c)
				}
				b.emptied()
				if n := starts.Load(); test.lost && n > 20 {
					t.Errorf("%d tries for a batch that never starts", n)
				}
			})
		})
	}
}

func outputSpec() runner.Spec {
	return runner.Spec{
		Inputs:    []runner.PartSpec{{Name: "x", Datatype: tensor.Int64, Shape: []int64{-1, 2}}},
		Outputs:   []runner.PartSpec{{Name: "y", Datatype: tensor.Int64, Shape: []int64{-1, 1}}},
		BatchAxis: runner.BatchRows,
	}
}

func ints(t *testing.T, name string, shape []int64, values ...int64) payload.Part {
	t.Helper()
	made, err := tensor.FromInt64(shape, values)
	if err != nil {
		t.Fatal(err)
	}
	return payload.OfTensor(name, made)
}

// onRoute is an edit that has a second step follow the stage's, or none.
func onRoute(last bool) func(*envelope.Envelope) {
	return func(e *envelope.Envelope) {
		if !last {
			e.Route = append(e.Route, pipeline.Hop{Step: "after", Stage: "after"})
		}
	}
}

func TestWrongOutputIsTheRunnersFault(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		good := ints(t, "y", []int64{2, 1}, 1, 2)
		short := good
		short.Tensor = &tensor.Tensor{Datatype: tensor.Int64, Shape: []int64{2, 1}, Raw: []byte{1}}
		floats := payload.OfTensor("y", tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{2, 1}, Raw: make([]byte, 8)})
		var many []payload.Part
		for i := range payload.MaxParts {
			many = append(many, payload.OfBlob(strconv.Itoa(i), "", nil))
		}
		tests := []struct {
			name    string
			outcome runner.Outcome
		}{
			{"none", runner.Output()},
			{"another name", runner.Output(ints(t, "z", []int64{2, 1}, 1, 2))},
			{"another datatype", runner.Output(floats)},
			{"another shape", runner.Output(ints(t, "y", []int64{2, 2}, 1, 2, 3, 4))},
			{"another rank", runner.Output(ints(t, "y", []int64{2}, 1, 2))},
			{"too few rows", runner.Output(ints(t, "y", []int64{1, 1}, 1))},
			{"too many rows", runner.Output(ints(t, "y", []int64{3, 1}, 1, 2, 3))},
			{"a blob for a tensor", runner.Output(payload.OfBlob("y", "text/plain", nil))},
			{"fewer bytes than its shape says", runner.Output(short)},
			{"a name twice", runner.Output(good, good)},
			{"a name twice beside the spec", runner.Output(good, payload.OfBlob("z", "", nil), payload.OfBlob("z", "", nil))},
			{"a name that is not text", runner.Output(good, payload.OfBlob("\xff", "", nil))},
			{"a name that is too long", runner.Output(good, payload.OfBlob(strings.Repeat("n", payload.MaxName+1), "", nil))},
			{"too many parts", runner.Output(append(many, good)...)},
			{"a content type that is not text", runner.Output(good, payload.OfBlob("z", "\xff", nil))},
			{"metadata that are no text", runner.Outcome{Parts: []payload.Part{good}, Metadata: map[string]string{"k": "\xff"}}},
		}
		b.host(inproc.New(inproc.Settings{Spec: outputSpec()}, func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
			which, err := batch.Items[0].Inputs[0].Tensor.Int64Values()
			if err != nil {
				return err
			}
			return sink.SetOutcome(0, tests[which[0]].outcome)
		}), together(2))
		for i, test := range tests {
			for _, last := range []bool{true, false} {
				if test.outcome.Metadata != nil && !last {
					continue // only the last step's metadata are the answer's
				}
				t.Run(fmt.Sprintf("%s, last step %t", test.name, last), func(t *testing.T) {
					c := b.askParts([]payload.Part{ints(t, "x", []int64{2, 2}, int64(i), 0, 0, 0)}, onRoute(last))
					c.t = t
					c.fails(fault.RunnerOutputInvalid)
				})
			}
		}
		b.emptied()
	})
}

// A function of whole batches that returns the wrong number of rows is at
// fault whatever the items.
func TestWrongRowCountFailsTheBatchAtOnce(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		spec := outputSpec()
		h := b.host(inproc.Rows(inproc.Settings{Spec: spec}, func(context.Context, map[string]tensor.Tensor) (map[string]tensor.Tensor, error) {
			return map[string]tensor.Tensor{"y": *ints(t, "y", []int64{1, 1}, 1).Tensor}, nil
		}), together(4))
		var calls []*call
		for range 4 {
			calls = append(calls, b.askParts([]payload.Part{ints(t, "x", []int64{1, 2}, 1, 2)}))
		}
		for _, c := range calls {
			c.fails(fault.RunnerOutputInvalid)
		}
		b.emptied()
		if n := h.counts.Of("stagemesh.stage.batches"); n != 1 {
			t.Errorf("%d batches", n)
		}
	})
}

// Whatever a runner says about an item gets to the caller as a fault, and not
// as silence.
func TestEveryFaultReachesTheCaller(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		tests := []struct {
			name string
			f    *fault.Fault
		}{
			{"not in UTF-8", fault.New(fault.RunnerFailed, "bad \xff\xfe bytes")},
			{"larger than a message", fault.New(fault.RunnerFailed, strings.Repeat("x", 16<<20))},
			{"a violation not in UTF-8", fault.New(fault.RunnerFailed, "bad").WithViolation("\xff", "\xff")},
			{"metadata not in UTF-8", fault.New(fault.RunnerFailed, "bad").WithMetadata("\xff", "\xff")},
			{"metadata larger than a message", fault.New(fault.RunnerFailed, "bad").WithMetadata("k", strings.Repeat("x", 16<<20))},
			{"no reason", &fault.Fault{}},
		}
		b.host(inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
			which, err := strconv.Atoi(first(item.Inputs))
			if err != nil {
				return nil, err
			}
			return nil, tests[which].f
		}))
		for i, test := range tests {
			t.Run(test.name, func(t *testing.T) {
				c := b.ask(strconv.Itoa(i))
				c.t = t
				if r := c.next(); r.Fault == nil {
					t.Errorf("answered with %+v", r)
				}
			})
		}
		b.emptied()
	})
}

// A caller that sends what nobody takes has made a mistake, such as a name with
// a letter too many. A step that puts out more than the next takes has not.
func TestUnknownInputIsRejected(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		spec := runner.Spec{Inputs: []runner.PartSpec{{Name: "image"}, {Name: "mask", Optional: true}}}
		h := b.host(inproc.Each(inproc.Settings{Spec: spec}, echo), listening)
		image, masc := payload.OfBlob("image", "", []byte("i")), payload.OfBlob("masc", "", []byte("m"))
		parts := []payload.Part{masc, image}
		refused := func(f *fault.Fault) {
			t.Helper()
			if f == nil || f.Reason != fault.InvalidInput || !strings.Contains(f.Message, `"masc"`) ||
				len(f.Violations) != 1 || f.Violations[0].Field != "inputs.masc" {
				t.Errorf("refused with %+v", f)
			}
		}
		refused(b.askParts(parts).fault(fault.InvalidInput))
		refused(h.Infer(t.Context(), stagehost.Request{Inputs: parts}).Fault)
		keeps := b.askParts(parts, func(e *envelope.Envelope) { e.Route[0].Keep = []string{"masc"} })
		second := b.askParts(parts, func(e *envelope.Envelope) {
			e.Route, e.Position = append([]pipeline.Hop{{Step: "before", Stage: "before"}}, e.Route...), 1
		})
		for _, c := range []*call{keeps, second} {
			if out := c.output().Parts; len(out) != 1 || out[0].Name != "image" {
				t.Errorf("answered with %v", out)
			}
		}
		b.emptied()
	})
}

// What is in the faults is also how operators find the stage.
func TestUnforwardableItemIsAFaultOfItsStage(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		h := b.host(inproc.Each(inproc.Settings{}, echo))
		f := b.ask("x", onRoute(false)).fault(fault.NoCapacity)
		if f.Stage != string(stage) || f.Step != "step" || f.Host == "" {
			t.Errorf("the fault happened at stage %q, step %q, host %q", f.Stage, f.Step, f.Host)
		}
		h.awaitCount("stagemesh.stage.faults NO_CAPACITY", 1)
		b.emptied()
	})
}

func TestPanicIsLoggedWithItsStack(t *testing.T) {
	t.Parallel()
	for name, newRunner := range map[string]func() runner.Runner{
		"of an item": func() runner.Runner {
			return inproc.Each(inproc.Settings{}, func(context.Context, runner.Item) ([]payload.Part, error) { panic("boom") })
		},
		"of a batch": func() runner.Runner {
			return batches(func(context.Context, runner.Batch, runner.Sink) error { panic("boom") })
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, b *bed) {
				var said logs
				b.host(newRunner(), said.into)
				b.ask("x").fails(fault.RunnerFailed)
				testbed.Eventually(t, "the panic is logged", func() bool {
					return slices.Contains(said.of(slog.LevelError), "the runner panicked")
				})
			})
		})
	}
}

// Poison is found by reruns: one line tells of the batch, and no more of each.
func TestFailedBatchIsLoggedOnce(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		var said logs
		b.host(batches(func(context.Context, runner.Batch, runner.Sink) error { return errors.New("no") }), together(batchSize), said.into)
		for _, c := range b.askMany(batchSize) {
			c.fails(fault.RunnerFailed)
		}
		if got := said.of(slog.LevelWarn); len(got) != 1 {
			t.Errorf("logged %q", got)
		}
	})
}

// The gateway's own counter has the same words.
func TestUndeliveredRepliesAreCountedByDisposition(t *testing.T) {
	t.Parallel()
	for word, d := range map[string]meshv1.ReplyDisposition{
		"late":      meshv1.ReplyDisposition_REPLY_DISPOSITION_UNKNOWN,
		"duplicate": meshv1.ReplyDisposition_REPLY_DISPOSITION_DUPLICATE,
		"overflow":  meshv1.ReplyDisposition_REPLY_DISPOSITION_OVERFLOW,
		"malformed": meshv1.ReplyDisposition_REPLY_DISPOSITION_MALFORMED,
		"other":     99,
	} {
		t.Run(word, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			h := b.host(inproc.Each(inproc.Settings{}, echo))
			const absent pipeline.GatewayID = "absent"
			stop, err := b.bus.ServeReplies(absent, func(pipeline.ExecutionID, []byte) meshv1.ReplyDisposition { return d })
			if err != nil {
				t.Fatal(err)
			}
			b.ask("x", func(e *envelope.Envelope) { e.Gateway = absent })
			h.awaitCount("stagemesh.stage.undelivered_replies "+word, 1)
			b.emptied()
			if err := stop(); err != nil {
				t.Error(err)
			}
		})
	}
}
