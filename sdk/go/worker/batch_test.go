package worker_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/sdk/go/worker"
)

type predict = func(context.Context, *worker.Batch) (worker.Outputs, error)

// answer runs one batch and returns the answer of the worker.
func answer(t *testing.T, p predict, m *frame.Predict, body *frame.Body, more ...string) (frame.Message, []byte) {
	t.Helper()
	return answerWith(t, worker.Settings{Predict: p}, m, body, more...)
}

func answerWith(t *testing.T, s worker.Settings, m *frame.Predict, body *frame.Body, more ...string) (frame.Message, []byte) {
	t.Helper()
	h := listen(t)
	served := h.serve(t.Context(), s, more...)
	h.ready()
	h.send(m, body)
	got, data := h.receive()
	h.ask(served)
	return got, data
}

func TestBatchMatchesPredict(t *testing.T) {
	t.Parallel()
	m, body := batch(7, 2)
	m.Warmup, m.Model = true, &frame.Model{ID: "m", Version: "2"}
	m.Items[0] = frame.Item{
		ID: "a", Timeout: 60_000, Parameters: frame.Parameters{"k": int64(3)}, Metadata: map[string]string{"tenant": "t"},
		InputParameters: map[string]frame.Parameters{"x": {"size": int64(8)}},
	}
	now := time.Now()
	got, _ := answer(t, func(_ context.Context, b *worker.Batch) (worker.Outputs, error) {
		a, other := b.Items[0], b.Items[1]
		equal(t, []any{a.ID, a.Rows, a.Parameters["k"], a.InputParameters["x"]["size"], a.Metadata["tenant"], other.ID, other.Deadline.IsZero(), b.Rows, b.Warmup, *b.Model},
			[]any{"a", 1, int64(3), int64(8), "t", "item-1", true, 2, true, frame.Model{ID: "m", Version: "2"}})
		if left := a.Deadline.Sub(now); left < 59*time.Second || left > 60*time.Second+patience {
			t.Errorf("deadline in %v", left)
		}
		return nil, nil
	}, m, body)
	equal(t, got, frame.Message(&frame.Result{Batch: 7}))
}

func TestItemFailsAlone(t *testing.T) {
	t.Parallel()
	m, body := batch(1, 4)
	got, data := answer(t, func(ctx context.Context, b *worker.Batch) (worker.Outputs, error) {
		b.Items[1].Fail(worker.InvalidInput("x", "not finite"))
		b.Items[1].Fail(errors.New("a second word"))
		b.Items[3].Fail(fmt.Errorf("wrapped: %w", worker.TooLarge("10 GiB")))
		b.Items[2].Fail(errors.New("plain"))
		b.Items[0].SetMetadata("cache", "hit")
		out, err := double(ctx, b)
		out["label"] = worker.Texts("a", "b", "c", "d")
		return out, err
	}, m, body)
	result := got.(*frame.Result)
	equal(t, result.Faults, []frame.Fault{
		{Item: 1, Reason: "INVALID_INPUT", Message: "not finite", Field: "x"},
		{Item: 2, Reason: "RUNNER_FAILED", Message: "plain"},
		{Item: 3, Reason: "RUNNER_OUT_OF_MEMORY", Message: "10 GiB"},
	})
	equal(t, result.Metadata, []frame.Metadata{{Item: 0, Values: map[string]string{"cache": "hit"}}})
	if len(result.Parts) != 2 || result.Parts[0].Name != "label" || *result.Parts[0].Item != 0 || result.Parts[1].Item != nil {
		t.Fatalf("%+v", result.Parts)
	}
	label, err := result.Parts[0].Bytes(data)
	if err != nil || string(label) != "a" {
		t.Errorf("%q, %v", label, err)
	}
}

func TestBatchOfFailedItemsHasNoOutputs(t *testing.T) {
	t.Parallel()
	m, body := batch(1, 2)
	got, _ := answer(t, func(_ context.Context, b *worker.Batch) (worker.Outputs, error) {
		for _, item := range b.Items {
			item.Fail(worker.SchemaViolation("x", "no"))
		}
		return worker.Outputs{"y": worker.Texts("of another length")}, nil
	}, m, body)
	if result, ok := got.(*frame.Result); !ok || len(result.Faults) != 2 || result.Parts != nil {
		t.Errorf("%+v", got)
	}
}

