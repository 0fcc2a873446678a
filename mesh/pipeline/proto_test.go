package pipeline_test

import (
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestPipelinesRoundTripThroughJSON(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]pipeline.Pipeline{
		"the least": {Name: "p", Steps: []pipeline.Step{{Name: "s", Stage: "t"}}},
		"all": {
			Name: "p", Timeout: 1500 * time.Millisecond, Durability: pipeline.File, Keep: []string{"image"}, MaxInFlight: 7, WaitForCapacity: true,
			Steps: []pipeline.Step{
				{
					Name: "one", Stage: "a", Model: payload.ModelRef{Alias: "best", Version: "2"}, Inputs: map[string]string{"x": "image"}, Locked: true,
					Parameters: payload.Parameters{
						"b": payload.Bool(true), "i": payload.Int64(math.MinInt64), "u": payload.Uint64(math.MaxUint64),
						"d": payload.Double(0.1), "s": payload.String("ä"),
					},
				},
				{Name: "two", Stage: "b", Model: payload.ModelRef{Model: "m"}},
			},
		},
	} {
		data, err := protojson.Marshal(p.ToProto())
		if err != nil {
			t.Fatal(err)
		}
		in := &meshv1.Pipeline{}
		if err := protojson.Unmarshal(data, in); err != nil {
			t.Fatal(err)
		}
		got, err := pipeline.FromProto(in)
		if err != nil || !reflect.DeepEqual(got, p) {
			t.Errorf("%s: is %+v, %v after %s", name, got, err, data)
		}
	}
}

func TestBadPipelineErrorsNameTheCause(t *testing.T) {
	t.Parallel()
	valid := func() *meshv1.Pipeline {
		return &meshv1.Pipeline{Name: "p", Steps: []*meshv1.PipelineStep{{Name: "s", Stage: "t"}}}
	}
	for name, test := range map[string]struct {
		edit func(*meshv1.Pipeline)
		want string
	}{
		"nothing":        {func(p *meshv1.Pipeline) { p.Name = "" }, "pipeline"},
		"of one stage":   {func(p *meshv1.Pipeline) { p.Name = "stage:t" }, "pipeline"},
		"no steps":       {func(p *meshv1.Pipeline) { p.Steps = nil }, "pipeline p: steps:"},
		"an empty step":  {func(p *meshv1.Pipeline) { p.Steps[0] = nil }, "pipeline p: steps[0]:"},
		"no such stage":  {func(p *meshv1.Pipeline) { p.Steps[0].Stage = "T" }, "pipeline p: steps[0]: stage"},
		"no value":       {func(p *meshv1.Pipeline) { p.Steps[0].Parameters = map[string]*inferencev1.Value{"x": {}} }, `pipeline p: steps[0]: parameters: parameter "x"`},
		"long ago":       {func(p *meshv1.Pipeline) { p.Timeout = durationpb.New(-time.Second) }, "pipeline p: timeout:"},
		"no time":        {func(p *meshv1.Pipeline) { p.Timeout = &durationpb.Duration{Nanos: -2e9} }, "pipeline p: timeout:"},
		"somewhere else": {func(p *meshv1.Pipeline) { p.Durability = 9 }, "pipeline p: durability"},
		"without bounds": {func(p *meshv1.Pipeline) { p.MaxInFlight = math.MaxUint32 }, "pipeline p: max_in_flight:"},
		"not finite": {func(p *meshv1.Pipeline) {
			p.Steps = append(p.Steps, &meshv1.PipelineStep{Name: "m", Block: &meshv1.PipelineStep_Map{Map: &meshv1.MapBlock{
				Over: map[string]string{"x": "x"}, Steps: []*meshv1.PipelineStep{{Name: "u", Stage: "t"}}, OnItemError: "fill",
				Fill: map[string]*meshv1.ConstantTensor{"y": {Shape: []int64{1}, Data: []*inferencev1.Value{payload.Double(math.NaN()).ToProto()}}},
			}}})
		}, "pipeline p: steps[1].map.fill.y.data[0]: NaN is not a finite number"},
		"the same twice":   {func(p *meshv1.Pipeline) { p.Steps = append(p.Steps, p.Steps[0]) }, "pipeline p: steps[1]:"},
		"kept twice":       {func(p *meshv1.Pipeline) { p.Keep = []string{"x", "x"} }, "pipeline p: keep:"},
		"more than a step": {func(p *meshv1.Pipeline) { p.Steps = make([]*meshv1.PipelineStep, 65) }, "pipeline p: steps"},
	} {
		p := valid()
		test.edit(p)
		if _, err := pipeline.FromProto(p); err == nil || !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
