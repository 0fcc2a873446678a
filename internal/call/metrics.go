package call

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// metrics are the request path's instruments.
type metrics struct {
	requests, replies, collisions, cancels, keys, chunks, models, shadows, branches, resumed, rejectedStored metric.Int64Counter
	duration, firstChunk, joinWait                                                                           metric.Float64Histogram
	labels                                                                                                   labels[requestLabel, *requestOptions]
	branchLabels                                                                                             labels[branchLabel, []metric.AddOption]
	served                                                                                                   served
}

func newMetrics(s *Service) (*metrics, error) {
	var errs []error
	counter := func(name, help string) metric.Int64Counter {
		out, err := s.settings.Meter.Int64Counter(name, metric.WithDescription(help))
		errs = append(errs, err)
		return out
	}
	seconds := func(name, help string, bounds ...float64) metric.Float64Histogram {
		out, err := s.settings.Meter.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(help), metric.WithExplicitBucketBoundaries(bounds...))
		errs = append(errs, err)
		return out
	}
	gauge := func(name, unit, help string) metric.Int64ObservableGauge {
		out, err := s.settings.Meter.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return out
	}
	m := &metrics{
		served:     served{byName: map[servedName]*Statistics{}},
		requests:   counter("stagemesh.gateway.requests", "Requests answered, by pipeline and reason; OK means success."),
		duration:   seconds("stagemesh.gateway.request_duration", "Time from admission to the final reply.", .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30),
		replies:    counter("stagemesh.gateway.dropped_replies", "Replies and cancel messages dropped: late, duplicate, overflow, malformed or malformed_cancel."),
		collisions: counter("stagemesh.gateway.execution_id_collisions", "Execution IDs that the queue had already seen."),
		cancels:    counter("stagemesh.gateway.cancelled", "Requests cancelled: deleted from their first queue, notified to hosts, or failed."),
		keys:       counter("stagemesh.gateway.idempotent_requests", "Requests with an idempotency key: first, follower, stored, mismatch, taken_over; and keys released."),
		models:     counter("stagemesh.gateway.model_routes", "Steps of one model, by where they go: to its holder, to the host where it was placed, or to its stage's queue."),
		shadows:    counter("stagemesh.gateway.shadow_requests", "Requests of aliases that a shadow was to run too, by stage and how the answers compare: equal, different, failed or dropped."),
		branches:   counter("stagemesh.graph.branches", "Branches of blocks, by pipeline, path and status: done, skipped, late, failed or cancelled."),
		resumed:    counter("stagemesh.graph.resumed", "Durable requests with blocks that this gateway took over, by pipeline."),
		chunks:     counter("stagemesh.gateway.chunks", "Chunks handed to callers, by pipeline."),
		firstChunk: seconds("stagemesh.gateway.first_chunk", "Time from admission to the first chunk.", .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30),
	}
	m.joinWait = seconds("stagemesh.graph.join_wait", "Time from the end of the first branch of a parallel block to the end of the block.", .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30)
	m.rejectedStored = counter("stagemesh.gateway.rejected_stored", "Requests, jobs, files and batches rejected because their tenant keeps too much in a stream of the broker.")
	mapItems, err := s.settings.Meter.Float64ObservableGauge("stagemesh.graph.map_items", metric.WithDescription("Items that a map has for a request, by pipeline and path: the moving mean of the last ones."))
	stored := gauge("stagemesh.gateway.tenant_stored", "By", "Bytes that each tenant keeps in a stream of the broker, by the last count while it is seven eighths full.")
	pending := gauge("stagemesh.gateway.pending_calls", "", "Calls that wait for their final reply.")
	unread := gauge("stagemesh.gateway.unread_chunk", "By", "Bytes of chunks that callers have not read, beyond 64 KiB for each call.")
	inFlight := gauge("stagemesh.gateway.requests_in_flight", "", "Requests admitted and not answered, including those that wait for capacity or for a stored result.")
	held := gauge("stagemesh.gateway.request_bytes", "By", "Bytes of requests in flight: their bodies and the inputs decoded from them.")
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, err
	}
	_, err = s.settings.Meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		calls, bytes := s.table.sizes()
		o.ObserveInt64(pending, int64(calls))
		o.ObserveInt64(unread, int64(bytes))
		o.ObserveInt64(inFlight, int64(s.limiter.InFlight()))
		o.ObserveInt64(held, s.settings.Budget.Held())
		s.averages.report(o, mapItems)
		s.shares.Range(func(name, of any) bool {
			for tenant, usage := range of.(*store.Share).Counted() { //nolint:forcetypeassert // there are no others
				o.ObserveInt64(stored, usage.Bytes, metric.WithAttributes(attribute.String("stream", name.(string)), attribute.String("tenant", tenant)))
			}
			return true
		})
		return nil
	}, mapItems, stored, pending, unread, inFlight, held)
	return m, err
}

// request counts a request that has ended. A span in the context is its exemplar.
func (m *metrics) request(ctx context.Context, label string, f *fault.Fault, took time.Duration) {
	reason := "OK"
	if f != nil {
		reason = f.Reason.Label()
	}
	of := m.labels.of(requestLabel{label, reason})
	m.requests.Add(ctx, 1, of.requests...)
	m.duration.Record(ctx, took.Seconds(), of.duration...)
}

