package envelope

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// StepTiming is what one step of a request cost.
type StepTiming struct {
	Step  pipeline.StepName
	Stage pipeline.StageName
	Host  pipeline.HostID
	// Attempt counts deliveries of the item to hosts of the stage.
	Attempt uint32
	// QueueWait is from the broker's receipt until a host had the item.
	QueueWait time.Duration
	// BatchWait is from the item's arrival at the host until its dispatch.
	BatchWait time.Duration
	// Run is the runner's time for the whole batch.
	Run time.Duration
	// BatchSize counts items, BatchRows rows.
	BatchSize, BatchRows uint32
	// Dispatch is why the batch was dispatched.
	Dispatch string
}

// ToProto converts the timing for the wire.
func (t StepTiming) ToProto() *inferencev1.StepTiming {
	return &inferencev1.StepTiming{
		Step:           string(t.Step),
		Stage:          string(t.Stage),
		Host:           string(t.Host),
		Attempt:        t.Attempt,
		QueueWait:      durationpb.New(t.QueueWait),
		BatchWait:      durationpb.New(t.BatchWait),
		Run:            durationpb.New(t.Run),
		BatchSize:      t.BatchSize,
		BatchRows:      t.BatchRows,
		DispatchReason: t.Dispatch,
	}
}

func timingsToProto(timings []StepTiming) []*inferencev1.StepTiming {
	out := make([]*inferencev1.StepTiming, len(timings))
	for i, t := range timings {
		out[i] = t.ToProto()
	}
	return out
}

func timingsFromProto(in []*inferencev1.StepTiming, most int) ([]StepTiming, error) {
	if len(in) > most {
		return nil, fmt.Errorf("timings of %d steps, at most %d are taken", len(in), most)
	}
	out := make([]StepTiming, len(in))
	for i, t := range in {
		out[i] = StepTiming{
			Step:      pipeline.StepName(t.GetStep()),
			Stage:     pipeline.StageName(t.GetStage()),
			Host:      pipeline.HostID(t.GetHost()),
			Attempt:   t.GetAttempt(),
			QueueWait: t.GetQueueWait().AsDuration(),
			BatchWait: t.GetBatchWait().AsDuration(),
			Run:       t.GetRun().AsDuration(),
			BatchSize: t.GetBatchSize(),
			BatchRows: t.GetBatchRows(),
			Dispatch:  t.GetDispatchReason(),
		}
	}
	return out, nil
}
