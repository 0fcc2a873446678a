package item

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"google.golang.org/protobuf/types/known/durationpb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/internal/modelcache"
	"github.com/stagemesh/stagemesh/stagehost/runner"
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

// counter counts with no attribute but the stage.
type counter struct {
	metric.Int64Counter
	base []metric.AddOption
}

func (c counter) inc() { c.Add(context.Background(), 1, c.base...) }

// Metrics are the host's instruments. Every series has the stage as an attribute.
type Metrics struct {
	stage attribute.KeyValue
	base  series
	// outputs is the series of items with an output, reasons the series of batches by
	// their dispatch reason.
	outputs series
	reasons map[batch.Reason]series
	// states are the gauges' series: one for each state of this host's items.
	states [3]series

	// These counters have more attributes.
	items, faults, batches, undelivered metric.Int64Counter

	pulled, local, redelivered, duplicateDeliveries, malformed counter
	expired, cancelled, deadLettered                           counter
	sendRetries, duplicateReplies, chunks                      counter
	ackFailures, internalErrors                                counter

	// Of a stage that loads models; no series is of one model.
	modelRequests, modelLoads                      metric.Int64Counter
	modelEvictions, modelForwards                  counter
	modelLoad, modelWait                           metric.Float64Histogram
	modelSize                                      metric.Int64Histogram
	models, modelWaiting, modelUsed, modelCapacity metric.Int64Gauge
	modelAge                                       metric.Float64Gauge
	host                                           attribute.KeyValue

	inFlight                                  metric.Int64Gauge
	batchItems, batchRows                     metric.Int64Histogram
	queueWait, batchWait, runTime, firstChunk metric.Float64Histogram
}

