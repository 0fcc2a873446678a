package meshfile_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// allBlocks has every block with every key.
const allBlocks = `
pipelines:
  blocks:
    steps:
      - {name: decode, stage: decode}
      - name: look
        parallel:
          quorum: 1
          within: 300ms
          branches:
            objects: {steps: [{name: detect, stage: detect, inputs: {x: pixels}}], give: {boxes: boxes}}
            scene: {steps: [{name: scene, stage: scene}], optional: true}
            blur:
              steps: [{name: blur, stage: blur}]
              give: {blur: score}
              missing: {blur: {datatype: FP64, shape: [1, 2], data: [0.5, 1]}}
      - name: labels
        map:
          over: {crop: crops}
          max_items: 16
          steps: [{name: classify, stage: classify, model: "m:1", parameters: {k: 3}}]
          on_item_error: fill
          fill: {label: {datatype: BYTES, data: [""]}, score: {shape: [], data: [0.5]}}
          give: {label: name, score: score}
          indices: which
      - name: route
        switch:
          - {when: {part: scene, equals: document}, steps: [{name: ocr, stage: ocr}]}
          - {when: {part: blur, above: 0.9, below: 2, all: true}, fail: {reason: INVALID_INPUT, message: too blurred}}
          - {when: {parameter: mode, in: [1, two, 3.5, true]}, steps: [{name: other, stage: ocr}], give: {text: words}}
          - {when: {metadata: user, matches: "a.*"}, steps: [{name: third, stage: ocr}]}
          - {when: {tenant: true, equals: "no"}, steps: [{name: fourth, stage: ocr}]}
          - {when: {part: boxes, index: 0, equals: 1}, steps: [{name: fifth, stage: ocr}]}
          - {when: {part: boxes, exists: false}, steps: [{name: sixth, stage: ocr}]}
          - {else: []}
      - name: rank
        split:
          by_metadata: user
          branches:
            stable: {weight: 95, steps: [{name: rank-a, stage: rank}]}
            trial: {weight: 5, steps: [{name: rank-b, stage: rank, alias: best}]}
      - name: caption
        try:
          steps: [{name: llm, stage: llm}]
          within: 800ms
          on: [DEADLINE_EXCEEDED, RUNNER_FAILED]
          else: [{name: template, stage: template}]
    outputs: [boxes, label]
`

func blocks(t *testing.T) pipeline.Pipeline {
	t.Helper()
	all, err := readPipelines(t, allBlocks)
	if err != nil {
		t.Fatal(err)
	}
	return all[0]
}

func TestBlocksAreTheSameInTheRegistry(t *testing.T) {
	t.Parallel()
	want := blocks(t)
	data, err := proto.Marshal(want.ToProto())
	if err != nil {
		t.Fatal(err)
	}
	var stored meshv1.Pipeline
	if err := proto.Unmarshal(data, &stored); err != nil {
		t.Fatal(err)
	}
	got, err := pipeline.FromProto(&stored)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v: is\n%+v, wanted is\n%+v", err, got, want)
	}
	if !want.HasBlocks() || len(want.StageSteps()) != 15 {
		t.Errorf("there are %d stages", len(want.StageSteps()))
	}
	after := blocks(t)
	after.Steps[1].Parallel.Within = time.Second
	after.Steps[5].Try.Else[0].Stage = "other"
	var keys []string
	for _, d := range meshfile.Differences(want, after) {
		keys = append(keys, d.Key+": "+d.Old+" -> "+d.New)
	}
	if want := []string{"steps[1].parallel.within: 300ms -> 1s", "steps[5].try.else[0].stage: template -> other"}; !slices.Equal(keys, want) {
		t.Errorf("the differences are %q, wanted are %q", keys, want)
	}
}

