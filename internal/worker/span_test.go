package worker_test

import (
	"errors"
	"testing"

	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

const trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

// spanSink is a sink that takes spans.
type spanSink struct {
	*sink
	spans []runner.Span
	calls int
}

func (s *spanSink) AddSpans(spans []runner.Span, cut int) {
	if s.outcomes[0] != nil || cut > 0 {
		s.Errorf("spans come after the outcome, or %d are cut", cut)
	}
	s.spans = append(s.spans, spans...)
	s.calls++
}

// doTraced runs one item as a batch with that trace.
func (b *bed) doTraced(it runner.Item, trace string) (*spanSink, error) {
	b.Helper()
	s := &spanSink{sink: &sink{T: b.T, outcomes: make([]*runner.Outcome, 1)}}
	err := b.acquire().Do(b.Context(), runner.Batch{Items: []runner.Item{it}, Rows: it.Rows, Trace: trace}, s)
	s.close()
	return s, err
}

// hasOne checks that the sink got the one span of rank 0.
func (s *spanSink) hasOne() {
	s.Helper()
	if s.calls != 1 || len(s.spans) != 1 || s.spans[0].Name != trace || s.spans[0].Parent != -1 || s.spans[0].Attributes[0].Value.AsInt64() != 0 {
		s.Errorf("%d calls, spans %+v", s.calls, s.spans)
	}
}

func TestSinkGetsSpansOfTracedBatch(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, ""))
	s, err := b.doTraced(item(spans), trace)
	if err != nil {
		t.Fatal(err)
	}
	s.hasOne()
	b.echoes(s.outcomes, []int64{spans})
	s, err = b.doTraced(item(spansFail), trace)
	if _, ok := errors.AsType[*worker.BatchError](err); !ok {
		t.Errorf("got %v", err)
	}
	s.hasOne()
	// A worker that returns spans unasked is left alone.
	if s, err = b.doTraced(item(spans), ""); err != nil || s.calls != 0 {
		t.Errorf("%d calls, %v", s.calls, err)
	}
	// Nor does a sink have to take them.
	if _, err := b.do(item(spans)); err != nil {
		t.Error(err)
	}
	b.works()
}

func TestGangReturnsSpansOfRankZero(t *testing.T) {
	t.Parallel()
	b := gang(t, 2, "")
	s, err := b.doTraced(item(spans), trace)
	if err != nil {
		t.Fatal(err)
	}
	s.hasOne()
}
