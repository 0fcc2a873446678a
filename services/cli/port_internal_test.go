package cli

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
)

func TestWaitIsLimitedUnlessACallTakesAsLongAsItsWork(t *testing.T) {
	t.Parallel()
	var limit time.Duration
	look := connect.UnaryInterceptorFunc(func(connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, _ connect.AnyRequest) (connect.AnyResponse, error) {
			limit = 0
			if at, isLimited := ctx.Deadline(); isLimited {
				limit = time.Until(at)
			}
			return nil, errors.New("not sent")
		}
	})
	options := connect.WithInterceptors(connect.UnaryInterceptorFunc(limitWait), look)
	models := adminv1connect.NewModelServiceClient(http.DefaultClient, "http://127.0.0.1:1", options)
	jobs := inferencev1connect.NewJobServiceClient(http.DefaultClient, "http://127.0.0.1:1", options)
	infer := inferencev1connect.NewInferenceServiceClient(http.DefaultClient, "http://127.0.0.1:1", options)
	ctx := t.Context()
	for name, row := range map[string]struct {
		call func() error
		// limit is 0 where there is none.
		limit time.Duration
	}{
		"models list": {func() error { return errorOf(models.ListModels(ctx, connect.NewRequest(&adminv1.ListModelsRequest{}))) }, answerTime},
		"models load": {func() error {
			return errorOf(models.EnsureLoaded(ctx, connect.NewRequest(&adminv1.EnsureLoadedRequest{})))
		}, 0},
		"models alias": {func() error { return errorOf(models.SetAlias(ctx, connect.NewRequest(&adminv1.SetAliasRequest{}))) }, 0},
		"jobs cancel":  {func() error { return errorOf(jobs.CancelJob(ctx, connect.NewRequest(&inferencev1.CancelJobRequest{}))) }, answerTime},
		"jobs wait":    {func() error { return errorOf(jobs.GetJob(ctx, connect.NewRequest(&inferencev1.GetJobRequest{}))) }, answerTime},
		"jobs submit": {func() error {
			return errorOf(jobs.SubmitJobs(ctx, connect.NewRequest(&inferencev1.SubmitJobsRequest{})))
		}, 0},
		"infer": {func() error { return errorOf(infer.Infer(ctx, connect.NewRequest(&inferencev1.InferRequest{}))) }, 0},
		"infer with a timeout": {func() error {
			return errorOf(infer.Infer(ctx, connect.NewRequest(&inferencev1.InferRequest{Timeout: durationpb.New(time.Hour)})))
		}, time.Hour + answerTime},
		"get result": {func() error {
			return errorOf(infer.GetResult(ctx, connect.NewRequest(&inferencev1.GetResultRequest{})))
		}, answerTime},
	} {
		if err := row.call(); err == nil || limit > row.limit || row.limit-limit >= answerTime {
			t.Errorf("%s: limited to %s, %v", name, limit, err)
		}
	}
}

func errorOf[T any](_ *connect.Response[T], err error) error { return err }
