package stagehost

import (
	"context"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// directCall is a call past the queue. Its capacity is free again when its item is
// finished, which may be after the caller has left.
type directCall struct {
	answer chan Response
	leave  func()
}

// finish replies to the call. The loop calls it once.
func (d *directCall) finish(it *item, out runner.Outcome) {
	d.leave()
	d.answer <- Response{Outcome: out, Timing: it.work().stepTiming()}
}

// infer runs one request past the queue, or replies with the fault, if there is one. It calls leave
// when the item is finished.
func (p *pumps) infer(ctx context.Context, r Request, f *fault.Fault, leave func()) Response {
	it := p.directItem(ctx, r, leave)
	if f == nil {
		it.itemInputs, f = p.fit(it.env)
	}
	p.post(&itemArrived{item: it, fault: f})
	select {
	case answer := <-it.direct.answer:
		return answer
	case <-ctx.Done():
		p.post(eventFunc(func(l *loop) {
			if l.ledger.items[it.id] == it {
				l.cancel(it)
			}
		}))
		return Response{Outcome: runner.Failed(fault.From(ctx.Err()))}
	case <-p.loopDone:
		return Response{Outcome: runner.Failed(fault.New(fault.ShuttingDown, "the host has stopped"))}
	}
}

func (p *pumps) directItem(ctx context.Context, r Request, leave func()) *item {
	now := time.Now()
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = now.Add(p.settings.Queue.MaxAge)
	}
	id := uuid.Must(uuid.NewV7()).String()
	it := &item{arrival: arrival{
		arrived: now,
		direct:  &directCall{answer: make(chan Response, 1), leave: leave},
		env: &envelope.Envelope{
			Mesh:        p.settings.Mesh,
			RequestID:   pipeline.RequestID(id),
			ExecutionID: pipeline.ExecutionID(id),
			Pipeline:    pipeline.OfStage(p.settings.Stage).Name,
			Route: []pipeline.Hop{{
				Step: pipeline.StepName(p.settings.Stage), Stage: p.settings.Stage,
				Model: r.Model, Parameters: r.Parameters,
			}},
			Deadline:   deadline,
			AdmittedAt: now,
			Metadata:   r.Metadata,
			Parts:      r.Inputs,
		},
	}}
	it.timing = it.timingOf(p.settings.Host)
	return it
}
