package transport_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/transport"
)

const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

func TestMalformedTraceContextIsDropped(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		in   http.Header
		want envelope.Trace
	}{
		"none":              {http.Header{}, envelope.Trace{}},
		"parent":            {http.Header{"Traceparent": {parent}}, envelope.Trace{Parent: parent}},
		"both":              {http.Header{"Traceparent": {parent}, "Tracestate": {"a=1", "b=2"}}, envelope.Trace{Parent: parent, State: "a=1,b=2"}},
		"state alone":       {http.Header{"Tracestate": {"a=1"}}, envelope.Trace{}},
		"two parents":       {http.Header{"Traceparent": {parent, parent}}, envelope.Trace{}},
		"short parent":      {http.Header{"Traceparent": {"00-0af7"}}, envelope.Trace{}},
		"long parent":       {http.Header{"Traceparent": {parent + strings.Repeat("-x", 50)}}, envelope.Trace{}},
		"parent not ASCII":  {http.Header{"Traceparent": {parent + "\xff"}}, envelope.Trace{}},
		"state too long":    {http.Header{"Traceparent": {parent}, "Tracestate": {strings.Repeat("a", 513)}}, envelope.Trace{Parent: parent}},
		"state not ASCII":   {http.Header{"Traceparent": {parent}, "Tracestate": {"a=\xff"}}, envelope.Trace{Parent: parent}},
		"of a later format": {http.Header{"Traceparent": {"cc" + parent[2:] + "-more"}}, envelope.Trace{Parent: "cc" + parent[2:] + "-more"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := transport.TraceContext(row.in); got != row.want {
				t.Errorf("got %v", got)
			}
		})
	}
}

func TestServerTimingIsWellFormed(t *testing.T) {
	t.Parallel()
	got := transport.ServerTiming(time.Second, []envelope.StepTiming{
		{Step: "a", QueueWait: 1500 * time.Nanosecond, BatchSize: 3, Dispatch: "full"},
		{Step: `b";x=1, ü`, Dispatch: "\"\r\n\\"},
		{Step: "c"},
	}, []envelope.Branch{
		{Path: "look/a", Status: "done", Took: 2 * time.Millisecond},
		{Path: "route/1", Status: "skipped", Why: "scene is \"ü\\\n\""},
	})
	const want = `a-queue;dur=0.001, a-batch;dur=0.000, a-run;dur=0.000;desc="batch 3, full", ` +
		`b__x_1___-queue;dur=0.000, b__x_1___-batch;dur=0.000, b__x_1___-run;dur=0.000;desc="batch 0, ____", ` +
		`c-queue;dur=0.000, c-batch;dur=0.000, c-run;dur=0.000;desc="batch 0", ` +
		`look_a;dur=2.000;desc="done", route_1;desc="skipped: scene is _____", total;dur=1000.000`
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestServerTimingIsBounded(t *testing.T) {
	t.Parallel()
	steps, branches := make([]envelope.StepTiming, 64), make([]envelope.Branch, 64)
	for i := range steps {
		steps[i].Step, branches[i].Path = "a-step-of-a-pipeline", "look/a"
	}
	for _, got := range []string{transport.ServerTiming(time.Second, steps, nil), transport.ServerTiming(time.Second, nil, branches[:]), transport.ServerTiming(time.Second, steps[:2], branches)} {
		if len(got) > 2300 || !strings.HasSuffix(got, `", total;dur=1000.000`) {
			t.Errorf("%d bytes: %s", len(got), got)
		}
	}
}