func TestBatchFailureIsError(t *testing.T) {
	t.Parallel()
	one := uint64(1)
	tests := map[string]struct {
		predict predict
		want    frame.Error
	}{
		"an error": {
			func(context.Context, *worker.Batch) (worker.Outputs, error) { return nil, errors.New("oh") },
			frame.Error{Batch: &one, Kind: frame.Exception, Name: "*errors.errorString", Message: "oh"},
		},
		"a fault of nobody": {
			func(context.Context, *worker.Batch) (worker.Outputs, error) { return nil, worker.Failed("oh") },
			frame.Error{Batch: &one, Kind: frame.Exception, Name: "*worker.Fault", Message: "RUNNER_FAILED: oh"},
		},
		"memory": {
			func(context.Context, *worker.Batch) (worker.Outputs, error) {
				return nil, fmt.Errorf("%w: 3 GiB", worker.ErrOutOfMemory)
			},
			frame.Error{Batch: &one, Kind: frame.OutOfMemory, Name: "*fmt.wrapError", Message: "out of memory: 3 GiB"},
		},
		"a panic": {
			func(context.Context, *worker.Batch) (worker.Outputs, error) { panic("oh") },
			frame.Error{Batch: &one, Kind: frame.Exception, Name: "panic", Message: "oh"},
		},
		"a panic for want of memory": {
			func(context.Context, *worker.Batch) (worker.Outputs, error) { panic(worker.ErrOutOfMemory) },
			frame.Error{Batch: &one, Kind: frame.OutOfMemory, Name: "panic", Message: "out of memory"},
		},
		"endless words": {
			func(context.Context, *worker.Batch) (worker.Outputs, error) {
				return nil, errors.New(strings.Repeat("\x00", 2<<20))
			},
			frame.Error{Batch: &one, Kind: frame.Exception, Name: "*errors.errorString", Message: strings.Repeat("\x00", 64<<10) + "..."},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, body := batch(1, 2)
			got, _ := answer(t, test.predict, m, body)
			failure := got.(*frame.Error)
			if (failure.Name == "panic") != strings.Contains(failure.Traceback, "batch_test.go") {
				t.Errorf("traceback %q", failure.Traceback)
			}
			failure.Traceback = ""
			equal(t, *failure, test.want)
		})
	}
}

func TestFaultOfSingleItemBatchIsItsItems(t *testing.T) {
	t.Parallel()
	m, body := batch(1, 1)
	got, _ := answer(t, func(context.Context, *worker.Batch) (worker.Outputs, error) {
		return nil, fmt.Errorf("decoding: %w", worker.InvalidInput("x", "no image"))
	}, m, body)
	equal(t, got, frame.Message(&frame.Result{Batch: 1, Faults: []frame.Fault{{Item: 0, Reason: "INVALID_INPUT", Message: "no image", Field: "x"}}}))
}

func TestUnfitOutputsAreErrors(t *testing.T) {
	t.Parallel()
	many := map[string]worker.Output{}
	for i := range 30_000 {
		many[fmt.Sprintf("output-%d", i)] = worker.Texts("", "")
	}
	tests := map[string]struct {
		outputs  worker.Outputs
		wantText string
	}{
		"too few rows":    {worker.Outputs{"y": worker.Joined(fp32([]int64{1, 2}, 1, 2))}, `output "y": shape [1 2] for a batch of 2 rows`},
		"a scalar":        {worker.Outputs{"y": worker.Joined(fp32(nil, 1))}, `output "y": shape [] for a batch`},
		"too few bytes":   {worker.Outputs{"y": worker.Joined(tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{2}})}, `takes 8 bytes, got 0`},
		"too few tensors": {worker.Outputs{"y": worker.Each(fp32([]int64{1}, 1))}, "1 for a batch of 2 items"},
		"one that is bad": {worker.Outputs{"y": worker.Each(fp32([]int64{1}, 1), tensor.Tensor{})}, "item 1: unknown datatype"},
		"too many blobs":  {worker.Outputs{"y": worker.Texts("a", "b", "c")}, "3 for a batch of 2 items"},
		"nothing":         {worker.Outputs{"y": {}}, "0 for a batch of 2 items"},
		"too many bytes":  {worker.Outputs{"y": worker.Blobs(worker.Blob{Data: make([]byte, 1<<24)}, worker.Blob{Data: []byte("a")})}, "outputs of 16777217 bytes, the host takes 16777216"},
		"too many names":  {many, "the header is too long"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, body := batch(1, 2)
			got, _ := answer(t, func(context.Context, *worker.Batch) (worker.Outputs, error) { return test.outputs, nil }, m, body)
			if failure, ok := got.(*frame.Error); !ok || failure.Kind != frame.Exception || !strings.Contains(failure.Message, test.wantText) {
				t.Errorf("%+v", got)
			}
		})
	}
}

