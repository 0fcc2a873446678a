// Package explain remembers the last requests of a gateway, and says where the time of one
// went.
//
//	ring := explain.NewRing()
//	ring.Add(env, steps, took, f, traceID)    // when a request ends
//	report := ring.Find(id)                   // nil where the ring does not have it
//	ring.Compare(report)                      // adds what is usual
//	latest := ring.Latest(true, "", 40)       // the failures that came last
//	report.Summary = explain.Summarize(report, time.Now())
//
// A Ring is safe for concurrent use. It copies what it keeps, and reuses that memory: an
// untraced request that succeeds costs some 0.3 us and no allocation. Summarize is pure.
package explain

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Bounds of a Ring.
const (
	maxRecords = 10_000
	maxBytes   = 16 << 20
	// share is the part that is for failures, and that for the slowest: one in so many each.
	share = 8
	// maxFault bounds an encoded fault, and maxMessage the message of one that was longer.
	maxFault   = 4 << 10
	maxMessage = 1 << 10
	// maxNames bounds the names of pipelines, stages and hosts that records share, maxName
	// the bytes of each.
	maxNames = 4096
	maxName  = 128
	// maxCompared is how many requests tell what is usual.
	maxCompared = 1000
)

// Ring has the last requests that ended. Of those that it has no space for any more, it keeps
// the failed and the slowest longer.
type Ring struct {
	mu sync.Mutex
	// since is when the last one ended that left recent; at first it is when the ring began.
	since time.Time
	// recent and failed are in the order of their end, slow with the fastest first.
	recent, failed, slow section
	// late are the records of requests whose final reply may still come.
	late map[pipeline.ExecutionID]*record
	// names are this ring's own copies: those in a reply share memory with all its texts.
	names map[string]string
	// spare is a record to use again; nil for none.
	spare *record
}

// record is one request that has ended.
type record struct {
	// Envelope has what a report takes of one, and its ExecutionID while it is in late.
	envelope.Envelope
	branches []envelope.Branch
	traceID  string
	total    time.Duration
	// fault is an encoded mesh.v1.Fault, nil for success, and failedAt its stage. The bytes never change.
	fault    []byte
	failedAt string
	// weight orders the slowest.
	weight float64
}

const (
	recordBytes = int(unsafe.Sizeof(record{})) + 128 // and its texts
	stepBytes   = int(unsafe.Sizeof(envelope.StepTiming{}))
	branchBytes = int(unsafe.Sizeof(envelope.Branch{})) + maxName // and its value
)

func (r *record) bytes() int {
	return recordBytes + stepBytes*cap(r.Timings) + branchBytes*cap(r.branches) + cap(r.fault)
}

// section is a bounded part of the records.
type section struct {
	records               []*record
	most, bytes, maxBytes int
}

func (s *section) insert(at int, one *record) {
	s.records = slices.Insert(s.records, at, one)
	s.bytes += one.bytes()
}

func (s *section) isOver() bool { return len(s.records) > s.most || s.bytes > s.maxBytes }

// pop removes the first record.
func (s *section) pop() *record {
	one := s.records[0]
	s.records[0], s.records = nil, s.records[1:]
	s.bytes -= one.bytes()
	return one
}

// NewRing returns an empty ring.
func NewRing() *Ring { return newRing(maxRecords, maxBytes) }

func newRing(records, bytes int) *Ring {
	part := section{most: records / share, maxBytes: bytes / share}
	recent := section{most: records - 2*part.most, maxBytes: bytes - 2*part.maxBytes}
	return &Ring{since: time.Now(), recent: recent, failed: part, slow: part, late: map[pipeline.ExecutionID]*record{}, names: map[string]string{}}
}

