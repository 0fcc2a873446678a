package suite_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/load"

	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/bench/suite"
)

func one(rounds ...suite.Round) []suite.Item {
	return []suite.Item{{Number: 3, Title: "a question", Rounds: rounds}}
}

func TestCommandsAlternate(t *testing.T) {
	t.Parallel()
	folder, calls := scripted(t, `cat "$folder/report"`, map[string]compare.Report{"report": reportOf(callers(8))})
	a, b := command("a", 8), command("b", 8)
	b.Traced = true
	r, err := suite.Run(t.Context(), suite.Settings{Program: fake, Folder: folder, Items: one(suite.Round{Times: 3, Commands: []suite.Command{a, b}})})
	if err != nil {
		t.Fatal(err)
	}
	var order []bool
	for _, line := range calls() {
		order = append(order, strings.Contains(line, "--traced"))
	}
	if want := []bool{false, true, true, false, false, true}; !slices.Equal(order, want) {
		t.Errorf("got %v, want %v", order, want)
	}
	item, ok := r.Item(3)
	if !ok || len(item.Commands) != 2 || len(item.Commands[0].Loads) != 1 || len(item.Commands[1].Loads[0].Trials) != 3 {
		t.Fatalf("got %+v", r)
	}
	if got := item.Commands[0]; got.Name != "a" || got.Line != a.Line() || got.Loads[0].Trials[2].ThroughputPerS != 1000 || got.Loads[0].Load.Concurrency != 8 {
		t.Errorf("got %+v", got)
	}
	if r.Versions.Stagemesh != "v1.2.3" || r.Machine.Cores == 0 || r.Machine.OS == "" {
		t.Errorf("got %+v", r)
	}
}

func TestRateIsShareOfMedianPeak(t *testing.T) {
	t.Parallel()
	first, second, third := reportOf(callers(64)), reportOf(callers(64)), reportOf(callers(64))
	first.Runs[0].ThroughputPerS, second.Runs[0].ThroughputPerS, third.Runs[0].ThroughputPerS = 100, 5000, 400
	open := reportOf(load.Load{Kind: load.Open, RatePerS: 800})
	open.Runs[0].Goodput = &load.Goodput{PerS: 350}
	open.Runs[0].Refusals = load.Distribution{Count: 7, P50MS: 1, P99MS: 3}
	script := `case "$*" in
	  *--rate*) cat "$folder/open";;
	  *) echo . >>"$folder/times"; cat "$folder/peak$(wc -l <"$folder/times" | tr -d ' ')";;
	esac`
	folder, calls := scripted(t, script, map[string]compare.Report{"peak1": first, "peak2": second, "peak3": third, "open": open})
	offered := command("2")
	offered.Share, offered.Peak = 2, "peak"
	r, err := suite.Run(t.Context(), suite.Settings{Program: fake, Folder: folder, Items: one(
		suite.Round{Times: 3, Commands: []suite.Command{command("peak", 64)}}, suite.Round{Times: 1, Commands: []suite.Command{offered}})})
	if err != nil {
		t.Fatal(err)
	}
	if last := calls()[3]; !strings.Contains(last, "--rate 800 --arrivals poisson") {
		t.Errorf("it calls %s", last)
	}
	item, _ := r.Item(3)
	got := item.Commands[1].Loads[0].Trials[0]
	if got.Goodput != 350 || got.Refused != 7 || got.RefusalP50MS != 1 || got.RefusalP99MS != 3 || !strings.Contains(item.Commands[1].Line, "--rate 800 ") {
		t.Errorf("got %+v, %s", got, item.Commands[1].Line)
	}
}

func TestOnlyWatchedCommandsKeepSamples(t *testing.T) {
	t.Parallel()
	script := `printf '%s' '{"version": 1, "runs": [{"answered": 1, "load": {"warmup_ms": 400}, "process": {"samples": [{"at_ms": 100}, {"at_ms": 500, "heap_mb": 20.5, "rss_mb": 70, "goroutines": 90}]}}]}'`
	folder, _ := scripted(t, script, nil)
	watched, other := command("watched", 1), command("other", 1)
	watched.Watched = true
	r, err := suite.Run(t.Context(), suite.Settings{Program: fake, Folder: folder, Items: one(suite.Round{Times: 1, Commands: []suite.Command{watched, other}})})
	if err != nil {
		t.Fatal(err)
	}
	want := []load.ProcessSample{{AtMS: 500, HeapMB: 20.5, RSSMB: 70, Goroutines: 90}}
	if got := r.Items[0].Commands; !slices.Equal(got[0].Loads[0].Trials[0].Samples, want) || got[1].Loads[0].Trials[0].Samples != nil {
		t.Errorf("got %+v", got)
	}
}

