package item

import (
	"context"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Request is one direct call.
type Request struct {
	Inputs     []payload.Part
	Model      payload.ModelRef
	Parameters payload.Parameters
	Metadata   map[string]string
}

// Response is the answer of a direct call: Fault, or else Parts.
type Response struct {
	runner.Outcome
	Timing envelope.StepTiming
}

// directCall is a call past the queue. Its capacity is free again when its item is
// finished, which may be after the caller has left.
type directCall struct {
	answer chan Response
	leave  func()
}

// finish replies to the call. The loop calls it once.
func (d *directCall) finish(it *Item, out runner.Outcome) {
	d.leave()
	d.answer <- Response{Outcome: out, Timing: it.work().stepTiming()}
}

// Infer runs one request past the queue, or replies with the fault, if there is one. It calls leave
// when the item is finished.
func (p *Items) Infer(ctx context.Context, r Request, f *fault.Fault, leave func()) Response {
	now := time.Now()
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = now.Add(p.MaxAge)
	}
	id := uuid.Must(uuid.NewV7()).String()
	it := p.newItem(bus.Delivery{Arrived: now}, &envelope.Envelope{
		Mesh: p.Mesh, RequestID: pipeline.RequestID(id), ExecutionID: pipeline.ExecutionID(id), Pipeline: pipeline.OfStage(p.Stage).Name,
		Route:    []pipeline.Hop{{Step: pipeline.StepName(p.Stage), Stage: p.Stage, Model: r.Model, Parameters: r.Parameters}},
		Deadline: deadline, AdmittedAt: now, Metadata: r.Metadata, Parts: r.Inputs,
	})
	it.direct = &directCall{answer: make(chan Response, 1), leave: leave}
	if f == nil {
		it.Inputs, f = p.Fit(it.env)
	}
	p.Post(&itemArrived{item: it, fault: f})
	select {
	case answer := <-it.direct.answer:
		return answer
	case <-ctx.Done():
		p.Post(EventFunc(func(l *Loop) {
			if l.ledger.items[it.id] == it {
				l.cancel(it)
			}
		}))
		return Response{Outcome: runner.Failed(fault.From(ctx.Err()))}
	case <-p.loopDone:
		return Response{Outcome: runner.Failed(fault.New(fault.ShuttingDown, "the host has stopped"))}
	}
}
