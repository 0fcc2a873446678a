package stagehost

import (
	"context"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// malformed ends an item that cannot be decoded: by a fault where it says who
// waits for it, or else nobody would hear of it before the deadline.
func (h *Host) malformed(d bus.Delivery, err error) {
	h.metrics.malformed(context.Background())
	env, ok := h.addressed(d)
	if !ok {
		h.buryBytes(d, err)
		return
	}
	h.settings.Logger.Warn("malformed item answered with a fault", "seq", d.Seq, "request", env.RequestID, "error", err)
	h.post(&arrived{item: h.pulled(d, env), fault: fault.From(err)})
}

// addressed returns as much of a malformed item as its answer needs: whose it
// is, who waits and until when. It is false where that cannot be trusted either.
func (h *Host) addressed(d bus.Delivery) (*envelope.Envelope, bool) {
	var in meshv1.Envelope
	if err := proto.Unmarshal(d.Data, &in); err != nil {
		return nil, false
	}
	rest, err := proto.Marshal(&meshv1.Envelope{
		Mesh:        in.GetMesh(),
		RequestId:   in.GetRequestId(),
		ExecutionId: in.GetExecutionId(),
		Gateway:     in.GetGateway(),
		Route:       []*meshv1.Step{{Name: h.stepName(&in), Stage: string(h.settings.Stage)}},
		Deadline:    in.GetDeadline(),
		AdmittedAt:  in.GetAdmittedAt(),
		Durability:  d.Durability.ToProto(),
		// With it the answer is stored, as it would be of any other item.
		IdempotencyKey: in.GetIdempotencyKey(),
	})
	if err != nil {
		return nil, false
	}
	// Decoded again, so that what is left has passed every check.
	env, err := h.decode(rest)
	return env, err == nil
}

// stepName returns the step that the item waits for, as far as it says so.
func (h *Host) stepName(in *meshv1.Envelope) string {
	if at := int64(in.GetPosition()); at < int64(len(in.GetRoute())) {
		if name := in.GetRoute()[at].GetName(); pipeline.ValidName("step", name) == nil {
			return name
		}
	}
	return string(h.settings.Stage)
}
