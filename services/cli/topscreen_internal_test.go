package cli

import (
	"flag"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/stagemesh/stagemesh/internal/figures"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

var update = flag.Bool("update", false, "write testdata/top.txt anew")

// shownFigures returns the figures of a mesh with more stages than fit, and names that are too long.
func shownFigures() *figures.Mesh {
	unknown := figures.Figure(math.NaN())
	now := time.Date(2026, 11, 23, 12, 31, 7, 0, time.UTC)
	f := &figures.Mesh{
		Time: now, Gateways: 2, Hosts: 4, InFlight: 37, Requests: figures.Requests{
			RequestsPerSecond: 1234.5, P50: .0123, P99: .481, FailuresPerSecond: map[string]figures.Figure{"DEADLINE_EXCEEDED": .3, "QUEUE_FULL": 12},
		},
		Stages: []*figures.Stage{
			{
				Stage: "classify", ItemsPerSecond: 1230, Queue: 10000, Hosts: 2, BusySlots: 2.75, Slots: 4, MeanBatch: 7.94,
				QueueWaitP50: .00031, QueueWaitP99: .00123, RunP50: .0051, RunP99: .0099,
				ByHost: []*figures.Host{{Host: "host-1", InFlight: 12, Queued: 4, Slots: 2, BusySlots: 1.97}, {Host: "0192f0c1-7a3e-7c1b-9d2f-3f1a2b3c4d5e", InFlight: 3, Slots: 2, BusySlots: .8}},
			},
			{Stage: "decode", Unhealthy: "hosts run two engines: go, CPU (a), onnxruntime 1.23.2, CPU (b); answers depend on the host", ItemsPerSecond: .2, Hosts: 2, BusySlots: 28.4, Slots: 32, MeanBatch: 1, QueueWaitP50: 12.3, QueueWaitP99: 99.9, RunP50: 75, RunP99: 100},
		},
		Records: []*adminv1.HostStatus{{Alive: true, Record: &meshv1.HostRecord{
			Stage: "classify", Host: "host-1", Ready: true, StartedAt: timestamppb.New(now.Add(-3 * time.Hour)), Engine: "go, CPU",
			Workers: []*meshv1.WorkerRecord{{State: "READY", Incarnation: 1}, {Index: 1, State: "DEAD", Incarnation: 12, Cause: "exit code 2: " + strings.Repeat("so ", 40)}},
		}}},
	}
	for i := range 20 {
		f.Stages = append(f.Stages, &figures.Stage{
			Stage: fmt.Sprintf("stage-%02d-with-a-long-name", i), ItemsPerSecond: unknown, MeanBatch: unknown,
			QueueWaitP50: unknown, QueueWaitP99: unknown, RunP50: unknown, RunP99: unknown,
		})
	}
	return f
}

func TestScreenFitsEightyByTwentyFour(t *testing.T) {
	t.Parallel()
	var got strings.Builder
	for _, screen := range []struct {
		name string
		view topView
	}{
		{"stages", topView{}},
		{"the last stage, paused and without an answer", topView{selected: "stage-19-with-a-long-name", paused: true, problem: "nobody answers\x1b"}},
		{"by queue", topView{sort: 2}},
		{"hosts and workers", topView{selected: "classify", open: true, scrolled: 1}},
		{"a stage without hosts", topView{selected: "stage-00-with-a-long-name", open: true}},
	} {
		v := screen.view
		v.address, v.width, v.height = "http://127.0.0.1:9080", 80, 24
		lines := v.lines(shownFigures())
		if len(lines) != v.height {
			t.Errorf("%s: %d lines", screen.name, len(lines))
		}
		styles := strings.NewReplacer(bold, "", red, "", plain, "", reversed, "")
		for _, line := range lines {
			if n := utf8.RuneCountInString(styles.Replace(line)); n > v.width {
				t.Errorf("%s: %d characters in %q", screen.name, n, line)
			}
		}
		fmt.Fprintf(&got, "=== %s\n%s\n", screen.name, strings.ReplaceAll(strings.Join(lines, "\n"), "\x1b", "^"))
	}
	const file = "testdata/top.txt"
	if *update {
		if err := os.WriteFile(file, []byte(got.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil || got.String() != string(want) {
		t.Errorf("%s has not this (-update writes it), %v:\n%s", file, err, got.String())
	}
}

func TestScreenOfOneSecondIsPlainText(t *testing.T) {
	t.Parallel()
	var v topView
	shown := shownFigures()
	shown.MapItems = map[string]figures.Figure{"p/each": 7.5}
	text := strings.Join(v.lines(shown), "\n")
	if strings.Contains(text, "\x1b") || !strings.Contains(text, "\nstage-19-with-a-long-name ") || !strings.Contains(text, "items/request:   p/each 7.5") || strings.Contains(text, "quit") {
		t.Errorf("got %q", text)
	}
	if text := strings.Join(v.lines(&figures.Mesh{}), "\n"); !strings.HasSuffix(text, "\nthere is none") {
		t.Errorf("of an empty mesh it is %q", text)
	}
}

func TestKeysSelectSortAndPause(t *testing.T) {
	t.Parallel()
	m := &topModel{shown: shownFigures()}
	m.width, m.height = 80, 24
	for _, step := range []struct {
		keys string
		want func() bool
	}{
		{"up", func() bool { return m.selected == "classify" }},
		{"down", func() bool { return m.selected == "decode" }},
		{"enter down down", func() bool { return m.open && m.selected == "decode" }},
		{"esc k", func() bool { return !m.open && m.selected == "classify" }},
		{"s s s s", func() bool { return topHeads[m.sort] == "BUSY" }},
		{"j k k", func() bool { return m.selected == "decode" }},
		{"S S S S S", func() bool { return topHeads[m.sort] == "RUN P99" }},
		{"p", func() bool { return m.paused }},
		{"x p", func() bool { return !m.paused }},
	} {
		for key := range strings.FieldsSeq(step.keys) {
			if m.press(key) != nil {
				t.Errorf("%s ends it", key)
			}
		}
		if m.View(); !step.want() {
			t.Errorf("after %s it is %+v", step.keys, m.topView)
		}
	}
	if m.press("q") == nil || m.press("ctrl+c") == nil {
		t.Error("q and Ctrl-C do not end it")
	}
}