// Each mistake in a block has its place and a sentence that says what to do.
func TestMistakesInBlocks(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ before, after, want string }{
		"no else":                 {"          - {else: []}\n", "", "steps[3].switch[6]: the last case has to be"},
		"an else in the middle":   {"{when: {part: boxes, exists: false}, steps: [{name: sixth, stage: ocr}]}", "{else: []}", "steps[3].switch[6]: only the last case has"},
		"weights":                 {"weight: 5,", "weight: 6,", "steps[4].split.branches: the weights sum to 101"},
		"a negative weight":       {"weight: 95,", "weight: -1,", "steps[4].split.branches.stable.weight: -1 is negative"},
		"a part given twice":      {"stage: scene}], optional", "stage: scene}], give: {boxes: s}, optional", "scene.give.boxes: the branch objects gives"},
		"a name twice":            {"name: classify", "name: detect", "steps[2].map.steps[0]: a step named detect is there already"},
		"two blocks in one":       {"        map:", "        try: {steps: [{name: q, stage: q}], else: [{name: r, stage: r}]}\n        map:", "steps[2]: the step is several blocks"},
		"a stage and a block":     {"      - name: look\n", "      - name: look\n        stage: look\n", "steps[1]: the step is a block, so stage"},
		"quorum":                  {"quorum: 1", "quorum: 4", "steps[1].parallel.quorum: 4 of 3 branches"},
		"too many items":          {"max_items: 16", "max_items: 5000", "steps[2].map.max_items: at most 4096"},
		"fill without values":     {"          fill: {label: {datatype: BYTES, data: [\"\"]}, score: {shape: [], data: [0.5]}}\n", "", "steps[2].map.fill: is required"},
		"missing without parts":   {"missing: {blur: {datatype: FP64, shape: [1, 2], data: [0.5, 1]}}", "missing: {}", "branches.blur.missing: at least one part"},
		"in without values":       {"in: [1, two, 3.5, true]", "in: []", "switch[2].when.equals: exactly one condition"},
		"a fill of another type":  {"datatype: BYTES, data: [\"\"]", "datatype: INT8, data: [300]", "steps[2].map.fill.label.data[0]: 300 is not a value"},
		"a fill of another shape": {"shape: [1, 2]", "shape: [3]", "missing.blur.shape:"},
		"what a failure does":     {"on_item_error: fill", "on_item_error: ignore", `steps[2].map.on_item_error: "ignore" is not`},
		"no condition":            {"{tenant: true, equals: \"no\"}", "{tenant: true}", "switch[4].when.equals: exactly one condition"},
		"two subjects":            {"{metadata: user, matches", "{metadata: user, part: x, matches", "switch[3].when.part: exactly one of"},
		"a bad expression":        {"matches: \"a.*\"", "matches: \"a(\"", "switch[3].when.matches:"},
		"a number and metadata":   {"matches: \"a.*\"", "equals: 2", "switch[3].when.equals: metadata and tenants are text; write \"2\" in quotes"},
		"numbers and metadata":    {"matches: \"a.*\"", "in: [a, 2]", "switch[3].when.in[1]: metadata and tenants are text"},
		"metadata above a number": {"matches: \"a.*\"", "above: 2", "switch[3].when.above: above and below compare numbers"},
		"a step of else":          {"template", "Template", "steps[5].try.else[0]: step name"},
		"a fill that overflows":   {"score: {shape: [], data: [0.5]}", "score: {shape: [], data: [1e39]}", "steps[2].map.fill.score.data[0]: 1e+39 is not a value of datatype FP32"},
		"an open quote":           {"matches: \"a.*\"", "matches: \"\\\\Qa\"", "switch[3].when.matches:"},
		"an unknown reason":       {"on: [DEADLINE_EXCEEDED, RUNNER_FAILED]", "on: [TOO_SLOW]", `steps[5].try.on[0]: "TOO_SLOW" is not`},
		"an unknown key":          {"within: 800ms", "whithin: 800ms", "whithin"},
		"keep":                    {"    outputs: [boxes", "    keep: [a]\n    outputs: [boxes", "keep: a pipeline with blocks keeps every part"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if !strings.Contains(allBlocks, test.before) {
				t.Fatalf("the file has no %q", test.before)
			}
			_, err := readPipelines(t, strings.Replace(allBlocks, test.before, test.after, 1))
			if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "p.yaml:") {
				t.Errorf("the error is %v, wanted is %q with a line", err, test.want)
			}
		})
	}
}

func TestBlocksNestToADepth(t *testing.T) {
	t.Parallel()
	nested := func(depth int) string {
		steps := "[{name: s, stage: s}]"
		for i := range depth {
			steps = fmt.Sprintf("[{name: b%d, map: {over: {x: x}, max_items: 1, steps: %s}}]", i, steps)
		}
		return "pipelines: {p: {steps: " + steps + "}}\n"
	}
	if _, err := readPipelines(t, nested(pipeline.MaxDepth)); err != nil {
		t.Error(err)
	}
	if _, err := readPipelines(t, nested(pipeline.MaxDepth+1)); err == nil || !strings.Contains(err.Error(), "deeper than 8") {
		t.Errorf("the error is %v", err)
	}
}
