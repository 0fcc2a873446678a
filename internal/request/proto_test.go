package request_test

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestTimelineHasAllFieldsOfItsSteps(t *testing.T) {
	t.Parallel()
	of := request.Timeline{Total: 3*time.Second + time.Nanosecond, Steps: []request.StepTiming{
		{
			Step: "label", Stage: "digits", Host: "host-1", Attempt: 1, QueueWait: time.Hour, BatchWait: -time.Millisecond,
			Run: 2500 * time.Millisecond, BatchSize: 4, BatchRows: 8, Rows: 2, Dispatch: "idle", Local: true, ModelWait: time.Minute, Path: "look/label",
		},
		{
			Step: "say", Stage: "voice", Host: "host-2", Attempt: 2, QueueWait: -90 * time.Minute, BatchWait: time.Nanosecond,
			Run: time.Microsecond, BatchSize: 5, BatchRows: 9, Rows: 1, Dispatch: "full", Local: true, ModelWait: time.Nanosecond, Path: "say",
		},
	}}
	response := (&request.Response{RequestID: "id", Timeline: of}).ToProto()
	if back, err := request.ResponseFromProto("", response); err != nil || !slices.Equal(back.Timeline.Steps, of.Steps) || back.Timeline.Total != of.Total {
		t.Errorf("came back as %+v, %v", back, err)
	}
	got := response.GetTimeline()
	if len(got.GetSteps()) != len(of.Steps) || got.GetTotal().AsDuration() != of.Total {
		t.Fatalf("got %v", got)
	}
	for i, step := range got.GetSteps() {
		if want := of.Steps[i].ToProto(); !proto.Equal(step, want) {
			t.Errorf("got %v, want %v", step, want)
		}
		fields := step.ProtoReflect().Descriptor().Fields()
		for j := range fields.Len() {
			if !step.ProtoReflect().Has(fields.Get(j)) {
				t.Errorf("step %s says nothing of %s", step.GetStep(), fields.Get(j).Name())
			}
		}
	}
}

func TestTimelineMayHaveNoStep(t *testing.T) {
	t.Parallel()
	if got := (&request.Response{Timeline: request.Timeline{Total: time.Second}}).ToProto().GetTimeline(); len(got.GetSteps()) != 0 || got.GetTotal().AsDuration() != time.Second {
		t.Errorf("got %v", got)
	}
}

func TestRequestComesBackFromItsMessage(t *testing.T) {
	t.Parallel()
	waits := true
	want := &request.Request{
		Pipeline: "digits", Inputs: []payload.Part{payload.OfBlob("x", "text/plain", []byte("7"))},
		Parameters: payload.Parameters{"k": payload.Int64(3)}, IdempotencyKey: "key", Timeout: time.Minute,
		Steps:      map[pipeline.StepName]pipeline.StepOptions{"classify": {Model: payload.ModelRef{Model: "m"}, Parameters: payload.Parameters{"t": payload.Bool(true)}}},
		Durability: pipeline.File, Priority: -1, WaitForCapacity: &waits, Metadata: map[string]string{"a": "b"}, Outputs: []string{"label"},
	}
	if got, err := request.FromProto(want.ToProto()); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
}