// NewMetrics returns the instruments of a host.
func NewMetrics(meter metric.Meter, stage pipeline.StageName, host pipeline.HostID) (*Metrics, error) {
	key := attribute.String("stage", string(stage))
	base := seriesOf(key)
	sizes := metric.WithExplicitBucketBoundaries(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
	modelSizes := metric.WithExplicitBucketBoundaries(1<<20, 16<<20, 64<<20, 256<<20, 1<<30, 2<<30, 4<<30, 8<<30, 16<<30, 32<<30, 64<<30, 128<<30)
	durations := metric.WithExplicitBucketBoundaries(.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10)
	var errs []error
	vector := func(name, help string) metric.Int64Counter {
		c, err := meter.Int64Counter(name, metric.WithDescription(help))
		errs = append(errs, err)
		return c
	}
	count := func(name, help string) counter { return counter{vector(name, help), base.add} }
	sizesOf := func(name, unit, help string, bounds metric.HistogramOption) metric.Int64Histogram {
		h, err := meter.Int64Histogram(name, bounds, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return h
	}
	seconds := func(name, help string) metric.Float64Histogram {
		h, err := meter.Float64Histogram(name, durations, metric.WithUnit("s"), metric.WithDescription(help))
		errs = append(errs, err)
		return h
	}
	gauge := func(name, unit, help string) metric.Int64Gauge {
		g, err := meter.Int64Gauge(name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return g
	}
	age, err := meter.Float64Gauge("stagemesh.stage.model_oldest_use", metric.WithUnit("s"), metric.WithDescription("Time since the last use of the model that is evicted next."))
	m := &Metrics{
		stage: key, base: base, reasons: map[batch.Reason]series{}, host: attribute.String("host", string(host)), modelAge: age,
		inFlight:      gauge("stagemesh.stage.items_in_flight", "", "Items in flight, by state."),
		models:        gauge("stagemesh.stage.models", "", "Models of a host: loaded, loading, or queued for a load."),
		modelWaiting:  gauge("stagemesh.stage.model_waiting_items", "", "Items that wait for models."),
		modelUsed:     gauge("stagemesh.stage.model_memory_used", "By", "Memory of models that are loaded or being loaded."),
		modelCapacity: gauge("stagemesh.stage.model_memory_capacity", "By", "Memory for models."),

		modelRequests:  vector("stagemesh.stage.model_requests", "Items that found their model loaded (hit) or not (miss)."),
		modelLoads:     vector("stagemesh.stage.model_loads", "Loads that ended, by outcome."),
		modelEvictions: count("stagemesh.stage.model_evictions", "Models unloaded to make room."),
		modelForwards:  count("stagemesh.stage.model_forwards", "Items passed on to another host that has their model."),
		modelLoad:      seconds("stagemesh.stage.model_load", "Time of a load that succeeded."),
		modelWait:      seconds("stagemesh.stage.model_wait", "Time for which an item that did not find its model loaded has waited for it."),
		modelSize:      sizesOf("stagemesh.stage.model_size", "By", "Memory of a model that was loaded.", modelSizes),

		items:       vector("stagemesh.stage.items", "Items with an outcome, by outcome."),
		faults:      vector("stagemesh.stage.faults", "Items that failed, by reason."),
		batches:     vector("stagemesh.stage.batches", "Batches dispatched, by reason."),
		undelivered: vector("stagemesh.stage.undelivered_replies", "Replies that no caller received, by disposition."),

		pulled:              count("stagemesh.stage.pulled", "Items pulled from the queue."),
		local:               count("stagemesh.stage.local", "Items that the host got in memory."),
		redelivered:         count("stagemesh.stage.redelivered", "Items pulled that had been delivered before."),
		duplicateDeliveries: count("stagemesh.stage.duplicate_deliveries", "Deliveries of items that were in flight on the host already."),
		malformed:           count("stagemesh.stage.malformed", "Malformed messages received."),
		expired:             count("stagemesh.stage.expired", "Items whose deadline passed before they ran or were forwarded."),
		cancelled:           count("stagemesh.stage.cancelled", "Items dropped because their request was cancelled."),
		deadLettered:        count("stagemesh.stage.dead_lettered", "Messages dead-lettered."),
		sendRetries:         count("stagemesh.stage.send_retries", "Sends that are retried: the next queue is full or missing, or an acknowledgement was lost."),
		duplicateReplies:    count("stagemesh.stage.duplicate_replies", "Replies dropped because another execution had stored its result first."),
		chunks:              count("stagemesh.stage.chunks", "Chunks sent to gateways."),
		ackFailures:         count("stagemesh.stage.ack_failures", "Items whose acknowledgement failed; they are redelivered."),
		internalErrors:      count("stagemesh.stage.internal_errors", "Internal errors; report any."),

		batchItems: sizesOf("stagemesh.stage.batch_items", "", "Items in a batch.", sizes),
		batchRows:  sizesOf("stagemesh.stage.batch_rows", "", "Rows in a batch.", sizes),
		queueWait:  seconds("stagemesh.stage.queue_wait", "Time from the broker's receipt of an item to its delivery."),
		batchWait:  seconds("stagemesh.stage.batch_wait", "Time from an item's delivery to the dispatch of its batch."),
		runTime:    seconds("stagemesh.stage.run", "Run time of a batch."),
		firstChunk: seconds("stagemesh.stage.first_chunk", "Time from the start of an item's run to its first chunk."),
	}
	m.outputs = m.with("outcome", "output")
	for _, reason := range batch.Reasons() {
		m.reasons[reason] = m.with("reason", string(reason))
	}
	for s := range m.states {
		m.states[s] = m.ofHost("state", itemState(s).String())
	}
	return m, errors.Join(append(errs, err)...)
}

// slotTime adds up for how long slots were busy. It is safe for concurrent use.
type slotTime struct {
	mu    sync.Mutex
	busy  int
	since time.Time
	total time.Duration
}

// set takes how many slots are busy from now on.
func (s *slotTime) set(busy int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.total += time.Duration(s.busy) * now.Sub(s.since)
	s.busy, s.since = busy, now
}

// seconds returns the sum until now.
func (s *slotTime) seconds() float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return (s.total + time.Duration(s.busy)*time.Since(s.since)).Seconds()
}

// Load returns how many items are in flight and running, the median of their waits, and what the batcher knows.
func (p *Items) Load() (inFlight, running int, wait time.Duration, learned *meshv1.BatchEstimate) {
	return p.load.get()
}

// Work returns how many items have run, and for how long slots were busy, added up.
func (p *Items) Work() (items uint64, busy time.Duration) {
	return p.ran.Load(), time.Duration(p.slotTime.seconds() * float64(time.Second))
}

// recentWaits is how many items the median wait covers.
const recentWaits = 64

// load counts the items in flight. The loop writes it, and any goroutine reads it.
type load struct {
	mu       sync.Mutex
	inFlight int
	running  int
	// waits are the queue waits of the last items; next is the index of the oldest.
	waits []time.Duration
	next  int
	// learned is what the batcher knows; nil before the first batch.
	learned *meshv1.BatchEstimate
}

// recordInFlight takes the counts of the ledger.
func (l *load) recordInFlight(of *ledger) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inFlight, l.running = len(of.items), of.counts[running]
	if l.inFlight == 0 {
		l.waits, l.next = l.waits[:0], 0
	}
}

// recordLearned takes what the batcher knows.
func (l *load) recordLearned(of *batch.Batcher) {
	known, ok := of.Learned()
	if !ok {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.learned = &meshv1.BatchEstimate{Start: durationpb.New(known.Start), PerRow: durationpb.New(known.PerRow), Hold: durationpb.New(known.Hold)}
}

// recordWait takes how long an item was in its queue.
func (l *load) recordWait(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waits) < recentWaits {
		l.waits = append(l.waits, d)
		return
	}
	l.waits[l.next] = d
	l.next = (l.next + 1) % recentWaits
}

// get returns the counts, the median of the waits, and what the batcher knows.
func (l *load) get() (inFlight, running int, wait time.Duration, learned *meshv1.BatchEstimate) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waits) > 0 {
		sorted := slices.Sorted(slices.Values(l.waits))
		wait = sorted[len(sorted)/2]
	}
	return l.inFlight, l.running, wait, l.learned
}

