package stagehost

import (
	"slices"

	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// receiveQuestion is the handler of questions about requests. It waits for the loop: the
// next question can wait.
func (h *Host) receiveQuestion(id pipeline.RequestID, reply func(*meshv1.ExplainAnswer)) {
	h.post(&requestAsked{id, reply})
}

// requestAsked is the question what the host knows of a request. It answers only if it holds
// the request.
type requestAsked struct {
	id    pipeline.RequestID
	reply func(*meshv1.ExplainAnswer)
}

func (e *requestAsked) apply(l *loop) {
	for _, it := range l.ledger.items {
		if it.env.RequestID == e.id && it.direct == nil {
			e.reply(&meshv1.ExplainAnswer{Report: l.host.report(it)})
			return
		}
	}
}

func (h *Host) receiveItemsQuestion(q *meshv1.InFlightQuestion, reply func(*meshv1.InFlightAnswer)) {
	h.post(&itemsAsked{q, reply})
}

// itemsAsked is the question which requests the host holds.
type itemsAsked struct {
	question *meshv1.InFlightQuestion
	reply    func(*meshv1.InFlightAnswer)
}

func (e *itemsAsked) apply(l *loop) {
	if of := e.question.GetStage(); of != "" && of != string(l.host.settings.Stage) {
		return
	}
	var held []*item
	for _, it := range l.ledger.items {
		if it.direct == nil {
			held = append(held, it)
		}
	}
	slices.SortFunc(held, func(a, b *item) int { return a.env.AdmittedAt.Compare(b.env.AdmittedAt) })
	out := &meshv1.InFlightAnswer{}
	for _, it := range held[:min(len(held), int(e.question.GetLimit()))] {
		out.Reports = append(out.Reports, l.host.report(it))
	}
	e.reply(out)
}

// report returns what the host knows of an item that it holds. It reads nothing that a run
// may write.
func (h *Host) report(it *item) *meshv1.RequestReport {
	timing, since := it.timingOf(h.settings.Host), it.arrived
	switch it.state {
	case running:
		since = it.run.dispatched
		timing.BatchWait, timing.Dispatch = since.Sub(it.arrived), string(it.run.reason)
		timing.BatchSize, timing.BatchRows = uint32(len(it.run.items)), uint32(it.run.batch.Rows)
	case sending:
		timing = it.timing
	}
	state := it.state.String()
	if it.isWaiting {
		state, since = "waits for its model", it.waitsForModelSince
	}
	out := it.env.Report(meshv1.RequestSource_REQUEST_SOURCE_IN_FLIGHT)
	out.TraceId = it.env.Trace.ID()
	out.Steps = append(out.Steps, &meshv1.ReportedStep{Timing: timing.ToProto()})
	out.Holders = []*meshv1.RequestHolder{{
		Stage: string(h.settings.Stage), Host: string(h.settings.Host), State: state, Since: timestamppb.New(since),
	}}
	return out
}
