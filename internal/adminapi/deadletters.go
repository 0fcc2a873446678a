package adminapi

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

func (h *handler) listDeadLetters(ctx context.Context, in *adminv1.ListDeadLettersRequest) (*adminv1.ListDeadLettersResponse, error) {
	if stage := in.GetStage(); stage != "" {
		if err := pipeline.ValidName("stage", stage); err != nil {
			return nil, transport.InvalidField("stage", err)
		}
	}
	if queue := in.GetQueue(); queue != "" {
		if err := pipeline.ValidName("queue", queue); err != nil {
			return nil, transport.InvalidField("queue", err)
		}
		if in.GetStage() != "" {
			return nil, fault.InField(fault.InvalidRequest, "queue", "a dead letter is of a stage or of a queue, not of both")
		}
	}
	page, err := h.DeadLetters.List(ctx, store.DeadLetterQuery{
		Stage: pipeline.StageName(in.GetStage()), Queue: pipeline.QueueName(in.GetQueue()), From: in.GetFrom(), Limit: int(min(in.GetLimit(), store.MaxPageSize)),
	})
	if err != nil {
		return nil, err
	}
	out := &adminv1.ListDeadLettersResponse{Next: page.Next, Unreadable: page.Unreadable}
	for _, dead := range page.DeadLetters {
		out.DeadLetters = append(out.DeadLetters, summary(decode(dead)))
	}
	return out, nil
}

func (h *handler) getDeadLetter(ctx context.Context, in *adminv1.GetDeadLetterRequest) (*adminv1.GetDeadLetterResponse, error) {
	if in.GetMessageBytes() > maxRaw {
		return nil, fault.InField(fault.InvalidRequest, "message_bytes", "%d, at most %d are allowed", in.GetMessageBytes(), maxRaw)
	}
	if in.GetBodyBytes() > maxRaw {
		return nil, fault.InField(fault.InvalidRequest, "body_bytes", "%d, at most %d are allowed", in.GetBodyBytes(), maxRaw)
	}
	if in.GetMessageBytes() > 0 || in.GetBodyBytes() > 0 {
		if err := refuseReader(ctx, "see payloads"); err != nil {
			return nil, err
		}
	}
	dead, err := h.DeadLetters.Get(ctx, in.GetSeq())
	if err != nil {
		return nil, deadLetterFault(err, in.GetSeq())
	}
	letter := decode(dead)
	out := full(letter)
	out.RawMessage = dead.Item[:min(len(dead.Item), int(in.GetMessageBytes()))]
	if body := letter.body(); body != nil && in.GetBodyBytes() > 0 && len(*body) <= int(in.GetBodyBytes()) {
		if out.Body = *body; out.Body == nil {
			out.Body = []byte{} // nil is none
		}
	}
	if err := budget.FromContext(ctx).ReserveResponse(int64(len(out.RawMessage) + len(out.Body))); err != nil {
		return nil, err
	}
	return &adminv1.GetDeadLetterResponse{DeadLetter: out}, nil
}

func (h *handler) replayDeadLetter(ctx context.Context, in *adminv1.ReplayDeadLetterRequest) (*adminv1.ReplayDeadLetterResponse, error) {
	replayed, err := h.DeadLetters.Replay(ctx, in.GetSeq(), in.GetBody())
	if err != nil && replayed.RequestID == "" && replayed.JobID == "" {
		return nil, deadLetterFault(err, in.GetSeq())
	}
	h.Logger.Info("dead letter replayed", "dead_letter", in.GetSeq(), "request", replayed.RequestID, "job", replayed.JobID)
	if err != nil {
		h.Logger.Warn("replayed dead letter remains", "dead_letter", in.GetSeq(), "error", err)
	}
	return &adminv1.ReplayDeadLetterResponse{
		RequestId:         string(replayed.RequestID),
		ExecutionId:       string(replayed.ExecutionID),
		Deadline:          timestamppb.New(replayed.Deadline),
		DeadLetterRemains: err != nil,
		JobId:             replayed.JobID,
	}, nil
}

func (h *handler) deleteDeadLetter(ctx context.Context, in *adminv1.DeleteDeadLetterRequest) (*adminv1.DeleteDeadLetterResponse, error) {
	if err := h.DeadLetters.Delete(ctx, in.GetSeq()); err != nil {
		return nil, deadLetterFault(err, in.GetSeq())
	}
	h.Logger.Info("dead letter deleted", "dead_letter", in.GetSeq())
	return &adminv1.DeleteDeadLetterResponse{}, nil
}

// deadLetterFault returns the fault of an error about one dead letter.
func deadLetterFault(err error, seq uint64) error {
	switch {
	case errors.Is(err, store.ErrNotReplayable):
		return fault.Newf(fault.NotReplayable, "dead letter %d: %s", seq, plainText(err)).Caused(err)
	case errors.Is(err, store.ErrUnreadable):
		return fault.Newf(fault.NotFound, "number %d: %s; deleting it removes it", seq, plainText(err)).Caused(err)
	case errors.Is(err, store.ErrNoDeadLetter):
		return fault.Newf(fault.NotFound, "there is no dead letter %d: it was replayed or deleted, is past its retention, or never was", seq).Caused(err)
	}
	return err
}

// plainText returns an error's text in UTF-8, without the
// spaces that the protobuf library varies by intent.
func plainText(err error) string {
	return strings.ReplaceAll(strings.ToValidUTF8(err.Error(), "\uFFFD"), "\u00a0", " ")
}

