package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	// askWait is how long all processes of the mesh may take to answer a question.
	askWait = 250 * time.Millisecond
	// maxAnswers and maxAnswerBytes bound the answers that wait, and maxQuestionBytes the
	// questions.
	maxAnswers       = 4096
	maxAnswerBytes   = 64 << 20
	maxQuestionBytes = 1 << 20
)

// serveQuestions passes each question on a subject to handle, with a function that sends the
// answer, until stop is called. Any client may ask. One of a group gets the question.
func (b *Bus) serveQuestions(subject, group string, handle func(question []byte, reply func(proto.Message))) (stop func() error, err error) {
	return b.subscribe(subject, group, maxQuestionBytes, func(msg *nats.Msg) {
		handle(msg.Data, func(answer proto.Message) {
			data, err := proto.Marshal(answer)
			if err == nil {
				err = b.nc.Publish(msg.Reply, data)
			}
			if err != nil {
				b.settings.Logger.Debug("answer not sent", "subject", subject, "error", err)
			}
		})
	})
}

// askAll asks all who answer on a subject, and passes each answer to take, until that is true,
// askWait is over or the context ends. Any client may answer.
func (b *Bus) askAll(ctx context.Context, subject string, question []byte, take func(answer []byte) bool) error {
	if !b.Connected() {
		return b.disconnectedError()
	}
	waiting, cancel := context.WithTimeout(ctx, askWait)
	defer cancel()
	inbox, answers := nats.NewInbox(), make(chan *nats.Msg)
	sub, err := b.nc.subscribe(inbox, "", func(msg *nats.Msg) {
		select {
		case answers <- msg:
		case <-waiting.Done():
		}
	})
	if err != nil {
		return sendError(err)
	}
	defer sub.Unsubscribe() //nolint:errcheck // it fails when the connection is closed
	if err := sub.SetPendingLimits(maxAnswers, maxAnswerBytes); err != nil {
		return sendError(err)
	}
	if err := b.nc.PublishMsg(&nats.Msg{Subject: subject, Reply: inbox, Data: question}); err != nil {
		return sendError(err)
	}
	for {
		select {
		case msg := <-answers:
			if take(msg.Data) {
				return nil
			}
		case <-waiting.Done():
			return ctx.Err() // nobody answers any more, or nobody at all
		}
	}
}

// Explain asks all gateways and hosts what they know of a request, and passes each answer that
// comes in time to take, until that is true.
func (b *Bus) Explain(ctx context.Context, id pipeline.RequestID, take func(*meshv1.ExplainAnswer) bool) error {
	return b.askAll(ctx, b.ExplainSubject(), []byte(id), func(data []byte) bool {
		answer := new(meshv1.ExplainAnswer)
		return proto.Unmarshal(data, answer) == nil && take(answer)
	})
}

// ServeExplain passes each question about a request to handle, with a function that sends the
// answer, until the connection closes.
func (b *Bus) ServeExplain(handle func(id pipeline.RequestID, reply func(*meshv1.ExplainAnswer))) error {
	_, err := b.serveQuestions(b.ExplainSubject(), "", func(id []byte, reply func(proto.Message)) {
		handle(pipeline.RequestID(id), func(answer *meshv1.ExplainAnswer) { reply(answer) })
	})
	return err
}

// ListRequests asks all gateways and hosts which requests they have, and passes each answer that
// comes in time to take.
func (b *Bus) ListRequests(ctx context.Context, q *meshv1.InFlightQuestion, take func(*meshv1.InFlightAnswer)) error {
	question, err := proto.Marshal(q)
	if err != nil {
		return err
	}
	return b.askAll(ctx, b.RequestsSubject(), question, func(data []byte) bool {
		if answer := new(meshv1.InFlightAnswer); proto.Unmarshal(data, answer) == nil {
			take(answer)
		}
		return false
	})
}

// FindRunning returns which of the requests a gateway says that it runs, of those that answer in time.
func (b *Bus) FindRunning(ctx context.Context, requests []pipeline.RequestID) (map[pipeline.RequestID]bool, error) {
	q, out := &meshv1.InFlightQuestion{}, map[pipeline.RequestID]bool{}
	for _, id := range requests {
		q.RequestIds = append(q.RequestIds, string(id))
	}
	question, err := proto.Marshal(q)
	if err != nil {
		return nil, err
	}
	return out, b.askAll(ctx, b.RequestsSubject(), question, func(data []byte) bool {
		if answer := new(meshv1.InFlightAnswer); proto.Unmarshal(data, answer) == nil {
			for _, id := range answer.GetRequestIds() {
				out[pipeline.RequestID(id)] = true
			}
		}
		return len(out) >= len(requests)
	})
}

