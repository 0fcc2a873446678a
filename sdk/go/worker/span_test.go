package worker_test

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/worker"
)

const trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

// traced is a batch of n items with a trace.
func traced(n int) (*frame.Predict, *frame.Body) {
	m, body := batch(1, n)
	m.Trace = trace
	return m, body
}

// checkTimes checks that spans lie within their parents and after began, and removes
// their times.
func checkTimes(t *testing.T, spans []frame.Span, began time.Time) {
	t.Helper()
	for i, s := range spans {
		low, high := began.UnixMicro(), time.Now().UnixMicro()
		if s.Parent != nil {
			low, high = spans[*s.Parent].Start, spans[*s.Parent].End
		}
		if s.Start < low || s.End < s.Start || s.End > high {
			t.Errorf("span %d is from %d to %d, its parent from %d to %d", i, s.Start, s.End, low, high)
		}
	}
	for i := range spans {
		spans[i].Start, spans[i].End = 0, 0
	}
}

func TestTracedBatchReturnsSpans(t *testing.T) {
	t.Parallel()
	began, zero, one := time.Now(), 0, 1
	m, body := traced(2)
	got, _ := answer(t, func(ctx context.Context, b *worker.Batch) (worker.Outputs, error) {
		equal(t, b.Trace, trace)
		in, span := b.Span(ctx, "tokenize", slog.Int("rows", b.Rows), slog.Float64("share", 0.5))
		_, inner := b.Span(in, "look up", slog.Bool("cached", true), slog.Any("list", []int{1}), slog.Float64("none", math.NaN()))
		inner.Fail("miss")
		inner.End()
		span.Set(slog.String("model", "m"), slog.Uint64("tokens", 7))
		span.End()
		b.Items[0].Span(b.Items[0].Context(), "unfinished")
		b.Span(t.Context(), "beside")
		return double(ctx, b)
	}, m, body)
	spans := got.(*frame.Result).Spans
	checkTimes(t, spans, began)
	equal(t, spans, []frame.Span{
		{Name: "predict"},
		{Name: "tokenize", Parent: &zero, Attributes: frame.Parameters{"rows": int64(2), "share": 0.5, "model": "m", "tokens": int64(7)}},
		{Name: "look up", Parent: &one, Attributes: frame.Parameters{"cached": true, "list": "[1]", "none": "NaN"}, Error: "miss"},
		{Name: "unfinished", Parent: &zero},
		{Name: "beside"},
	})
}

func TestFailedBatchReturnsSpans(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		predict predict
		want    string
	}{
		"an error": {func(context.Context, *worker.Batch) (worker.Outputs, error) { return nil, errors.New("oh") }, "*errors.errorString"},
		"a panic":  {func(context.Context, *worker.Batch) (worker.Outputs, error) { panic("oh") }, "panic"},
		"a wrong output": {func(context.Context, *worker.Batch) (worker.Outputs, error) {
			return worker.Outputs{"y": worker.Texts("one of two")}, nil
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			m, body := traced(2)
			got, _ := answer(t, test.predict, m, body)
			spans := got.(*frame.Error).Spans
			checkTimes(t, spans, began)
			equal(t, spans, []frame.Span{{Name: "predict", Error: test.want}})
		})
	}
}

func TestTracedStreamReturnsSpans(t *testing.T) {
	t.Parallel()
	began, zero := time.Now(), 0
	m, body := traced(1)
	h := listen(t)
	served := h.serve(t.Context(), worker.Settings{Stream: func(ctx context.Context, item *worker.Item, out *worker.Stream) error {
		_, span := item.Span(ctx, "token")
		defer span.End()
		return out.Text("text", "a")
	}})
	h.ready()
	h.send(m, body)
	receiveAs[*frame.Chunk](h)
	result, _ := receiveAs[*frame.Result](h)
	h.ask(served)
	checkTimes(t, result.Spans, began)
	equal(t, result.Spans, []frame.Span{{Name: "stream"}, {Name: "token", Parent: &zero}})
}

// Spans never fail the batch that they are of.
func TestSpansBeyondBoundsAreLeftOut(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		key  string
		want int
	}{
		"too many":       {"k", 128},
		"a header's end": {strings.Repeat("k", 20_000), 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, body := traced(1)
			got, _ := answer(t, func(ctx context.Context, b *worker.Batch) (worker.Outputs, error) {
				for range 200 {
					_, span := b.Span(ctx, strings.Repeat("n", 1000), slog.String(test.key, strings.Repeat("v", 1000)))
					span.End()
				}
				return double(ctx, b)
			}, m, body)
			result := got.(*frame.Result)
			if len(result.Parts) != 1 || len(result.Spans) != test.want {
				t.Fatalf("%d parts, %d spans", len(result.Parts), len(result.Spans))
			}
			for _, s := range result.Spans[min(1, test.want):] {
				if len(s.Name) != 256 || len(s.Attributes["k"].(string)) != 256 {
					t.Fatalf("%+v", s)
				}
			}
		})
	}
}

func TestBatchWithoutTraceReturnsNoSpans(t *testing.T) {
	t.Parallel()
	m, body := batch(1, 2)
	got, _ := answer(t, func(ctx context.Context, b *worker.Batch) (worker.Outputs, error) {
		_, span := b.Span(ctx, "tokenize", slog.Int("rows", b.Rows))
		span.End()
		return double(ctx, b)
	}, m, body)
	if spans := got.(*frame.Result).Spans; spans != nil {
		t.Errorf("%+v", spans)
	}
}

func TestSpanWithoutTraceAllocatesNothing(t *testing.T) {
	b, ctx := &worker.Batch{Rows: 1000}, t.Context()
	allocations := testing.AllocsPerRun(100, func() {
		in, span := b.Span(ctx, "tokenize", slog.Int("rows", b.Rows), slog.String("model", "m"))
		_, inner := b.Span(in, "inner")
		inner.Set(slog.Float64("share", float64(b.Rows)))
		inner.Fail("oh")
		inner.End()
		span.End()
	})
	if allocations != 0 {
		t.Errorf("%v allocations", allocations)
	}
}
