package cli

import (
	"context"
	"errors"
	"net/http"
	"testing"

	"connectrpc.com/connect"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
)

func TestWaitIsLimitedUnlessACallTakesAsLongAsItsWork(t *testing.T) {
	t.Parallel()
	isLimited := false
	look := connect.UnaryInterceptorFunc(func(connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, _ connect.AnyRequest) (connect.AnyResponse, error) {
			_, isLimited = ctx.Deadline()
			return nil, errors.New("not sent")
		}
	})
	options := connect.WithInterceptors(connect.UnaryInterceptorFunc(limitWait), look)
	models := adminv1connect.NewModelServiceClient(http.DefaultClient, "http://127.0.0.1:1", options)
	jobs := inferencev1connect.NewJobServiceClient(http.DefaultClient, "http://127.0.0.1:1", options)
	infer := inferencev1connect.NewInferenceServiceClient(http.DefaultClient, "http://127.0.0.1:1", options)
	ctx := t.Context()
	for name, row := range map[string]struct {
		call    func() error
		limited bool
	}{
		"models list": {func() error { return errorOf(models.ListModels(ctx, connect.NewRequest(&adminv1.ListModelsRequest{}))) }, true},
		"models load": {func() error {
			return errorOf(models.EnsureLoaded(ctx, connect.NewRequest(&adminv1.EnsureLoadedRequest{})))
		}, false},
		"models alias": {func() error { return errorOf(models.SetAlias(ctx, connect.NewRequest(&adminv1.SetAliasRequest{}))) }, false},
		"jobs cancel":  {func() error { return errorOf(jobs.CancelJob(ctx, connect.NewRequest(&inferencev1.CancelJobRequest{}))) }, true},
		"jobs wait":    {func() error { return errorOf(jobs.GetJob(ctx, connect.NewRequest(&inferencev1.GetJobRequest{}))) }, false},
		"jobs submit": {func() error {
			return errorOf(jobs.SubmitJobs(ctx, connect.NewRequest(&inferencev1.SubmitJobsRequest{})))
		}, false},
		"infer": {func() error { return errorOf(infer.Infer(ctx, connect.NewRequest(&inferencev1.InferRequest{}))) }, false},
	} {
		if err := row.call(); err == nil || isLimited != row.limited {
			t.Errorf("%s: limited %t, %v", name, isLimited, err)
		}
	}
}

func errorOf[T any](_ *connect.Response[T], err error) error { return err }
