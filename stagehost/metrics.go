package stagehost

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/ledger"
)

// series are attributes in the forms that instruments take, made once: each call would
// allocate them anew.
type series struct {
	add    []metric.AddOption
	record []metric.RecordOption
}

func seriesOf(attributes ...attribute.KeyValue) series {
	set := metric.WithAttributeSet(attribute.NewSet(attributes...))
	return series{[]metric.AddOption{set}, []metric.RecordOption{set}}
}

// metrics are the host's instruments. Every series carries the stage.
type metrics struct {
	stage attribute.KeyValue
	base  series
	// outputs are the items with an output, and reasons the batches by why they were
	// dispatched.
	outputs series
	reasons map[batch.Reason]series
	// states are the gauges' series: one for each state of this host's items.
	states [3]series

	pulls       metric.Int64Counter
	redelivered metric.Int64Counter
	items       metric.Int64Counter
	faults      metric.Int64Counter
	dispatches  metric.Int64Counter
	bad         metric.Int64Counter
	lapsed      metric.Int64Counter
	resends     metric.Int64Counter
	replies     metric.Int64Counter
	unsettled   metric.Int64Counter
	outruns     metric.Int64Counter
	savings     metric.Int64Counter
	burials     metric.Int64Counter
	repeats     metric.Int64Counter
	defects     metric.Int64Counter
	chunks      metric.Int64Counter
	inHand      metric.Int64Gauge
	batchSize   metric.Int64Histogram
	batchRows   metric.Int64Histogram
	queueWait   metric.Float64Histogram
	batchWait   metric.Float64Histogram
	runTime     metric.Float64Histogram
	firstChunk  metric.Float64Histogram
}

func newMetrics(meter metric.Meter, stage pipeline.StageName, host pipeline.HostID) (*metrics, error) {
	key := attribute.String("stage", string(stage))
	m := &metrics{stage: key, base: seriesOf(key), reasons: map[batch.Reason]series{}}
	m.outputs = m.with("outcome", "output")
	for _, reason := range batch.Reasons() {
		m.reasons[reason] = m.with("reason", string(reason))
	}
	for _, s := range states() {
		m.states[s] = seriesOf(key, attribute.String("host", string(host)), attribute.String("state", s.String()))
	}
	return m, errors.Join(m.counters(meter), m.histograms(meter))
}

func (m *metrics) counters(meter metric.Meter) error {
	var errs []error
	for _, c := range []struct {
		into       *metric.Int64Counter
		name, help string
	}{
		{&m.pulls, "stagemesh.stage.pulled", "Items pulled from the queue."},
		{&m.redelivered, "stagemesh.stage.redelivered", "Items pulled that had been delivered before."},
		{&m.items, "stagemesh.stage.items", "Items with an outcome, by outcome."},
		{&m.faults, "stagemesh.stage.faults", "Items that failed, by reason."},
		{&m.dispatches, "stagemesh.stage.batches", "Batches dispatched, by reason."},
		{&m.bad, "stagemesh.stage.malformed", "Malformed messages received."},
		{&m.lapsed, "stagemesh.stage.expired", "Items whose deadline passed before they ran or were forwarded."},
		{&m.resends, "stagemesh.stage.send_retries", "Sends that are retried: the next queue is full or missing, or an acknowledgement was lost."},
		{&m.replies, "stagemesh.stage.undelivered_replies", "Replies that no caller received, by disposition."},
		{&m.unsettled, "stagemesh.stage.ack_failures", "Items whose acknowledgement failed; they are redelivered."},
		{&m.savings, "stagemesh.stage.cancelled", "Items dropped because their request was cancelled."},
		{&m.burials, "stagemesh.stage.dead_lettered", "Messages dead-lettered."},
		{&m.repeats, "stagemesh.stage.duplicate_deliveries", "Deliveries of items that were in flight on the host already."},
		{&m.outruns, "stagemesh.stage.duplicate_replies", "Replies dropped because another execution had stored its result first."},
		{&m.chunks, "stagemesh.stage.chunks", "Chunks sent to gateways."},
		{&m.defects, "stagemesh.stage.internal_errors", "Internal errors; report any."},
	} {
		var err error
		*c.into, err = meter.Int64Counter(c.name, metric.WithDescription(c.help))
		errs = append(errs, err)
	}
	var err error
	m.inHand, err = meter.Int64Gauge("stagemesh.stage.items_in_flight", metric.WithDescription("Items in flight, by state."))
	return errors.Join(append(errs, err)...)
}