func TestChildErrorsNameTheCommand(t *testing.T) {
	t.Parallel()
	compared := command("a", 8)
	compared.Pairs = 2
	few, idle, stopped := reportOf(callers(8)), reportOf(callers(8)), reportOf(callers(8))
	idle.Runs[0].Answered, stopped.Runs[0].Interrupted = 0, true
	for name, test := range map[string]struct {
		script  string
		command suite.Command
		want    string
	}{
		"it fails":          {"echo no space >&2; exit 3", command("a", 8), "exit status 3: no space"},
		"other output":      {"echo nonsense", command("a", 8), "not a report: "},
		"another version":   {`echo '{"version": 7}'`, command("a", 8), compare.ErrVersion.Error()},
		"it has no run":     {`echo '{"version": 1}'`, command("a", 8), "the report has no run"},
		"a run is missing":  {`cat "$folder/few"`, command("a", 1, 8), "the report has 1 runs and 0 comparisons for 2 loads"},
		"no comparison":     {`cat "$folder/few"`, compared, "the report has 1 runs and 0 comparisons"},
		"no answer":         {`cat "$folder/idle"`, command("a", 8), "or had no answer"},
		"it was stopped":    {`cat "$folder/stopped"`, command("a", 8), "was interrupted"},
		"odd samples":       {`echo '{"version": 1, "runs": [{"process": {"samples": 1}}]}'`, command("a", 8), "not a report: "},
		"it prints for all": {`head -c 40000000 /dev/zero | tr '\0' x`, command("a", 8), "it printed more than 33554432 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			folder, _ := scripted(t, test.script, map[string]compare.Report{"few": few, "idle": idle, "stopped": stopped})
			r, err := suite.Run(t.Context(), suite.Settings{Program: fake, Folder: folder, Items: one(suite.Round{Times: 1, Commands: []suite.Command{test.command}})})
			if err == nil || !strings.HasPrefix(err.Error(), "item 3: "+test.command.Line()+": ") || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v", err)
			}
			if len(r.Items) != 0 {
				t.Errorf("it keeps %+v", r.Items)
			}
		})
	}
}

func TestItemsBeforeAFailureAreKept(t *testing.T) {
	t.Parallel()
	folder, _ := scripted(t, `case "$*" in *--traced*) exit 1;; esac; cat "$folder/report"`, map[string]compare.Report{"report": reportOf(callers(8))})
	broken := command("b", 8)
	broken.Traced = true
	items := []suite.Item{
		{Number: 1, Rounds: []suite.Round{{Times: 1, Commands: []suite.Command{command("a", 8)}}}},
		{Number: 2, Rounds: []suite.Round{{Times: 1, Commands: []suite.Command{broken}}}},
	}
	var log bytes.Buffer
	r, err := suite.Run(t.Context(), suite.Settings{Program: fake, Folder: folder, Items: items, Quick: true, Log: &log})
	if err == nil || !strings.HasPrefix(err.Error(), "item 2: ") || len(r.Items) != 1 || r.Items[0].Number != 1 || !r.Items[0].Quick {
		t.Errorf("got %+v, %v", r, err)
	}
	if !strings.Contains(log.String(), broken.Line()) {
		t.Errorf("it logs\n%s", log.String())
	}
}

func TestMissingPeakIsAnError(t *testing.T) {
	t.Parallel()
	lost := command("lost")
	lost.Share, lost.Peak = 2, "nothing"
	_, err := suite.Run(t.Context(), suite.Settings{Program: fake, Items: one(suite.Round{Times: 1, Commands: []suite.Command{lost}})})
	if err == nil || err.Error() != `item 3: lost: there is no peak "nothing"` {
		t.Errorf("got %v", err)
	}
}

func TestChildTimeIsBounded(t *testing.T) {
	t.Parallel()
	_, err := suite.Output(t.Context(), 500*time.Millisecond, "sh", "-c", "echo waiting >&2; exec sleep 60")
	if err == nil || !strings.HasPrefix(err.Error(), "it did not end within 500ms: waiting") {
		t.Errorf("got %v", err)
	}
}

func TestChildEndsWithContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := suite.Output(ctx, time.Minute, "sh", "-c", "exec sleep 60")
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestMissingProgramIsAnError(t *testing.T) {
	t.Parallel()
	_, err := suite.Run(t.Context(), suite.Settings{Program: "./there-is-no-such-program", Items: one(suite.Round{Times: 1, Commands: []suite.Command{command("a", 1)}})})
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

// The program is this test binary, which runs the real command.
func TestRealProgramIsMeasured(t *testing.T) {
	t.Parallel()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := suite.Command{
		Name: "all", Pipeline: "echo", Mesh: "echo1.yaml", Payload: "1KiB", Concurrency: []int{2, 4},
		Pairs: 2, Warmup: 20 * time.Millisecond, Duration: 100 * time.Millisecond,
	}
	items := []suite.Item{{Number: suite.InProcess, Rounds: []suite.Round{{Times: 1, Commands: []suite.Command{c}}}}}
	r, err := suite.Run(t.Context(), suite.Settings{Program: program, Folder: repository + "/bench", Items: items})
	if err != nil {
		t.Fatal(err)
	}
	loads := r.Items[0].Commands[0].Loads
	if len(loads) != 2 || r.Versions.Go == "" {
		t.Fatalf("got %+v", r)
	}
	for _, s := range loads {
		if c := s.Comparison; c == nil || len(c.Pairs) != 2 || c.Throughput.Median <= 0 || s.Trials[0].P50MS <= 0 {
			t.Errorf("got %+v", s)
		}
	}
}