// Bounds on what is returned of a dead letter: runes of a text, and bytes of the raw message or the
// payload.
const (
	maxText = 400
	maxRaw  = 64 << 20
)

// decodedLetter is a dead letter with what is in it, if its message decodes.
type decodedLetter struct {
	store.DeadLetter
	// Its item, or its job.
	item *envelope.Envelope
	job  *meshv1.QueuedJob
	// notReplayable is why the dead letter cannot be replayed, or nil.
	notReplayable error
}

func decode(l store.DeadLetter) decodedLetter {
	out := decodedLetter{DeadLetter: l}
	if l.Queue != "" {
		out.job, out.notReplayable = l.ReplayableJob()
		return out
	}
	if out.item, out.notReplayable = l.Replayable(); out.notReplayable != nil {
		// It may still be an item, of another mesh.
		out.item, _ = envelope.Decode(l.Item)
	}
	return out
}

// body returns the payload that a replay can replace; nil if there is none.
func (l decodedLetter) body() *[]byte {
	if l.item != nil {
		return store.ItemBody(l.item)
	}
	return store.JobBody(l.job)
}

func summary(l decodedLetter) *adminv1.DeadLetterSummary {
	out := &adminv1.DeadLetterSummary{
		Seq:            l.Seq,
		Stage:          string(l.Stage),
		Reason:         string(l.Fault.Reason),
		Message:        fmt.Sprintf("%.*s", maxText, l.Fault.Message),
		Deliveries:     uint32(l.Deliveries),
		CrashCount:     uint32(len(l.Runs)),
		DeadLetteredAt: timestamppb.New(l.DeadLetteredAt),
		Size:           uint64(len(l.Item)),
		Replayable:     l.notReplayable == nil,
		Queue:          string(l.Queue),
		JobId:          l.Job,
		Tenant:         l.Tenant,
	}
	if l.job != nil {
		out.Pipeline = l.job.GetJob().GetPipeline()
	}
	if l.item != nil {
		out.Pipeline, out.RequestId, out.ExecutionId = string(l.item.Pipeline), string(l.item.RequestID), string(l.item.ExecutionID)
	}
	return out
}

func full(l decodedLetter) *adminv1.DeadLetter {
	out := &adminv1.DeadLetter{
		Summary:    summary(l),
		Fault:      l.Fault.ToProto(),
		Host:       string(l.Host),
		Durability: l.Durability.ToProto(),
		Priority:   l.Priority,
		QueuedAt:   timestamppb.New(l.QueuedAt),
	}
	for _, run := range l.Runs {
		out.Runs = append(out.Runs, &adminv1.DeadLetterRun{Host: string(run.Host), StartedAt: timestamppb.New(run.At), Died: run.Died})
	}
	if l.notReplayable != nil {
		out.NotReplayable = fmt.Sprintf("%.*s", maxText, plainText(l.notReplayable))
	}
	if l.item != nil {
		out.Item = item(l.item)
	}
	if l.job != nil {
		out.Job = job(l.job)
	}
	return out
}

func job(q *meshv1.QueuedJob) *adminv1.DeadLetterJob {
	out := &adminv1.DeadLetterJob{Job: q.GetJob(), Path: q.GetHttp().GetPath()}
	if call := q.GetHttp(); call != nil {
		out.Parts = parts([]payload.Part{payload.OfBlob("", call.GetContentType(), call.GetBody())})
	} else if inputs, err := payload.FromProto("inputs", q.GetInfer().GetInputs()); err == nil {
		out.Parts = parts(inputs)
	}
	return out
}

func item(e *envelope.Envelope) *adminv1.DeadLetterItem {
	out := &adminv1.DeadLetterItem{
		Tenant:         e.Tenant,
		Gateway:        string(e.Gateway),
		Route:          route(e.Route),
		Position:       uint32(e.Position),
		AdmittedAt:     timestamppb.New(e.AdmittedAt),
		Deadline:       timestamppb.New(e.Deadline),
		IdempotencyKey: e.IdempotencyKey,
		TraceContext:   e.Trace.Headers(),
		Metadata:       e.Metadata,
		Parts:          parts(e.Parts),
		Kept:           parts(e.Kept),
	}
	if !out.GetAdmittedAt().IsValid() {
		out.AdmittedAt = nil // nobody has validated it before
	}
	for _, timing := range e.Timings {
		out.Timings = append(out.Timings, timing.ToProto())
	}
	return out
}

func route(hops []pipeline.Hop) []*adminv1.DeadLetterStep {
	out := make([]*adminv1.DeadLetterStep, len(hops))
	for i, hop := range hops {
		out[i] = &adminv1.DeadLetterStep{
			Name: string(hop.Step), Stage: string(hop.Stage), Model: hop.Model.ToProto(), Parameters: hop.Parameters.ToProto(),
		}
	}
	return out
}

func parts(in []payload.Part) []*adminv1.DeadLetterPart {
	out := make([]*adminv1.DeadLetterPart, len(in))
	for i, p := range in {
		out[i] = &adminv1.DeadLetterPart{Name: p.Name, Size: uint64(p.Size()), Parameters: p.Parameters.ToProto()}
		if p.Tensor != nil {
			out[i].Body = &adminv1.DeadLetterPart_Tensor{Tensor: &adminv1.DeadLetterTensor{Datatype: string(p.Tensor.Datatype), Shape: p.Tensor.Shape}}
			continue
		}
		out[i].Body = &adminv1.DeadLetterPart_Blob{Blob: &adminv1.DeadLetterBlob{ContentType: p.Blob.ContentType}}
	}
	return out
}