func (m *metrics) histograms(meter metric.Meter) error {
	sizes := metric.WithExplicitBucketBoundaries(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
	seconds := metric.WithExplicitBucketBoundaries(.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10)
	var errs [6]error
	m.batchSize, errs[0] = meter.Int64Histogram("stagemesh.stage.batch_items", sizes, metric.WithDescription("Items in a batch."))
	m.batchRows, errs[1] = meter.Int64Histogram("stagemesh.stage.batch_rows", sizes, metric.WithDescription("Rows in a batch."))
	m.queueWait, errs[2] = meter.Float64Histogram("stagemesh.stage.queue_wait", seconds, metric.WithUnit("s"), metric.WithDescription("Time from the broker's receipt of an item to its delivery."))
	m.batchWait, errs[3] = meter.Float64Histogram("stagemesh.stage.batch_wait", seconds, metric.WithUnit("s"), metric.WithDescription("Time from an item's delivery to the dispatch of its batch."))
	m.runTime, errs[4] = meter.Float64Histogram("stagemesh.stage.run", seconds, metric.WithUnit("s"), metric.WithDescription("Run time of a batch."))
	m.firstChunk, errs[5] = meter.Float64Histogram("stagemesh.stage.first_chunk", seconds, metric.WithUnit("s"), metric.WithDescription("Time from the start of an item's run to its first chunk."))
	return errors.Join(errs[:]...)
}

func (m *metrics) with(key, value string) series {
	return seriesOf(m.stage, attribute.String(key, value))
}

func (m *metrics) pulled(ctx context.Context, it *item) {
	m.pulls.Add(ctx, 1, m.base.add...)
	m.queueWait.Record(ctx, it.queueWait.Seconds(), m.base.record...)
	if it.suspect() {
		m.redelivered.Add(ctx, 1, m.base.add...)
	}
}

func (m *metrics) dispatched(ctx context.Context, r *run) {
	m.dispatches.Add(ctx, 1, m.reasons[r.reason].add...)
	m.batchSize.Record(ctx, int64(len(r.items)), m.base.record...)
	m.batchRows.Record(ctx, int64(r.batch.Rows), m.base.record...)
	for _, it := range r.items {
		m.batchWait.Record(ctx, it.timing.BatchWait.Seconds(), m.base.record...)
	}
}

func (m *metrics) finished(ctx context.Context, e *ran) {
	m.runTime.Record(ctx, e.took.Seconds(), m.base.record...)
}

func (m *metrics) answered(ctx context.Context) { m.items.Add(ctx, 1, m.outputs.add...) }

func (m *metrics) failed(ctx context.Context, f *fault.Fault) {
	m.items.Add(ctx, 1, m.with("outcome", "fault").add...)
	m.faulted(ctx, f)
}

// faulted counts a fault alone: the item's outcome has been counted.
func (m *metrics) faulted(ctx context.Context, f *fault.Fault) {
	m.faults.Add(ctx, 1, m.with("reason", f.Reason.Label()).add...)
}

func (m *metrics) held(l *ledger.Ledger) {
	for _, s := range states() {
		m.inHand.Record(context.Background(), int64(l.Count(s)), m.states[s].record...)
	}
}

func states() []ledger.State { return []ledger.State{ledger.Queued, ledger.Running, ledger.Sending} }

// taken counts a message that was acknowledged, unless it got to where it
// should: then it is no more than what is expected.
func (m *metrics) taken(ctx context.Context, d meshv1.ReplyDisposition) {
	if word := undelivered(d); word != "" {
		m.replies.Add(ctx, 1, m.with("disposition", word).add...)
	}
}

// undelivered is the word of the gateway's own metric for an answer that no
// caller got; empty for one that the caller got, and for the next step's item.
func undelivered(d meshv1.ReplyDisposition) string {
	switch d {
	case meshv1.ReplyDisposition_REPLY_DISPOSITION_UNSPECIFIED, meshv1.ReplyDisposition_REPLY_DISPOSITION_DELIVERED:
		return ""
	case meshv1.ReplyDisposition_REPLY_DISPOSITION_UNKNOWN:
		return "late"
	case meshv1.ReplyDisposition_REPLY_DISPOSITION_DUPLICATE:
		return "duplicate"
	case meshv1.ReplyDisposition_REPLY_DISPOSITION_OVERFLOW:
		return "overflow"
	case meshv1.ReplyDisposition_REPLY_DISPOSITION_MALFORMED:
		return "malformed"
	}
	return "other"
}

// dropped counts a message that could not be sent while anybody waited for it.
func (m *metrics) dropped(ctx context.Context) {
	m.replies.Add(ctx, 1, m.with("disposition", "dropped").add...)
}
func (m *metrics) malformed(ctx context.Context) { m.bad.Add(ctx, 1, m.base.add...) }
func (m *metrics) expired(ctx context.Context)   { m.lapsed.Add(ctx, 1, m.base.add...) }
func (m *metrics) resent(ctx context.Context)    { m.resends.Add(ctx, 1, m.base.add...) }
func (m *metrics) outrun(ctx context.Context)    { m.outruns.Add(ctx, 1, m.base.add...) }
func (m *metrics) saved(ctx context.Context)     { m.savings.Add(ctx, 1, m.base.add...) }
func (m *metrics) buried(ctx context.Context)    { m.burials.Add(ctx, 1, m.base.add...) }
func (m *metrics) again(ctx context.Context)     { m.repeats.Add(ctx, 1, m.base.add...) }
func (m *metrics) unsaid(ctx context.Context)    { m.unsettled.Add(ctx, 1, m.base.add...) }
func (m *metrics) defect(ctx context.Context)    { m.defects.Add(ctx, 1, m.base.add...) }

// chunk counts a chunk of an answer that runs since then.
func (m *metrics) chunk(ctx context.Context, first bool, since time.Time) {
	m.chunks.Add(ctx, 1, m.base.add...)
	if first {
		m.firstChunk.Record(ctx, time.Since(since).Seconds(), m.base.record...)
	}
}

// refused counts an outcome for an item that has one already.
func (m *metrics) refused(ctx context.Context) {
	m.faults.Add(ctx, 1, m.with("reason", "OUTCOME_REFUSED").add...)
}
