package store

import (
	"context"
	"encoding/json"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	// NoticeOf is the attribute of a notice that has the ID of the job that has ended.
	NoticeOf = "job"

	webhookTTL           = 3 * 24 * time.Hour
	webhookQueueMaxBytes = 256 << 20
)

// WebhookQueueSettings are those of the built-in queue.
func WebhookQueueSettings() JobQueueSettings {
	return JobQueueSettings{TTL: webhookTTL, MaxBytes: webhookQueueMaxBytes}
}

// Notify puts the notice of a job that has ended into the queue of webhooks: a job that calls the
// URL, with the ended job and not its result. Repeated for that job, it adds no second call.
func (s *Jobs) Notify(ctx context.Context, tenant, url string, ended *inferencev1.Job) error {
	document := pipeline.JobDocumentOf(ended)
	body, err := json.Marshal(struct {
		Type      string               `json:"type"`
		Timestamp string               `json:"timestamp"`
		Data      pipeline.JobDocument `json:"data"`
	}{"job." + document.State, document.EndedAt, document})
	if err != nil {
		return err
	}
	now := time.Now()
	deadline, id := now.Add(webhookTTL), pipeline.KeyedJobID(pipeline.WebhookQueue, tenant, ended.GetId())
	_, _, err = s.Submit(ctx, id, tenant, bus.JobHeader{Deadline: deadline}, &meshv1.QueuedJob{
		Tenant: tenant, Payload: &meshv1.QueuedJob_Http{Http: &inferencev1.HttpCall{Path: url, ContentType: "application/json", Body: body}},
		Job: &inferencev1.Job{
			Id: id.String(), Queue: string(id.Queue), State: inferencev1.JobState_JOB_STATE_QUEUED,
			AcceptedAt: timestamppb.New(now), Deadline: timestamppb.New(deadline), Attributes: map[string]string{NoticeOf: ended.GetId()},
		},
	})
	return err
}
