package adminapi

import (
	"fmt"

	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
)

// Bounds on what is shown of a letter: the runes of a sentence, and the bytes of
// the message that it is about.
const (
	maxText = 400
	maxRaw  = 64 << 20
)

// opened is a letter with its item, if the message is one.
type opened struct {
	store.DeadLetter
	item *envelope.Envelope
	// refused is why the letter cannot be replayed, or nil.
	refused error
}

func read(l store.DeadLetter) opened {
	out := opened{DeadLetter: l}
	if out.item, out.refused = l.Replayable(); out.refused != nil {
		// It may be an item all the same: one of another mesh.
		out.item, _ = envelope.Decode(l.Item)
	}
	return out
}

func summary(l opened) *adminv1.DeadLetterSummary {
	out := &adminv1.DeadLetterSummary{
		Seq:            l.Seq,
		Stage:          string(l.Stage),
		Reason:         string(l.Fault.Reason),
		Message:        fmt.Sprintf("%.*s", maxText, l.Fault.Message),
		Deliveries:     uint32(l.Deliveries),
		CrashCount:     uint32(len(l.Starts)),
		DeadLetteredAt: timestamppb.New(l.DeadLetteredAt),
		Size:           uint64(len(l.Item)),
		Replayable:     l.refused == nil,
	}
	if l.item != nil {
		out.Pipeline, out.RequestId, out.ExecutionId = string(l.item.Pipeline), string(l.item.RequestID), string(l.item.ExecutionID)
	}
	return out
}

func full(l opened) *adminv1.DeadLetter {
	out := &adminv1.DeadLetter{
		Summary:    summary(l),
		Fault:      l.Fault.ToProto(),
		Host:       string(l.Host),
		Durability: l.Durability.ToProto(),
		Priority:   l.Priority,
		QueuedAt:   timestamppb.New(l.QueuedAt),
	}
	for _, run := range l.Starts {
		out.Runs = append(out.Runs, &adminv1.DeadLetterRun{Host: string(run.Host), StartedAt: timestamppb.New(run.At)})
	}
	if l.refused != nil {
		out.NotReplayable = fmt.Sprintf("%.*s", maxText, plain(l.refused))
	}
	if l.item != nil {
		out.Item = item(l.item)
	}
	return out
}

func item(e *envelope.Envelope) *adminv1.DeadLetterItem {
	out := &adminv1.DeadLetterItem{
		Tenant:         e.Tenant,
		Gateway:        string(e.Gateway),
		Route:          route(e.Route),
		Position:       uint32(e.Position),
		AdmittedAt:     admitted(e),
		Deadline:       timestamppb.New(e.Deadline),
		IdempotencyKey: e.IdempotencyKey,
		TraceContext:   e.Trace,
		Metadata:       e.Metadata,
		Parts:          parts(e.Parts),
		Kept:           parts(e.Kept),
	}
	for _, timing := range e.Timings {
		out.Timings = append(out.Timings, timing.ToProto())
	}
	return out
}

// admitted is when the item was admitted, unless it says what is no time: nobody
// checks that.
func admitted(e *envelope.Envelope) *timestamppb.Timestamp {
	if at := timestamppb.New(e.AdmittedAt); at.IsValid() {
		return at
	}
	return nil
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