// Add records a request that ended after that time: with the steps that hosts reported, the branches of
// its blocks, a fault or nil, and the ID of its trace, if it has one.
func (r *Ring) Add(e *envelope.Envelope, steps []envelope.StepTiming, branches []envelope.Branch, total time.Duration, f *fault.Fault, traceID string) {
	encoded := encode(f)
	r.mu.Lock()
	defer r.mu.Unlock()
	one := r.spare
	if one == nil {
		one = new(record)
	}
	r.spare = nil
	old := one.branches[:0]
	*one = record{traceID: strings.Clone(traceID), total: total, fault: encoded, Envelope: envelope.Envelope{
		RequestID: e.RequestID, Pipeline: own(r, e.Pipeline, one.Pipeline), Tenant: e.Tenant, Gateway: e.Gateway, Durability: e.Durability,
		AdmittedAt: e.AdmittedAt, Deadline: e.Deadline, Timings: one.Timings[:0],
	}}
	if f != nil {
		one.failedAt = own(r, f.Stage, "")
	}
	if f != nil && f.Reason == fault.DeadlineExceeded && len(steps) == 0 && e.ExecutionID != "" {
		one.ExecutionID, one.Timings = e.ExecutionID, slices.Grow(one.Timings, len(e.Route))
		r.late[one.ExecutionID] = one
	}
	r.setSteps(one, steps)
	if n := len(branches); cap(old) < n || cap(old) > 2*n { // most requests have none, and keep no space for any
		old = make([]envelope.Branch, 0, n)
	}
	one.branches = old
	for _, b := range branches {
		b.Path, b.Block, b.Status = own(r, b.Path, ""), own(r, b.Block, ""), own(r, b.Status, "")
		b.Why = strings.Clone(strings.ToValidUTF8(b.Why[:min(len(b.Why), maxName)], "\uFFFD"))
		one.branches = append(one.branches, b)
	}
	r.recent.insert(len(r.recent.records), one)
	for r.recent.isOver() {
		oldest := r.recent.pop()
		r.since = oldest.AdmittedAt.Add(oldest.total)
		r.demote(oldest)
	}
}

// Complete adds the steps of a reply that came after its call had ended, if the ring has that
// request without steps.
func (r *Ring) Complete(id pipeline.ExecutionID, steps func() []envelope.StepTiming) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if one := r.late[id]; one != nil {
		r.forgetLate(one)
		all := steps()
		r.setSteps(one, all[:min(len(all), cap(one.Timings))]) // bytes counts no more
	}
}

func (r *Ring) forgetLate(one *record) {
	delete(r.late, one.ExecutionID)
	one.ExecutionID = ""
}

// setSteps copies the steps into the record. Most have the names of the request that the
// record had before.
func (r *Ring) setSteps(one *record, steps []envelope.StepTiming) {
	one.Timings = slices.Grow(one.Timings[:0], len(steps))[:len(steps)]
	for i, s := range steps {
		was := &one.Timings[i]
		s.Step, s.Stage, s.Host, s.Dispatch = own(r, s.Step, was.Step), own(r, s.Stage, was.Stage), own(r, s.Host, was.Host), own(r, s.Dispatch, was.Dispatch)
		*was = s
	}
}

// own returns the ring's copy of a name, which is likely that one.
func own[T ~string](r *Ring, name, likely T) T {
	if name == likely {
		return likely
	}
	if found, ok := r.names[string(name)]; ok {
		return T(found)
	}
	if len(r.names) >= maxNames {
		clear(r.names) // records keep theirs
	}
	copied := strings.Clone(strings.ToValidUTF8(string(name[:min(len(name), maxName)]), "\uFFFD"))
	r.names[copied] = copied
	return T(copied)
}

// demote moves a record that leaves the recent ones to the failed or slowest, and makes one
// spare that has no place any more.
func (r *Ring) demote(one *record) {
	to, at := &r.failed, len(r.failed.records)
	if one.fault == nil {
		// With every hour a time counts half, so that the slowest of a bad day do not stay for
		// ever. That is so for all of them, so their order never changes.
		one.weight = math.Log2(float64(max(one.total, 1))) + float64(one.AdmittedAt.UnixMilli())/float64(time.Hour.Milliseconds())
		to = &r.slow
		at, _ = slices.BinarySearchFunc(to.records, one.weight, func(r *record, weight float64) int { return cmp.Compare(r.weight, weight) })
	}
	if at == 0 && (len(to.records) == to.most || to.bytes+one.bytes() > to.maxBytes) {
		r.drop(one) // as most
		return
	}
	to.insert(at, one)
	for to.isOver() {
		r.drop(to.pop())
	}
}

func (r *Ring) drop(one *record) {
	r.forgetLate(one)
	r.spare = one
}

// RemembersSince returns since when the ring has every request.
func (r *Ring) RemembersSince() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.since
}

// Find returns what the ring has of a request, nil if nothing: of its last try, if it was refused before.
func (r *Ring) Find(id pipeline.RequestID) *meshv1.RequestReport {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range slices.Backward(slices.Concat(r.slow.records, r.failed.records, r.recent.records)) {
		if one.RequestID == id {
			return one.report()
		}
	}
	return nil
}