func TestOutputsMayBePerItem(t *testing.T) {
	t.Parallel()
	m, body := batch(1, 3)
	got, data := answer(t, func(_ context.Context, b *worker.Batch) (worker.Outputs, error) {
		b.Items[1].Fail(worker.Failed("no"))
		return worker.Outputs{
			"b": worker.Blobs(worker.Blob{ContentType: "a/a", Data: []byte("1")}, worker.Blob{}, worker.Blob{ContentType: "c/c"}),
			"t": worker.Each(fp32([]int64{1, 1}, 1), tensor.Tensor{}, fp32([]int64{1, 2}, 2, 3)),
		}, nil
	}, m, body)
	var what []string
	for _, p := range got.(*frame.Result).Parts {
		raw, err := p.Bytes(data)
		if err != nil {
			t.Fatal(err)
		}
		what = append(what, fmt.Sprintf("%s %d %s %v %d", p.Name, *p.Item, p.ContentType, p.Shape, len(raw)))
	}
	equal(t, what, []string{"b 0 a/a [] 1", "b 2 c/c [] 0", "t 0  [1 1] 4", "t 2  [1 2] 8"})
}

// inspect runs f on a batch inside a worker.
func inspect(t *testing.T, axis string, m *frame.Predict, body *frame.Body, f func(b *worker.Batch)) {
	t.Helper()
	answerWith(t, worker.Settings{Spec: worker.Spec{BatchAxis: axis}, Predict: func(_ context.Context, b *worker.Batch) (worker.Outputs, error) {
		f(b)
		return nil, nil
	}}, m, body)
}

func floats(t *testing.T, x tensor.Tensor, err error) string {
	t.Helper()
	if err != nil {
		return err.Error()
	}
	v, err := x.FP32Values()
	if err != nil {
		return err.Error()
	}
	return fmt.Sprint(x.Shape, v)
}

func TestJoinedInputsSplitByItem(t *testing.T) {
	t.Parallel()
	var body frame.Body
	m := &frame.Predict{Items: []frame.Item{{ID: "a"}, {ID: "b", Rows: 2}}, Parts: []frame.Part{
		body.Tensor("x", -1, fp32([]int64{3, 1}, 1, 2, 3)), body.Tensor("t", -1, texts("one", "", "three")),
	}}
	inspect(t, "", m, &body, func(b *worker.Batch) {
		x, err := b.Tensor("x")
		equal(t, floats(t, x, err), "[3 1] [1 2 3]")
		x, err = b.Items[0].Tensor("x")
		equal(t, floats(t, x, err), "[1 1] [1]")
		x, err = b.Items[1].Tensor("x")
		equal(t, floats(t, x, err), "[2 1] [2 3]")
		words, err := b.Items[1].Tensor("t")
		if err != nil {
			t.Error(err)
		}
		elements, err := words.BytesElements()
		equal(t, fmt.Sprintf("%q %v", elements, err), `["" "three"] <nil>`)
		equal(t, []bool{b.Items[0].Has("x"), b.Items[0].Has("y")}, []bool{true, false})
		_, err = b.Items[0].Blob("x")
		equal(t, fmt.Sprint(err), `input "x": it is a tensor, and not a blob`)
		_, err = b.Tensor("y")
		equal(t, fmt.Sprint(err, errors.Is(err, worker.ErrNoInput)), `input "y": there is none true`)
		_, err = b.Items[0].Tensor("y")
		equal(t, errors.Is(err, worker.ErrNoInput), true)
		_, err = b.Items[0].Blob("y")
		equal(t, errors.Is(err, worker.ErrNoInput), true)
	})
}

