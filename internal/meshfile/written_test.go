package meshfile_test

import (
	"bytes"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func full() pipeline.Pipeline {
	return pipeline.Pipeline{
		Name: "full", Timeout: 1500 * time.Millisecond, Durability: pipeline.File, Keep: []string{"image", "010"}, MaxInFlight: 7, WaitForCapacity: true,
		Steps: []pipeline.Step{
			{
				Name: "one", Stage: "a", Model: payload.ModelRef{Alias: "best", Version: "2"}, Inputs: map[string]string{"x": "true"}, Locked: true,
				Parameters: payload.Parameters{
					"b": payload.Bool(true), "i": payload.Int64(-3), "u": payload.Uint64(math.MaxUint64), "d": payload.Double(0.1),
					"whole": payload.Double(2), "huge": payload.Double(1e300), "s": payload.String("ä: #"), "digits": payload.String("3"), "yes": payload.String("true"), "none": payload.String(""),
				},
			},
			{Name: "two", Stage: "b", Model: payload.ModelRef{Model: "org/model:7"}},
		},
	}
}

// odds are texts that a reader of YAML could take for something else.
func odds() []string {
	return []string{
		"1e3", "12e03", "1e400", "0x1F", "0o7", "010", "1_000", "-1", "+1", ".5", "1.", ".inf", "-.Inf", ".nan", "NaN", "Inf",
		"true", "True", "FALSE", "null", "Null", "~", "yes", "No", "on", "OFF", "y", "N", "<<", "=", "-", "--", "---", "...", "- a", "? x", ": x", "x: y", "x:", ":x",
		"a b", " a", "a ", "a#b", "a #b", "# a", "@a", "`a`", "%a", "!a", "!!str a", "&a", "*a", "|", ">", "|-", "[a]", "{a: b}", "{}", "[]", "a, b", "'a'", "\"a\"", "it's", `a\b`, `\n`,
		"a\tb", "\t", "\r", "a\r\nb", "\n", "a\n", "\na", "a\n\nb", "\x00", "\x07", "\x1b[2J", "\x7f", "\u0085", "\u009b", "\u00a0", "\u2028", "\ufeff", "\U0001F600", "\U000E0001", "ä", "日本", "<&>",
		"2026-11-21", "12:30:45", "1.5s", strings.Repeat("x", 200), strings.Repeat("long word ", 12),
	}
}

func readPipelines(t *testing.T, text string) ([]pipeline.Pipeline, error) {
	t.Helper()
	path := testbed.WriteFile(t, "p.yaml", text)
	return meshfile.ReadPipelines(path)
}

func TestWrittenPipelinesAreReadAgain(t *testing.T) {
	t.Parallel()
	want := []pipeline.Pipeline{full(), blocks(t), {Name: "least", Steps: []pipeline.Step{{Name: "s", Stage: "t"}}}}
	for i, odd := range odds() {
		p := pipeline.Pipeline{Name: pipeline.Name(fmt.Sprintf("odd-%d", 100+i)), Keep: []string{odd}, Steps: []pipeline.Step{{
			Name: "s", Stage: "t", Model: payload.ModelRef{Model: odd, Version: odd}, Parameters: payload.Parameters{odd: payload.String(odd), "k": payload.String(odd)}, Inputs: map[string]string{odd: odd},
		}}}
		if p.Validate() == nil {
			want = append(want, p)
		}
	}
	slices.SortFunc(want, func(a, b pipeline.Pipeline) int { return strings.Compare(string(a.Name), string(b.Name)) })
	text := meshfile.WritePipelines(want...)
	if bytes.ContainsFunc(text, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) {
		t.Errorf("what is written has characters that do not print:\n%q", text)
	}
	got, err := readPipelines(t, string(text))
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v: is\n%+v, wanted is\n%+v, after\n%s", err, got, want, text)
	}
}

func TestPipelinesAreReadWithoutStages(t *testing.T) {
	t.Parallel()
	got, err := readPipelines(t, "mesh: m\nstages: {a: {runner: {nobody_knows: {}}, queue: {durabilities: [memory]}}}\npipelines: {p: {durability: file, steps: [{name: s, stage: a}, {name: t, stage: elsewhere}]}}\n")
	if err != nil || len(got) != 1 || len(got[0].Steps) != 2 {
		t.Errorf("there are %v, %v", got, err)
	}
	for text, want := range map[string]string{
		"mesh: m\n":                     "pipelines: there are none",
		"pipelines: {p: {steps: []}}\n": "pipelines.p.steps: a pipeline has",
		"pipelines: {p: {steps: [{name: s, stage: S}]}}\n":           "pipelines.p.steps[0]: stage name",
		"pipelines: {p: {step: [{name: s, stage: s}]}}\n":            `pipelines.p: "step" is not a key`,
		"pipelines: {\"stage:x\": {steps: [{name: s, stage: s}]}}\n": "pipelines",
	} {
		if _, err := readPipelines(t, text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestPipelineDifferencesAreListed(t *testing.T) {
	t.Parallel()
	after := full()
	after.Timeout, after.Keep, after.WaitForCapacity = 0, []string{"image"}, false
	after.Steps = []pipeline.Step{after.Steps[0]}
	after.Steps[0].Stage, after.Steps[0].Inputs, after.Steps[0].Locked = "c", nil, false
	after.Steps[0].Parameters = payload.Parameters{"b": payload.Bool(true), "i": payload.Int64(4), "digits": payload.Int64(3), "new": payload.String("x")}
	var got []string
	for _, d := range meshfile.Differences(full(), after) {
		got = append(got, d.Key+": "+d.Old+" -> "+d.New)
	}
	want := []string{
		"steps[0].stage: a -> c", `steps[0].parameters.digits: "3" -> 3`, "steps[0].parameters.i: -3 -> 4", "steps[0].parameters.new:  -> x",
		`keep: [image, "010"] -> [image]`, "steps[0].parameters.d: 0.1 -> ", "steps[0].parameters.huge: 1e+300 -> ", `steps[0].parameters.none: "" -> `,
		`steps[0].parameters.s: "ä: #" -> `, "steps[0].parameters.u: 18446744073709551615 -> ", "steps[0].parameters.whole: 2.0 -> ", `steps[0].parameters."yes": "true" -> `,
		"steps[0].locked: true -> ", `steps[0].inputs.x: "true" -> `, "steps[1].name: two -> ", "steps[1].stage: b -> ", `steps[1].model: "org/model:7" -> `, "timeout: 1.5s -> ", "wait_for_capacity: true -> ",
	}
	if !slices.Equal(got, want) {
		t.Errorf("differences are\n%s\nwanted are\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if d := meshfile.Differences(full(), full()); len(d) > 0 {
		t.Errorf("of one pipeline there are %v", d)
	}
}
