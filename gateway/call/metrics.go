package call

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/gateway/correlate"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// metrics are the request path's instruments.
type metrics struct {
	requests   metric.Int64Counter
	duration   metric.Float64Histogram
	replies    metric.Int64Counter
	collisions metric.Int64Counter
	cancels    metric.Int64Counter
	keys       metric.Int64Counter
	chunks     metric.Int64Counter
	firstChunk metric.Float64Histogram
	// labels are the attributes of requests and duration.
	labels labels
}

func newMetrics(meter metric.Meter, table *correlate.Table, limiter *admission.Limiter) (*metrics, error) {
	m := &metrics{labels: labels{made: map[requestLabel]*requestOptions{}}}
	var errs [11]error
	m.requests, errs[0] = meter.Int64Counter("stagemesh.gateway.requests", metric.WithDescription("Requests answered, by pipeline and reason; OK means success."))
	m.duration, errs[1] = meter.Float64Histogram("stagemesh.gateway.request_duration", metric.WithUnit("s"), metric.WithDescription("Time from admission to the final reply."),
		metric.WithExplicitBucketBoundaries(.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30))
	m.replies, errs[2] = meter.Int64Counter("stagemesh.gateway.dropped_replies", metric.WithDescription("Replies and cancel messages dropped: late, duplicate, overflow, malformed or malformed_cancel."))
	m.collisions, errs[3] = meter.Int64Counter("stagemesh.gateway.execution_id_collisions", metric.WithDescription("Execution IDs that the queue had already seen."))
	m.cancels, errs[4] = meter.Int64Counter("stagemesh.gateway.cancelled", metric.WithDescription("Requests cancelled: deleted from their first queue, notified to hosts, or failed."))
	m.keys, errs[5] = meter.Int64Counter("stagemesh.gateway.idempotent_requests", metric.WithDescription("Requests with an idempotency key: first, follower, stored, mismatch, taken_over; and keys released."))
	_, errs[6] = meter.Int64ObservableGauge("stagemesh.gateway.pending_calls", metric.WithDescription("Calls that wait for their final reply."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(int64(table.Len()))
			return nil
		}))
	_, errs[7] = meter.Int64ObservableGauge("stagemesh.gateway.requests_in_flight", metric.WithDescription("Requests admitted and not answered, including those that wait for capacity or for a stored result."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(int64(limiter.InFlight()))
			return nil
		}))
	_, errs[8] = meter.Int64ObservableGauge("stagemesh.gateway.unread_chunk", metric.WithUnit("By"), metric.WithDescription("Bytes of chunks that callers have not read, beyond 64 KiB for each call."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(table.Unread())
			return nil
		}))
	m.chunks, errs[9] = meter.Int64Counter("stagemesh.gateway.chunks", metric.WithDescription("Chunks handed to callers, by pipeline."))
	m.firstChunk, errs[10] = meter.Float64Histogram("stagemesh.gateway.first_chunk", metric.WithUnit("s"), metric.WithDescription("Time from admission to the first chunk."),
		metric.WithExplicitBucketBoundaries(.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30))
	return m, errors.Join(errs[:]...)
}

// request counts a request that has ended.
func (m *metrics) request(label string, f *fault.Fault, took time.Duration) {
	reason := "OK"
	if f != nil {
		reason = f.Reason.Label()
	}
	of := m.labels.of(requestLabel{label, reason})
	m.requests.Add(context.Background(), 1, of.requests...)
	m.duration.Record(context.Background(), took.Seconds(), of.duration...)
}

// chunk counts a chunk; the first came so long after the admission.
func (m *metrics) chunk(label string, first bool, took time.Duration) {
	of := metric.WithAttributeSet(attribute.NewSet(attribute.String("pipeline", label)))
	m.chunks.Add(context.Background(), 1, of)
	if first {
		m.firstChunk.Record(context.Background(), took.Seconds(), of)
	}
}

func (m *metrics) droppedReply(disposition string) {
	m.replies.Add(context.Background(), 1, metric.WithAttributeSet(attribute.NewSet(attribute.String("disposition", disposition))))
}

func (m *metrics) collision() { m.collisions.Add(context.Background(), 1) }

// How a request was cancelled.
const (
	deleted  = "deleted"
	notified = "notified"
	failed   = "failed"
)

func (m *metrics) cancelled(how string) {
	m.cancels.Add(context.Background(), 1, metric.WithAttributeSet(attribute.NewSet(attribute.String("how", how))))
}

// What became of a request with an idempotency key, or of the key.
const (
	first     = "first"
	follower  = "follower"
	stored    = "stored"
	mismatch  = "mismatch"
	takenOver = "taken_over"
	released  = "released"
)

func (m *metrics) idempotent(outcome string) {
	m.keys.Add(context.Background(), 1, metric.WithAttributeSet(attribute.NewSet(attribute.String("outcome", outcome))))
}

// maxLabels bounds the remembered labels: pipelines come and go.
const maxLabels = 4096

// requestLabel is what a request is counted by.
type requestLabel struct{ pipeline, reason string }

// labels are the options of the instruments that count every request, made once for
// each label: a set of attributes is sorted and hashed when it is made.
type labels struct {
	mu   sync.RWMutex
	made map[requestLabel]*requestOptions
}

// requestOptions are the options for one label: of the counter, and of the
// histogram, which is by pipeline alone.
type requestOptions struct {
	requests []metric.AddOption
	duration []metric.RecordOption
}

func (l *labels) of(o requestLabel) *requestOptions {
	l.mu.RLock()
	made := l.made[o]
	l.mu.RUnlock()
	if made != nil {
		return made
	}
	return l.make(o)
}

func (l *labels) make(o requestLabel) *requestOptions {
	of := attribute.String("pipeline", o.pipeline)
	made := &requestOptions{
		requests: []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(of, attribute.String("reason", o.reason)))},
		duration: []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(of))},
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.made) >= maxLabels {
		clear(l.made)
	}
	l.made[o] = made
	return made
}