func TestSeparateInputsAreJoined(t *testing.T) {
	t.Parallel()
	part := func(shapes ...[]int64) func(*frame.Body) []frame.Part {
		return func(body *frame.Body) (out []frame.Part) {
			n := float32(0)
			for i, shape := range shapes {
				count, _ := tensor.Elements(shape)
				var v []float32
				for range count {
					n++
					v = append(v, n)
				}
				out = append(out, body.Tensor("x", i, fp32(shape, v...)))
			}
			return out
		}
	}
	tests := map[string]struct {
		axis  string
		parts func(*frame.Body) []frame.Part
		want  string
	}{
		"rows":             {"rows", part([]int64{1, 2}, []int64{1, 2}), "[2 2] [1 2 3 4]"},
		"different rows":   {"rows", part([]int64{1, 2}, []int64{2, 2}), "[3 2] [1 2 3 4 5 6]"},
		"other extents":    {"rows", part([]int64{1, 2}, []int64{1, 1}), `input "x": tensor 1 is FP32[1 1], the first is FP32[1 2]`},
		"scalars":          {"rows", part(nil, nil), `input "x": a scalar has no rows to join`},
		"stacked":          {"none", part([]int64{2}, []int64{2}), "[2 2] [1 2 3 4]"},
		"stacked scalars":  {"none", part(nil, nil), "[2] [1 2]"},
		"stacked extents":  {"none", part([]int64{1}, []int64{2}), `input "x": item 1 has shape [2], and item 0 [1]`},
		"an item has none": {"rows", part([]int64{1, 2}), `input "x": item 1: there is none`},
		"blobs": {"rows", func(b *frame.Body) []frame.Part {
			return []frame.Part{b.Blob("x", 0, "", nil), b.Blob("x", 1, "", nil)}
		}, `input "x": it is a blob, and not a tensor`},
		"in another order": {"rows", func(b *frame.Body) []frame.Part {
			one := b.Tensor("x", 1, fp32([]int64{1, 1}, 2))
			return []frame.Part{one, b.Tensor("x", 0, fp32([]int64{1, 1}, 1))}
		}, "[2 1] [1 2]"},
		"with a gap": {"rows", func(b *frame.Body) []frame.Part {
			one := b.Tensor("x", 0, fp32([]int64{1, 1}, 1))
			b.Blob("gap", 0, "", []byte("gap"))
			return []frame.Part{one, b.Tensor("x", 1, fp32([]int64{1, 1}, 2))}
		}, "[2 1] [1 2]"},
		"another datatype": {"none", func(b *frame.Body) []frame.Part {
			return []frame.Part{b.Tensor("x", 0, fp32([]int64{1}, 1)), b.Tensor("x", 1, texts("a"))}
		}, `input "x": tensor 1 is BYTES[1 1], the first is FP32[1 1]`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var body frame.Body
			m := &frame.Predict{Items: items(2), Parts: test.parts(&body)}
			inspect(t, test.axis, m, &body, func(b *worker.Batch) {
				x, err := b.Tensor("x")
				equal(t, floats(t, x, err), test.want)
			})
		})
	}
}

func TestBlobsBelongToItems(t *testing.T) {
	t.Parallel()
	var body frame.Body
	m := &frame.Predict{Items: items(2), Parts: []frame.Part{
		body.Blob("image", 0, "image/png", []byte("png")), body.Tensor("x", 0, fp32([]int64{1}, 1)),
	}}
	inspect(t, "none", m, &body, func(b *worker.Batch) {
		blob, err := b.Items[0].Blob("image")
		equal(t, fmt.Sprintf("%s %s %v", blob.ContentType, blob.Data, err), "image/png png <nil>")
		equal(t, []bool{b.Items[0].Has("image"), b.Items[1].Has("image")}, []bool{true, false})
		_, err = b.Items[1].Blob("image")
		equal(t, fmt.Sprint(err), `input "image": item 1: there is none`)
		_, err = b.Items[0].Blob("x")
		equal(t, fmt.Sprint(err), `input "x": it is a tensor, and not a blob`)
		_, err = b.Items[0].Tensor("image")
		equal(t, fmt.Sprint(err), `input "image": it is a blob, and not a tensor`)
	})
}

