package port

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/gateway/call"
)

func TestTimelineHasAllFieldsOfItsSteps(t *testing.T) {
	t.Parallel()
	of := call.Timeline{Total: 3*time.Second + time.Nanosecond, Steps: []call.StepTiming{
		{
			Step: "label", Stage: "digits", Host: "host-1", Attempt: 1, QueueWait: time.Hour, BatchWait: -time.Millisecond,
			Run: 2500 * time.Millisecond, BatchSize: 4, BatchRows: 8, Dispatch: "idle", Local: true, ModelWait: time.Minute,
		},
		{
			Step: "say", Stage: "voice", Host: "host-2", Attempt: 2, QueueWait: -90 * time.Minute, BatchWait: time.Nanosecond,
			Run: time.Microsecond, BatchSize: 5, BatchRows: 9, Dispatch: "full", Local: true, ModelWait: time.Nanosecond,
		},
	}}
	got := timeline(of)
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
	if got := timeline(call.Timeline{Total: time.Second}); len(got.GetSteps()) != 0 || got.GetTotal().AsDuration() != time.Second {
		t.Errorf("got %v", got)
	}
}