// chunk counts a chunk; the first came so long after the admission.
func (m *metrics) chunk(label string, first bool, took time.Duration) {
	of := metric.WithAttributeSet(attribute.NewSet(attribute.String("pipeline", label)))
	m.chunks.Add(context.Background(), 1, of)
	if first {
		m.firstChunk.Record(context.Background(), took.Seconds(), of)
	}
}

// count adds n under a label.
func count(c metric.Int64Counter, n int64, label, value string) {
	if n == 0 {
		return
	}
	c.Add(context.Background(), n, metric.WithAttributeSet(attribute.NewSet(attribute.String(label, value))))
}

func (m *metrics) droppedReply(disposition string) { count(m.replies, 1, "disposition", disposition) }

// How a request was cancelled.
const (
	deleted  = "deleted"
	notified = "notified"
	failed   = "failed"
)

func (m *metrics) countCancel(how string) { count(m.cancels, 1, "how", how) }

// What became of a request with an idempotency key, or of the key.
const (
	first     = "first"
	follower  = "follower"
	stored    = "stored"
	mismatch  = "mismatch"
	takenOver = "taken_over"
	released  = "released"
)

func (m *metrics) idempotent(outcome string) { count(m.keys, 1, "outcome", outcome) }

// maxLabels bounds the remembered labels: pipelines come and go.
const maxLabels = 4096

// labels are the options of an instrument that counts every request, made once for each label: a set of
// attributes is sorted and hashed when it is made.
type labels[L interface {
	comparable
	options() O
}, O any] struct {
	mu   sync.RWMutex
	made map[L]O
}

// of returns the options for a label.
func (l *labels[L, O]) of(label L) O {
	l.mu.RLock()
	options, is := l.made[label]
	l.mu.RUnlock()
	if is {
		return options
	}
	options = label.options()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.made == nil || len(l.made) >= maxLabels {
		l.made = map[L]O{}
	}
	l.made[label] = options
	return options
}

// requestLabel is what a request is counted by.
type requestLabel struct{ pipeline, reason string }

// requestOptions are the options for one label: of the counter, and of the
// histogram, which is by pipeline alone.
type requestOptions struct {
	requests []metric.AddOption
	duration []metric.RecordOption
}

func (l requestLabel) options() *requestOptions {
	of := attribute.String("pipeline", l.pipeline)
	return &requestOptions{
		requests: []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(of, attribute.String("reason", l.reason)))},
		duration: []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(of))},
	}
}

// Statistics are the requests for one pipeline, model or alias that this gateway has answered, and
// their time. Those that failed count as Fail alone.
type Statistics struct {
	Name string
	Last time.Time
	// Rows counts the rows of the first step. Batches are of the last step; of one that the items of
	// several names or gateways share, each item counts its part.
	Rows          uint64
	Batches       float64
	Success, Fail Spent
	// Queue is the wait for hosts and batches, Run that for runners, of all steps.
	Queue, Run Spent
}

// Spent is a sum of durations.
type Spent struct {
	Count uint64
	Total time.Duration
}

func (s *Spent) add(d time.Duration) { s.Count, s.Total = s.Count+1, s.Total+d }

// served has the statistics of each tenant. There are as many names as maxLabels.
type served struct {
	mu     sync.Mutex
	byName map[servedName]*Statistics
}

type servedName struct{ tenant, name string }

// countRequest counts a request that has ended.
func (s *Service) countRequest(ctx context.Context, r *request.Request, response *request.Response, f *fault.Fault, took time.Duration) {
	key := servedName{tenant: budget.TenantOf(ctx)}
	if f == nil {
		key.name = response.Pipeline
	} else if p, unknown := s.Resolve(r.Pipeline, r.ByModel); unknown == nil {
		key.name = string(p.Name)
	} else {
		return
	}
	all := &s.metrics.served
	all.mu.Lock()
	defer all.mu.Unlock()
	if all.byName[key] == nil {
		for other := range all.byName {
			if len(all.byName) < maxLabels {
				break
			}
			delete(all.byName, other)
		}
		all.byName[key] = &Statistics{Name: key.name}
	}
	all.byName[key].add(response, f, took)
}

func (s *Statistics) add(response *request.Response, f *fault.Fault, took time.Duration) {
	s.Last = time.Now()
	if f != nil {
		s.Fail.add(took)
		return
	}
	s.Success.add(took)
	var queue, run time.Duration
	steps := response.Timeline.Steps
	for _, step := range steps {
		queue, run = queue+step.QueueWait+step.BatchWait, run+step.Run
	}
	s.Queue.add(queue)
	s.Run.add(run)
	if len(steps) > 0 {
		s.Rows += uint64(steps[0].Rows)
		s.Batches += 1 / float64(max(steps[len(steps)-1].BatchSize, 1))
	}
}

// Statistics returns what the context's tenant has asked for under a name, with its prefix for a model or an
// alias; for "" under all names with requests, sorted.
func (s *Service) Statistics(ctx context.Context, name string) (out []Statistics) {
	all, tenant := &s.metrics.served, budget.TenantOf(ctx)
	all.mu.Lock()
	defer all.mu.Unlock()
	for key, one := range all.byName {
		if key.tenant == tenant && (name == "" || key.name == name) {
			out = append(out, *one)
		}
	}
	if name != "" && out == nil {
		return []Statistics{{Name: name}}
	}
	slices.SortFunc(out, func(a, b Statistics) int { return cmp.Compare(a.Name, b.Name) })
	return out
}
