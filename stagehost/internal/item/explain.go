package item

import (
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// ReceiveQuestion answers what the host knows of a request, if it holds it. It waits for the loop: the
// next question can wait.
func (p *Items) ReceiveQuestion(id pipeline.RequestID, reply func(*meshv1.ExplainAnswer)) {
	p.Post(EventFunc(func(l *Loop) {
		for _, it := range l.ledger.items {
			if it.env.RequestID == id && it.direct == nil {
				reply(&meshv1.ExplainAnswer{Report: p.report(it)})
				return
			}
		}
	}))
}

// ReceiveItemsQuestion answers which requests the host holds.
func (p *Items) ReceiveItemsQuestion(q *meshv1.InFlightQuestion, reply func(*meshv1.InFlightAnswer)) {
	if of := q.GetStage(); of != "" && of != string(p.Stage) || len(q.GetRequestIds()) > 0 || q.GetEnded() {
		return
	}
	p.Post(EventFunc(func(l *Loop) {
		var held []*Item
		for _, it := range l.ledger.items {
			if it.direct == nil {
				held = append(held, it)
			}
		}
		out := &meshv1.InFlightAnswer{}
		for _, it := range bus.Oldest(held, int(q.GetLimit()), func(it *Item) time.Time { return it.env.AdmittedAt }) {
			out.Reports = append(out.Reports, p.report(it))
		}
		reply(out)
	}))
}

// report returns what the host knows of an item that it holds.
func (p *Items) report(it *Item) *meshv1.RequestReport {
	timing, since := it.timingOf(p.Host), it.arrived
	switch it.state {
	case running:
		since = it.run.dispatched
		timing.BatchWait, timing.Dispatch = since.Sub(it.arrived), string(it.run.reason)
		timing.BatchSize, timing.BatchRows = uint32(len(it.run.items)), uint32(it.run.batch.Rows)
	case sending:
		timing = it.work().stepTiming()
	}
	state := it.state.String()
	if it.IsWaiting {
		state, since = "waits for its model", it.WaitsSince
	}
	out := it.env.Report(meshv1.RequestSource_REQUEST_SOURCE_IN_FLIGHT)
	out.TraceId = it.env.Trace.ID()
	out.Steps = append(out.Steps, &meshv1.ReportedStep{Timing: timing.ToProto()})
	out.Holders = []*meshv1.RequestHolder{{
		Stage: string(p.Stage), Host: string(p.Host), State: state, Since: timestamppb.New(since),
	}}
	return out
}
