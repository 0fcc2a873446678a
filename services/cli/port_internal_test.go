package cli

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
)

func TestWaitIsLimitedUnlessACallTakesAsLongAsItsWork(t *testing.T) {
	t.Parallel()
	hour := durationpb.New(time.Hour)
	large := &inferencev1.InferRequest{Timeout: hour, Inputs: []*inferencev1.Part{{Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{Data: make([]byte, 10*slowBytes)}}}}}
	for _, row := range []struct {
		request any
		// limit is 0 where there is none.
		limit time.Duration
	}{
		{&adminv1.ListModelsRequest{}, answerTime},
		{&adminv1.EnsureLoadedRequest{Wait: true}, 0},
		{&adminv1.SetAliasRequest{}, 0},
		{&inferencev1.CancelJobRequest{}, answerTime},
		{&inferencev1.GetJobRequest{Wait: hour}, time.Hour + answerTime},
		{&inferencev1.GetResultRequest{Wait: hour}, time.Hour + answerTime},
		{&inferencev1.GetResultRequest{}, answerTime},
		{&inferencev1.SubmitJobsRequest{}, 0},
		{&inferencev1.InferRequest{}, 0},
		{&inferencev1.InferRequest{Timeout: hour}, time.Hour + answerTime},
		{large, time.Hour + answerTime + 10*time.Second},
	} {
		if limit, isLimited := answerLimit(row.request); limit != row.limit || isLimited != (row.limit > 0) {
			t.Errorf("%T: limited to %s, %t", row.request, limit, isLimited)
		}
	}
}
