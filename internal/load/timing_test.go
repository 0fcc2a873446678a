package load

import (
	"reflect"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/transport"
)

func TestServerTimingIsParsed(t *testing.T) {
	t.Parallel()
	const us = time.Microsecond
	text := transport.ServerTiming(1500*us, []envelope.StepTiming{
		{Step: "a-b", QueueWait: 10 * us, BatchWait: 20 * us, Run: 30 * us, BatchSize: 3, Dispatch: "full"},
		{Step: "run", Run: 40 * us},
	}, []envelope.Branch{{Path: "look/a", Status: "done", Took: us}, {Path: "look/b", Status: "skipped", Why: "x is 1, total"}})
	var got Answer
	parseTiming(text, &got)
	want := Answer{Total: 1500 * us, Steps: []StepTiming{
		{Name: "a-b", Queue: 10 * us, Batch: 20 * us, Run: 30 * us, BatchSize: 3, Dispatch: "full"},
		{Name: "run", Run: 40 * us},
	}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func FuzzTiming(f *testing.F) {
	f.Add(`a-queue;dur=0.1, a-batch;dur=0.2, a-run;dur=1;desc="batch 1, idle", total;dur=2`)
	f.Add(`a-run;dur=1;desc="batch 99999999999, "", -queue, total;dur=1e999`)
	f.Fuzz(func(t *testing.T, text string) {
		var got Answer
		parseTiming(text, &got)
		if len(got.Steps) > maxTimings {
			t.Errorf("%d steps", len(got.Steps))
		}
	})
}

func TestTraceParentAllocatesOnce(t *testing.T) {
	if n := testing.AllocsPerRun(1000, func() { lastTraceParent = traceParent() }); n != 1 {
		t.Errorf("got %v", n)
	}
}

// lastTraceParent keeps the compiler from removing the measured call.
var lastTraceParent string

// BenchmarkTraceParent measures the cost of a traceparent, on all processors at once.
func BenchmarkTraceParent(b *testing.B) {
	b.ReportAllocs()
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			if traceParent() == "" {
				b.Error("it is empty")
			}
		}
	})
}