// ServeRequests passes each question which requests are in flight to handle, with a function that
// sends the answer, until the connection closes.
func (b *Bus) ServeRequests(handle func(q *meshv1.InFlightQuestion, reply func(*meshv1.InFlightAnswer))) error {
	_, err := b.serveQuestions(b.RequestsSubject(), "", func(question []byte, reply func(proto.Message)) {
		if q := new(meshv1.InFlightQuestion); proto.Unmarshal(question, q) == nil {
			handle(q, func(answer *meshv1.InFlightAnswer) { reply(answer) })
		}
	})
	return err
}

// ListDemand asks all hosts and gateways what load stages have, and returns the answers that come in
// time. Any client may have sent them; malformed ones are left out.
func (b *Bus) ListDemand(ctx context.Context) (out []*meshv1.DemandAnswer, err error) {
	err = b.askAll(ctx, b.DemandSubject(), nil, func(data []byte) bool {
		if answer := new(meshv1.DemandAnswer); proto.Unmarshal(data, answer) == nil {
			out = append(out, answer)
		}
		return len(out) == maxAnswers
	})
	return out, err
}

// ServeDemand answers what load stages have, until the connection closes.
func (b *Bus) ServeDemand(answer func() *meshv1.DemandAnswer) error {
	_, err := b.serveQuestions(b.DemandSubject(), "", func(_ []byte, reply func(proto.Message)) { reply(answer()) })
	return err
}

// NotifyActivating tells all gateways that requests wait for the first host of a stage. It is best
// effort: they ask soon.
func (b *Bus) NotifyActivating(stage pipeline.StageName) {
	_ = b.nc.Publish(b.ActivatingSubject(), []byte(stage))
}

// ServeActivating passes each stage for whose first host requests wait to handle, which must not
// block, until stop is called. Any client may have sent it.
func (b *Bus) ServeActivating(handle func(pipeline.StageName)) (stop func() error, err error) {
	return b.Watch(b.ActivatingSubject(), func(data []byte) {
		if pipeline.ValidName("stage", string(data)) == nil {
			handle(pipeline.StageName(data))
		}
	})
}

// Oldest returns the requests that were admitted first, at most limit. It sorts all.
func Oldest[T any](all []T, limit int, admittedAt func(T) time.Time) []T {
	slices.SortFunc(all, func(a, b T) int { return admittedAt(a).Compare(admittedAt(b)) })
	return all[:min(limit, len(all))]
}

// ErrNoOwner means that no dispatcher answers for a pool of jobs.
var ErrNoOwner = errors.New("no dispatcher owns the pool")

// AskPool asks the owner of a pool how it stands, and where a job is, unless that is empty.
func (b *Bus) AskPool(ctx context.Context, pool, job string) (*meshv1.PoolReport, error) {
	ctx, cancel := context.WithTimeout(ctx, askWait)
	defer cancel()
	answer, err := b.request(ctx, b.JobPool(pool), []byte(job))
	switch {
	case err != nil && !b.Connected():
		return nil, b.disconnectedError()
	case err != nil:
		return nil, fmt.Errorf("%w that answers within %s", ErrNoOwner, askWait)
	case noResponders(answer):
		return nil, ErrNoOwner
	}
	out := new(meshv1.PoolReport)
	if err := proto.Unmarshal(answer.Data, out); err != nil {
		return nil, fmt.Errorf("%w: the answer is malformed: %w", ErrNoOwner, err)
	}
	return out, nil
}

// ServePool answers for a pool with its report, until stop is called. The ID names the job
// that was asked for, or zero.
func (b *Bus) ServePool(pool string, report func(pipeline.JobID) *meshv1.PoolReport) (stop func() error, err error) {
	return b.serveQuestions(b.JobPool(pool), "", func(question []byte, reply func(proto.Message)) {
		job, _ := pipeline.ParseJobID(string(question)) // none is asked for then
		reply(report(job))
	})
}

// serveMetrics answers with the metrics of this process, from one of its connections.
func (b *Bus) serveMetrics() error {
	_, err := b.serveQuestions(b.Metrics(), b.settings.Process, func(_ []byte, reply func(proto.Message)) {
		families, err := b.settings.Metrics()
		if err != nil {
			b.settings.Logger.Debug("metrics not sent", "error", err)
			return
		}
		reply(&meshv1.ProcessMetrics{Process: b.settings.Process, Families: families})
	})
	return err
}

// ListMetrics asks all processes of the mesh for their metrics, and returns the answers that
// come in time, sorted by process. Any client may have sent them; malformed ones are left out.
func (b *Bus) ListMetrics(ctx context.Context) ([]*meshv1.ProcessMetrics, error) {
	var out []*meshv1.ProcessMetrics
	err := b.askAll(ctx, b.Metrics(), nil, func(data []byte) bool {
		var metrics meshv1.ProcessMetrics
		if proto.Unmarshal(data, &metrics) == nil && metrics.GetProcess() != "" {
			out = append(out, &metrics)
		}
		return len(out) == maxAnswers
	})
	slices.SortFunc(out, func(x, y *meshv1.ProcessMetrics) int { return cmp.Compare(x.GetProcess(), y.GetProcess()) })
	return out, err
}