// Latest returns the requests that ended last, the last one first, at most limit, without their
// steps: of failed ones alone if failed is true, and if stage is not empty those that failed there.
func (r *Ring) Latest(failed bool, stage string, limit int) (out []*meshv1.RequestReport) {
	for _, one := range r.latest(failed, stage, limit) {
		out = append(out, &meshv1.RequestReport{
			RequestId: string(one.RequestID), Source: meshv1.RequestSource_REQUEST_SOURCE_GATEWAY, Pipeline: string(one.Pipeline), Tenant: one.Tenant,
			Gateway: string(one.Gateway), AdmittedAt: timestamppb.New(one.AdmittedAt), Total: durationpb.New(one.total), Fault: one.decodedFault(),
		})
	}
	return out
}

// latest returns copies of the records for Latest. Their steps and branches may be overwritten.
func (r *Ring) latest(failed bool, stage string, limit int) (out []record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, records := range [][]*record{r.recent.records, r.failed.records} { // the failed ones are older
		for _, one := range slices.Backward(records) {
			switch {
			case len(out) >= limit:
				return out
			case one.fault == nil && (failed || stage != ""), stage != "" && one.failedAt != stage:
			default:
				out = append(out, *one)
			}
		}
	}
	return out
}

// decodedFault returns the fault of a request that failed, else nil.
func (r *record) decodedFault() *meshv1.Fault {
	if r.fault == nil {
		return nil
	}
	out := new(meshv1.Fault)
	_ = proto.Unmarshal(r.fault, out) // encode has made it
	return out
}

func (r *record) report() *meshv1.RequestReport {
	out := r.Report(meshv1.RequestSource_REQUEST_SOURCE_GATEWAY)
	out.Total, out.TraceId = durationpb.New(r.total), r.traceID
	for i := range r.branches {
		out.Branches = append(out.Branches, r.branches[i].ToProto())
	}
	out.Fault = r.decodedFault()
	return out
}

// encode returns a copy of the fault that shares no memory with its request; nil for nil.
func encode(f *fault.Fault) []byte {
	if f == nil {
		return nil
	}
	data, err := proto.Marshal(f.ToProto())
	if err != nil || len(data) > maxFault {
		message := strings.ToValidUTF8(f.Message[:min(len(f.Message), maxMessage)], "\uFFFD")
		data, _ = proto.Marshal(&meshv1.Fault{Code: int32(f.GRPCCode()), Reason: f.Reason.Label(), Message: message})
	}
	return data
}

// Compare adds to the report what is usual: the medians of the latest requests of its pipeline
// that succeeded.
func (r *Ring) Compare(to *meshv1.RequestReport) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var like []*record
	for _, one := range slices.Backward(r.recent.records) {
		if string(one.Pipeline) == to.GetPipeline() && one.fault == nil && string(one.RequestID) != to.GetRequestId() && len(like) < maxCompared {
			like = append(like, one)
		}
	}
	if len(like) == 0 {
		return
	}
	to.Compared, to.UsualTotal = uint32(len(like)), durationpb.New(median(like, func(r *record) time.Duration { return r.total }))
	for _, step := range to.GetSteps() {
		if same := sameStep(like, step.GetTiming()); len(same) > 0 {
			step.Usual = &inferencev1.StepTiming{
				QueueWait: durationpb.New(median(same, func(t *envelope.StepTiming) time.Duration { return t.QueueWait })),
				BatchWait: durationpb.New(median(same, func(t *envelope.StepTiming) time.Duration { return t.BatchWait })),
				Run:       durationpb.New(median(same, func(t *envelope.StepTiming) time.Duration { return t.Run })),
				BatchSize: median(same, func(t *envelope.StepTiming) uint32 { return t.BatchSize }),
			}
		}
	}
}

// sameStep returns the timings of a step in records of its pipeline, of all items of a map.
func sameStep(of []*record, step *inferencev1.StepTiming) (out []*envelope.StepTiming) {
	path := envelope.WithoutIndices(step.GetPath())
	for _, one := range of {
		for i := range one.Timings {
			if t := &one.Timings[i]; string(t.Step) == step.GetStep() && envelope.WithoutIndices(t.Path) == path {
				out = append(out, t)
			}
		}
	}
	return out
}

// median returns the median of a value of what there is, which is one at least.
func median[E any, T cmp.Ordered](of []E, value func(E) T) T {
	values := make([]T, len(of))
	for i, one := range of {
		values[i] = value(one)
	}
	slices.Sort(values)
	return values[len(values)/2]
}