// ObserveSlots reports the slots of the host until the returned function is called.
func (p *Items) ObserveSlots(meter metric.Meter) (stop func() error, err error) {
	of := metric.WithAttributeSet(attribute.NewSet(p.Metrics.stage, attribute.String("host", string(p.Host))))
	slots, err := meter.Int64ObservableGauge("stagemesh.stage.slots", metric.WithDescription("Slots of a host."))
	if err != nil {
		return nil, err
	}
	busy, err := meter.Float64ObservableCounter("stagemesh.stage.busy", metric.WithUnit("s"), metric.WithDescription("Time for which slots of a host were busy, added up."))
	if err != nil {
		return nil, err
	}
	registered, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		o.ObserveInt64(slots, int64(p.Runner.Concurrency()), of)
		o.ObserveFloat64(busy, p.slotTime.seconds(), of)
		return nil
	}, slots, busy)
	if err != nil {
		return nil, err
	}
	return registered.Unregister, nil
}

func (m *Metrics) with(key, value string) series {
	return seriesOf(m.stage, attribute.String(key, value))
}

// ofHost is for gauges, which are of one host.
func (m *Metrics) ofHost(key, value string) series {
	return seriesOf(m.stage, m.host, attribute.String(key, value))
}

func (m *Metrics) countArrival(it *Item) {
	if it.delivery.Item != nil {
		m.local.inc()
		return
	}
	m.pulled.inc()
	m.queueWait.Record(exemplar(it.traced), it.queueWait.Seconds(), m.base.record...)
	if it.delivery.Deliveries > 1 {
		m.redelivered.inc()
	}
}

func (m *Metrics) countBatch(r *run) {
	ctx := context.Background()
	m.batches.Add(ctx, 1, m.reasons[r.reason].add...)
	m.batchItems.Record(ctx, int64(len(r.items)), m.base.record...)
	m.batchRows.Record(ctx, int64(r.batch.Rows), m.base.record...)
	for _, it := range r.items {
		m.batchWait.Record(exemplar(it.traced), it.batchWait.Seconds(), m.base.record...)
	}
}

func (m *Metrics) recordRun(ctx context.Context, took time.Duration) {
	m.runTime.Record(ctx, took.Seconds(), m.base.record...)
}

func (m *Metrics) countOutput() { m.items.Add(context.Background(), 1, m.outputs.add...) }

func (m *Metrics) countFailure(f *fault.Fault) {
	m.items.Add(context.Background(), 1, m.with("outcome", "fault").add...)
	m.countFault(f.Reason.Label())
}

// countFault counts a fault alone, for an item whose outcome is counted already.
func (m *Metrics) countFault(reason string) {
	m.faults.Add(context.Background(), 1, m.with("reason", reason).add...)
}

