package call

import (
	"context"
	"errors"
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
	// labels are those of requests and duration.
	labels labels
}

func newMetrics(meter metric.Meter, table *correlate.Table, gate *admission.Limiter) (*metrics, error) {
	m := &metrics{labels: labels{made: map[outcome]*labelled{}}}
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
			o.Observe(int64(gate.InFlight()))
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

// request counts an answer.
func (m *metrics) request(label string, f *fault.Fault, took time.Duration) {
	reason := "OK"
	if f != nil {
		reason = f.Reason.Label()
	}
	of := m.labels.of(outcome{label, reason})
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

func (m *metrics) reply(what string) {
	m.replies.Add(context.Background(), 1, metric.WithAttributeSet(attribute.NewSet(attribute.String("disposition", what))))
}

func (m *metrics) collision() { m.collisions.Add(context.Background(), 1) }

// How a request was called off.
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

func (m *metrics) keyed(what string) {
	m.keys.Add(context.Background(), 1, metric.WithAttributeSet(attribute.NewSet(attribute.String("outcome", what))))
}
