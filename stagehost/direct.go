package stagehost

import (
	"context"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/stageapi"
)

// directCall is a call past the queue. Its place is free again when its item is
// finished, which may be after the caller has gone.
type directCall struct {
	answer chan stageapi.Response
	leave  func()
}

// finish answers the call. The loop does so once.
func (d *directCall) finish(it *item, what became) {
	d.leave()
	d.answer <- stageapi.Response{Parts: what.parts, Metadata: what.metadata, Fault: what.fault, Timing: it.timing}
}

// Infer implements stageapi.Stage: it runs one request on this host, past the
// queue but within its own bound.
func (h *Host) Infer(ctx context.Context, r stageapi.Request) stageapi.Response {
	select {
	case h.directs <- struct{}{}:
	default:
		return stageapi.Response{Fault: fault.Newf(fault.Overloaded, "%d direct calls are in hand, as many as may be", directBound)}
	}
	if err := h.Ready(); err != nil {
		h.leaveDirect()
		return stageapi.Response{Fault: fault.Newf(fault.ShuttingDown, "%w", err)}
	}
	it := h.directItem(ctx, r)
	h.post(&arrived{item: it, fault: h.fit(it)})
	select {
	case answer := <-it.direct.answer:
		return answer
	case <-ctx.Done():
		return stageapi.Response{Fault: fault.From(ctx.Err())}
	case <-h.looped:
		return stageapi.Response{Fault: fault.New(fault.ShuttingDown, "the host has stopped")}
	}
}

func (h *Host) leaveDirect() { <-h.directs }

func (h *Host) directItem(ctx context.Context, r stageapi.Request) *item {
	now := time.Now()
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = now.Add(h.settings.Queue.MaxAge)
	}
	id := uuid.Must(uuid.NewV7()).String()
	it := &item{
		arrived: now,
		direct:  &directCall{answer: make(chan stageapi.Response, 1), leave: h.leaveDirect},
		env: &envelope.Envelope{
			Mesh:        h.settings.Mesh,
			RequestID:   pipeline.RequestID(id),
			ExecutionID: pipeline.ExecutionID(id),
			Pipeline:    pipeline.OfStage(h.settings.Stage).Name,
			Route: []pipeline.Hop{{
				Step: pipeline.StepName(h.settings.Stage), Stage: h.settings.Stage,
				Model: r.Model, Parameters: r.Parameters,
			}},
			Deadline:   deadline,
			AdmittedAt: now,
			Metadata:   r.Metadata,
			Parts:      r.Inputs,
		},
	}
	it.timing = it.timingOf(h.settings.Host)
	return it
}

// Describe implements stageapi.Stage.
func (h *Host) Describe() stageapi.Description {
	s := h.settings
	return stageapi.Description{
		Mesh: s.Mesh, Stage: s.Stage, Host: s.Host, Version: s.Version,
		Spec: h.spec,
		Limits: stageapi.Limits{
			MaxSize: s.Batch.MaxSize, MaxBytes: s.Batch.MaxBytes, MaxWait: s.Batch.MaxWait,
			MaxInFlight: s.MaxInFlight, Concurrency: s.Runner.Concurrency(),
		},
	}
}