func (m *Metrics) recordItems(l *ledger) {
	for s, count := range l.counts {
		m.inFlight.Record(context.Background(), int64(count), m.states[s].record...)
	}
}

// ShowModels has the counters of a stage that loads models begin at 0.
func (m *Metrics) ShowModels() {
	for _, c := range []counter{m.modelEvictions, m.modelForwards} {
		c.Add(context.Background(), 0, c.base...)
	}
}

// CountModelRequest counts an item that has come to a host of many models.
func (m *Metrics) CountModelRequest(isHit bool) {
	result := "miss"
	if isHit {
		result = "hit"
	}
	m.modelRequests.Add(context.Background(), 1, m.with("result", result).add...)
}

// recordModelWait records for how long an item has waited for its model.
func (m *Metrics) recordModelWait(d time.Duration) {
	m.modelWait.Record(context.Background(), d.Seconds(), m.base.record...)
}

// CountLoad counts a load that has ended, of a model of that size.
func (m *Metrics) CountLoad(took time.Duration, size model.Size, err error) {
	outcome := "loaded"
	switch {
	case err == nil:
		m.modelLoad.Record(context.Background(), took.Seconds(), m.base.record...)
		for memory, n := range map[string]int64{"host": size.Host, "device": size.Device} {
			if n > 0 {
				m.modelSize.Record(context.Background(), n, m.with("memory", memory).record...)
			}
		}
	case errors.Is(err, context.Canceled):
		outcome = "cancelled"
	case errors.Is(err, runner.ErrCrashed):
		outcome = "crashed"
	default:
		outcome = "failed"
	}
	m.modelLoads.Add(context.Background(), 1, m.with("outcome", outcome).add...)
}

// CountEviction counts a model that was unloaded to make room.
func (m *Metrics) CountEviction() { m.modelEvictions.inc() }

// RecordModels records the gauges of the models, and how many items wait for some.
func (m *Metrics) RecordModels(f modelcache.Figures, waiting int, now time.Time) {
	ctx := context.Background()
	for state, n := range map[string]int{"loaded": f.Models, "loading": f.Loading, "queued": f.Queued} {
		m.models.Record(ctx, int64(n), m.ofHost("state", state).record...)
	}
	of := seriesOf(m.stage, m.host).record
	m.modelWaiting.Record(ctx, int64(waiting), of...)
	age := time.Duration(0)
	if !f.OldestUse.IsZero() {
		age = now.Sub(f.OldestUse)
	}
	m.modelAge.Record(ctx, age.Seconds(), of...)
	for memory, size := range map[string][2]int64{"host": {f.Used.Host, f.Capacity.Host}, "device": {f.Used.Device, f.Capacity.Device}} {
		if size[1] > 0 {
			m.modelUsed.Record(ctx, size[0], m.ofHost("memory", memory).record...)
			m.modelCapacity.Record(ctx, size[1], m.ofHost("memory", memory).record...)
		}
	}
}

// countDisposition counts a message that was acknowledged and that no caller
// received. The labels are as in the gateway's own metric. An item of the next
// step has no disposition.
func (m *Metrics) countDisposition(d meshv1.ReplyDisposition) {
	switch d {
	case meshv1.ReplyDisposition_REPLY_DISPOSITION_UNSPECIFIED, meshv1.ReplyDisposition_REPLY_DISPOSITION_DELIVERED:
	case meshv1.ReplyDisposition_REPLY_DISPOSITION_UNKNOWN:
		m.countUndelivered("late")
	case meshv1.ReplyDisposition_REPLY_DISPOSITION_DUPLICATE:
		m.countUndelivered("duplicate")
	case meshv1.ReplyDisposition_REPLY_DISPOSITION_OVERFLOW:
		m.countUndelivered("overflow")
	case meshv1.ReplyDisposition_REPLY_DISPOSITION_MALFORMED:
		m.countUndelivered("malformed")
	default:
		m.countUndelivered("other")
	}
}

func (m *Metrics) countUndelivered(disposition string) {
	m.undelivered.Add(context.Background(), 1, m.with("disposition", disposition).add...)
}

// countChunk counts a chunk of an item that runs since then.
func (m *Metrics) countChunk(isFirst bool, since time.Time) {
	m.chunks.inc()
	if isFirst {
		m.firstChunk.Record(context.Background(), time.Since(since).Seconds(), m.base.record...)
	}
}