func TestItemsAndBatchesAreCancelled(t *testing.T) {
	t.Parallel()
	began, seen := make(chan struct{}), make(chan struct{})
	h := listen(t)
	served := h.serve(t.Context(), worker.Settings{Predict: func(ctx context.Context, b *worker.Batch) (worker.Outputs, error) {
		close(began)
		<-b.Items[1].Context().Done()
		if ctx.Err() != nil || b.Items[0].Context().Err() != nil || b.Items[0].Cancelled() || !b.Items[1].Cancelled() {
			t.Error("more is cancelled than item 1")
		}
		close(seen)
		<-ctx.Done()
		if !b.Items[0].Cancelled() || b.Items[0].Context().Err() == nil {
			t.Error("item 0 is not cancelled")
		}
		return nil, ctx.Err()
	}})
	h.ready()
	h.predict(1, 2)
	<-began
	h.send(&frame.Cancel{Batch: 9}, nil)
	h.send(&frame.Cancel{Batch: 1, Items: []int{1, 1, 40_000}}, nil)
	<-seen
	h.send(&frame.Cancel{Batch: 1}, nil)
	m, _ := receiveAs[*frame.Result](h)
	if len(m.Faults) != 2 || m.Faults[0].Reason != "RUNNER_FAILED" {
		t.Errorf("%+v", m)
	}
	h.send(&frame.Cancel{Batch: 1}, nil)
	h.ask(served)
}

func TestContextOfCancelledItemHasEnded(t *testing.T) {
	t.Parallel()
	began, sent := make(chan struct{}), make(chan struct{})
	h := listen(t)
	served := h.serve(t.Context(), worker.Settings{Predict: func(ctx context.Context, b *worker.Batch) (worker.Outputs, error) {
		close(began)
		<-sent
		if b.Items[1].Context().Err() == nil || ctx.Err() != nil {
			t.Error("item 1 alone is cancelled")
		}
		return double(ctx, b)
	}})
	h.ready()
	h.predict(1, 2)
	<-began
	h.send(&frame.Cancel{Batch: 1, Items: []int{1}}, nil)
	h.send(&frame.Ping{N: 1}, nil)
	receiveAs[*frame.Pong](h)
	close(sent)
	if m, _ := receiveAs[*frame.Result](h); m.Faults != nil {
		t.Errorf("%+v", m)
	}
	h.ask(served)
}

func TestSlotsRunAtTheSameTime(t *testing.T) {
	t.Parallel()
	var both sync.WaitGroup
	both.Add(2)
	h := listen(t)
	served := h.serve(t.Context(), worker.Settings{Slots: 2, Predict: func(ctx context.Context, b *worker.Batch) (worker.Outputs, error) {
		both.Done()
		both.Wait()
		return double(ctx, b)
	}})
	ready, _ := h.ready()
	equal(t, ready.Slots, 2)
	h.predict(1, 1)
	h.predict(2, 1)
	seen := map[uint64]bool{}
	for range 2 {
		m, _ := receiveAs[*frame.Result](h)
		seen[m.Batch] = true
	}
	equal(t, seen, map[uint64]bool{1: true, 2: true})
	h.ask(served)
}

// The slot is the host's again as soon as it has the answer.
func TestSlotIsFreeWithItsAnswer(t *testing.T) {
	t.Parallel()
	h := listen(t)
	served := h.serve(t.Context(), worker.Settings{Predict: double})
	h.ready()
	for n := range uint64(2000) {
		h.predict(n, 1)
		if m, _ := receiveAs[*frame.Result](h); m.Batch != n {
			t.Fatalf("%d for %d", m.Batch, n)
		}
	}
	h.ask(served)
}

func TestOtherRanksAnswerNothing(t *testing.T) {
	t.Parallel()
	rank := []string{"RANK", "1", "WORLD_SIZE", "2"}
	m, body := batch(1, 2)
	got, _ := answer(t, func(ctx context.Context, b *worker.Batch) (worker.Outputs, error) {
		b.Items[0].Fail(worker.Failed("no"))
		return double(ctx, b)
	}, m, body, rank...)
	equal(t, got, frame.Message(&frame.Result{Batch: 1}))
	got, _ = answer(t, func(context.Context, *worker.Batch) (worker.Outputs, error) { return nil, errors.New("oh") }, m, body, rank...)
	if failure, ok := got.(*frame.Error); !ok || *failure.Batch != 1 {
		t.Errorf("%+v", got)
	}
}
