package store

import (
	"context"
	"encoding/json"
	"time"

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
	deadline, id := time.Now().Add(webhookTTL), pipeline.KeyedJobID(pipeline.WebhookQueue, tenant, ended.GetId())
	job := queuedJob(id, tenant, deadline, &inferencev1.Job{Attributes: map[string]string{NoticeOf: ended.GetId()}})
	job.Payload = &meshv1.QueuedJob_Http{Http: &inferencev1.HttpCall{Path: url, ContentType: "application/json", Body: body}}
	_, _, err = s.Submit(ctx, id, tenant, bus.JobHeader{Deadline: deadline}, job)
	return err
}
