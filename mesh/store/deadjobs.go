package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// PutJob stores a dead letter about the message at a number of a queue of jobs, with that
// message as its item if it fits. It may be repeated. Where the message is none any more,
// there is no dead letter.
func (s *DeadLetters) PutJob(ctx context.Context, seq uint64, d envelope.DeadLetter) error {
	msg, err := s.bus.At(ctx, s.bus.JobStream(d.Queue), seq)
	if err != nil || msg == nil {
		return s.wrap(err)
	}
	d.Item, d.QueuedAt, d.DeadLetteredAt, d.Durability = msg.Data, msg.At, time.Now(), pipeline.File
	if id, tenant, ok := s.bus.JobOf(msg.Subject); ok {
		d.Job, d.Tenant = id.String(), tenant
	}
	id := fmt.Sprintf("%s/%d/%d", s.bus.JobStream(d.Queue), msg.At.UnixNano(), d.Deliveries)
	m, err := s.bus.DeadJob(&d, id)
	if errors.Is(err, bus.ErrTooLarge) {
		d.Item = nil
		m, err = s.bus.DeadJob(&d, id)
	}
	if err == nil {
		_, err = s.bus.PublishAndWait(ctx, m)
	}
	return s.wrap(err)
}

// ReplayableJob returns the dead letter's job, or ErrNotReplayable.
func (l DeadLetter) ReplayableJob() (*meshv1.QueuedJob, error) {
	out := new(meshv1.QueuedJob)
	err := proto.Unmarshal(l.Item, out)
	switch job := out.GetJob(); {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrNotReplayable, err)
	case l.Job == "" || job == nil || out.GetPayload() == nil:
		return nil, fmt.Errorf("%w: it is no job", ErrNotReplayable)
	case !job.GetDeadline().IsValid() || !job.GetAcceptedAt().AsTime().Before(job.GetDeadline().AsTime()):
		return nil, fmt.Errorf("%w: it never had any time", ErrNotReplayable)
	}
	return out, nil
}

// replayJob submits a job again, with as much time as it had. The new ID is made from the dead
// letter, so that a repeated replay submits it once.
func (s *DeadLetters) replayJob(ctx context.Context, dead DeadLetter, body []byte) (Replayed, error) {
	queued, err := dead.ReplayableJob()
	if err != nil {
		return Replayed{}, err
	}
	id := pipeline.JobID{Queue: dead.Queue, UUID: uuid.NewSHA1(uuid.NameSpaceOID, fmt.Appendf(nil, "%s/%d/%s", dead.Mesh, dead.Seq, dead.Job))}
	first := queued.GetJob()
	deadline := time.Now().Add(first.GetDeadline().AsTime().Sub(first.GetAcceptedAt().AsTime()))
	job := queuedJob(id, dead.Tenant, deadline, first)
	job.Payload, job.Webhook = queued.GetPayload(), queued.GetWebhook()
	if body != nil {
		if err := setBody(job, body); err != nil {
			return Replayed{}, err
		}
	}
	m, err := s.bus.Job(id, dead.Tenant, bus.JobHeader{Deadline: deadline, Priority: first.GetPriority(), Attributes: first.GetAttributes()}, job)
	if err == nil {
		_, err = s.bus.PublishAndWait(ctx, m)
	}
	switch {
	case err == nil:
		return Replayed{JobID: id.String(), Deadline: deadline}, s.deleteReplayed(ctx, dead.Seq)
	case errors.Is(err, bus.ErrTooLarge):
		return Replayed{}, fault.Newf(fault.PayloadTooLarge, "the job is too large: %w", err)
	case errors.Is(err, bus.ErrQueueFull):
		return Replayed{}, fault.Newf(fault.QueueFull, "queue %s is full", dead.Queue).WithRetryAfter(brokerRetryAfter).Caused(err)
	case errors.Is(err, bus.ErrNoQueue):
		return Replayed{}, fault.Newf(fault.UnknownQueue, "there is no queue %s", dead.Queue).Caused(err)
	}
	return Replayed{}, s.unavailable(ctx, err)
}

// queuedJob returns a job that is accepted now, like another one.
func queuedJob(id pipeline.JobID, tenant string, deadline time.Time, like *inferencev1.Job) *meshv1.QueuedJob {
	return &meshv1.QueuedJob{Tenant: tenant, Job: &inferencev1.Job{
		Id: id.String(), Queue: string(id.Queue), Pipeline: like.GetPipeline(), State: inferencev1.JobState_JOB_STATE_QUEUED,
		Priority: like.GetPriority(), Attributes: like.GetAttributes(), AcceptedAt: timestamppb.Now(), Deadline: timestamppb.New(deadline),
	}}
}

// setBody replaces the payload of a job.
func setBody(job *meshv1.QueuedJob, body []byte) error {
	if call := job.GetHttp(); call != nil {
		call.Body = body
		return nil
	}
	inputs := job.GetInfer().GetInputs()
	if len(inputs) != 1 || inputs[0].GetBlob() == nil {
		return errNoBody()
	}
	inputs[0].GetBlob().Data = body
	return nil
}

func errNoBody() *fault.Fault {
	return fault.InField(fault.InvalidRequest, "body", "can only replace the one input of a job or an item, a blob; this one has others")
}
