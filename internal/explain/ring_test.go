package explain

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/google/uuid"
	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// request returns the envelope of a request that was admitted so long ago.
func request(n int, ago time.Duration) *envelope.Envelope {
	return &envelope.Envelope{
		RequestID: id(n), ExecutionID: pipeline.ExecutionID(fmt.Sprint("execution ", n)), Pipeline: "digits", Gateway: "g", Tenant: "t",
		Durability: pipeline.File, AdmittedAt: time.Now().Add(-ago), Deadline: time.Now().Add(time.Minute),
		Route: []pipeline.Hop{{Step: "one", Stage: "a"}, {Step: "two", Stage: "b"}},
	}
}

func id(n int) pipeline.RequestID {
	return pipeline.RequestID(uuid.NewSHA1(uuid.Nil, fmt.Append(nil, n)).String())
}

// steps returns a timeline of two steps, of which the second has that queue wait.
func steps(wait time.Duration) []envelope.StepTiming {
	return []envelope.StepTiming{
		{Step: "one", Stage: "a", Host: "h1", Attempt: 1, QueueWait: 1, BatchWait: 2, Run: 3, BatchSize: 4, BatchRows: 5, Dispatch: "idle"},
		{Step: "two", Stage: "b", Host: "h2", Attempt: 2, QueueWait: wait, Run: time.Second, BatchSize: 1, BatchRows: 1, Dispatch: "full", Local: true},
	}
}

func TestRecordHasAllOfARequest(t *testing.T) {
	t.Parallel()
	r := NewRing()
	e := request(1, time.Second)
	f := fault.New(fault.RunnerFailed, "it broke").At("b", "two", "h2").WithViolation("x", "wrong")
	r.Add(e, steps(7), nil, 8*time.Second, f, "4bf92f3577b34da6a3ce929d0e0e4736")
	got := r.Find(e.RequestID)
	if got.GetPipeline() != "digits" || got.GetGateway() != "g" || got.GetTenant() != "t" || got.GetDurability() != pipeline.File.ToProto() ||
		!got.GetAdmittedAt().AsTime().Equal(e.AdmittedAt) || !got.GetDeadline().AsTime().Equal(e.Deadline) || got.GetTotal().AsDuration() != 8*time.Second ||
		got.GetTraceId() != "4bf92f3577b34da6a3ce929d0e0e4736" || len(got.GetSteps()) != 2 {
		t.Fatalf("found %v", got)
	}
	if s := got.GetSteps()[1].GetTiming(); s.GetStage() != "b" || s.GetHost() != "h2" || s.GetAttempt() != 2 || s.GetQueueWait().AsDuration() != 7 || s.GetDispatchReason() != "full" || !s.GetLocal() {
		t.Errorf("step %v", s)
	}
	if f := got.GetFault(); f.GetReason() != "RUNNER_FAILED" || f.GetHost() != "h2" || f.GetViolations()[0].GetField() != "x" {
		t.Errorf("fault %v", f)
	}
	if r.Find(id(2)) != nil {
		t.Error("found a request that never was")
	}
}

func TestFailedAndSlowestRequestsStayLonger(t *testing.T) {
	t.Parallel()
	const records, all = 80, 1000
	r := newRing(records, maxBytes)
	began := r.RemembersSince()
	if time.Since(began) > time.Minute {
		t.Errorf("an empty ring remembers since %s", began)
	}
	for n := range all {
		took, f := time.Duration(n), (*fault.Fault)(nil)
		switch {
		case n < 10:
			took = time.Hour - time.Duration(n)
		case n < 15:
			f = fault.New(fault.RunnerFailed, "it broke")
		}
		r.Add(request(n, 0), nil, nil, took, f, "")
	}
	for n := range all {
		isKept := n < 15 || n >= all-records+2*records/share
		if isFast := n < all-records && n >= 15; !isFast && (r.Find(id(n)) != nil) != isKept {
			t.Errorf("request %d is kept: %t", n, !isKept)
		}
	}
	oldest := r.recent.records[0]
	if since := r.RemembersSince(); !since.After(began) || !since.Before(oldest.AdmittedAt.Add(oldest.total)) {
		t.Errorf("it remembers since %s", since)
	}
}

func TestSlowRequestsCountHalfEachHour(t *testing.T) {
	t.Parallel()
	r := newRing(2*share, maxBytes)
	for i, one := range []struct{ total, ago time.Duration }{
		{100 * time.Millisecond, 2 * time.Hour}, // as 25 ms now
		{60 * time.Millisecond, time.Hour},      // as 30 ms now
		{40 * time.Millisecond, 0},
	} {
		r.demote(&record{Envelope: envelope.Envelope{RequestID: id(i), AdmittedAt: time.Now().Add(-one.ago)}, total: one.total})
	}
	if r.Find(id(0)) != nil || r.Find(id(1)) == nil || r.Find(id(2)) == nil {
		t.Errorf("drops %v first", r.spare)
	}
}

func TestLatestRequestsComeFirst(t *testing.T) {
	t.Parallel()
	const records = 80
	r := newRing(records, maxBytes)
	for n := range 200 {
		var f *fault.Fault
		if n%20 == 0 {
			f = fault.New(fault.RunnerFailed, "it broke").At([]string{"a", "b"}[n/20%2], "", "")
		}
		r.Add(request(n, 0), steps(1), nil, time.Second, f, "")
	}
	ids := func(reports []*meshv1.RequestReport) (out []int) {
		for _, report := range reports {
			for n := range 200 {
				if report.GetRequestId() == string(id(n)) {
					out = append(out, n)
				}
			}
			if report.GetTotal().AsDuration() != time.Second || len(report.GetSteps()) > 0 {
				t.Errorf("got %v", report)
			}
		}
		return out
	}
	for _, test := range []struct {
		failed bool
		stage  string
		limit  int
		want   []int
	}{
		{false, "", 3, []int{199, 198, 197}},
		{false, "", 0, nil},
		{true, "", 3, []int{180, 160, 140}},
		{false, "b", 3, []int{180, 140, 100}},
		{true, "a", 2, []int{160, 120}},
		{true, "c", 2, nil},
		// Those that are not among the recent ones stay longer.
		{true, "", 100, []int{180, 160, 140, 120, 100, 80, 60, 40, 20, 0}},
	} {
		if got := ids(r.Latest(test.failed, test.stage, test.limit)); !slices.Equal(got, test.want) {
			t.Errorf("%+v: got %v", test, got)
		}
	}
}

// Add waits while Latest has the lock.
func TestLatestDecodesOnlyFaultsThatItReturns(t *testing.T) {
	r := NewRing()
	for n := range 100 {
		r.Add(request(n, 0), nil, nil, time.Second, fault.New(fault.RunnerFailed, "it broke").At("a", "", ""), "")
	}
	if n := testing.AllocsPerRun(100, func() { r.Latest(true, "b", 1) }); n != 0 {
		t.Errorf("to find nothing costs %v allocations", n)
	}
}

func TestLatestFindsLongFaultByStage(t *testing.T) {
	t.Parallel()
	r := NewRing()
	r.Add(request(1, 0), nil, nil, time.Second, fault.New(fault.RunnerFailed, strings.Repeat("x", 2*maxFault)).At("a", "", ""), "")
	if got := r.Latest(true, "a", 1); len(got) != 1 || len(got[0].GetFault().GetMessage()) != maxMessage {
		t.Errorf("found %v", got)
	}
}

func TestRingIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	const bytes = 256 << 10
	r := newRing(maxRecords, bytes)
	many := make([]envelope.StepTiming, pipeline.MaxSteps)
	long := fault.New(fault.RunnerFailed, strings.Repeat("x", 1<<20))
	for n := range 500 {
		r.Add(request(n, 0), many, nil, time.Second, []*fault.Fault{nil, long}[n%2], "")
	}
	if total := r.recent.bytes + r.failed.bytes + r.slow.bytes; total > bytes || total < bytes/2 {
		t.Errorf("the records have %d bytes", total)
	}
	counted := 0
	for _, one := range r.recent.records {
		counted += one.bytes()
	}
	if counted != r.recent.bytes {
		t.Errorf("%d bytes are counted as %d", counted, r.recent.bytes)
	}
	if f := r.Find(id(499)).GetFault(); f.GetReason() != "RUNNER_FAILED" || len(f.GetMessage()) != maxMessage {
		t.Errorf("the fault has a message of %d bytes", len(f.GetMessage()))
	}
}

// The texts of a reply share memory, which would stay as long as one of them.
func TestRecordsKeepNoMemoryOfReplies(t *testing.T) {
	t.Parallel()
	r := NewRing()
	host := strings.Clone("h2")
	timings := steps(1)
	timings[1].Host = pipeline.HostID(host)
	r.Add(request(1, 0), timings, nil, time.Second, nil, "")
	timings[0].Step = "changed"
	kept := r.recent.records[0].Timings
	if kept[0].Step != "one" || kept[1].Host != "h2" || unsafe.StringData(string(kept[1].Host)) == unsafe.StringData(host) {
		t.Errorf("keeps %v", kept)
	}
	for n := range 2 * maxNames {
		r.mu.Lock()
		own(r, fmt.Sprint(n, strings.Repeat("x", maxName)), "")
		r.mu.Unlock()
	}
	if len(r.names) > maxNames {
		t.Errorf("keeps %d names", len(r.names))
	}
}

func TestLateReplyCompletesRecord(t *testing.T) {
	t.Parallel()
	r := newRing(share, maxBytes)
	late := func(n int) *envelope.Envelope {
		e := request(n, 0)
		r.Add(e, nil, nil, time.Second, fault.New(fault.DeadlineExceeded, "no answer"), "")
		return e
	}
	e := late(1)
	bytes := r.recent.bytes
	r.Complete("another", func() []envelope.StepTiming { t.Error("reads the reply of another"); return nil })
	r.Complete(e.ExecutionID, func() []envelope.StepTiming { return append(steps(1), steps(1)...) })
	if got := r.Find(e.RequestID); len(got.GetSteps()) != len(e.Route) || got.GetFault() == nil || r.recent.bytes != bytes {
		t.Errorf("completed as %v", got)
	}
	r.Complete(e.ExecutionID, func() []envelope.StepTiming { t.Error("completes twice"); return nil })
	for n := range 100 {
		late(n)
	}
	if kept := len(r.recent.records) + len(r.failed.records); len(r.late) != kept {
		t.Errorf("waits for %d replies of %d requests", len(r.late), kept)
	}
}

func TestUsualIsTheMedianOfSuccesses(t *testing.T) {
	t.Parallel()
	r := NewRing()
	for n := range 2 * maxCompared {
		r.Add(request(n, 0), steps(time.Duration(n)), nil, time.Duration(10*n), nil, "")
	}
	r.Add(request(-1, 0), steps(1), nil, time.Hour, fault.New(fault.RunnerFailed, "it broke"), "")
	other := request(-2, 0)
	other.Pipeline = "other"
	r.Add(other, steps(1), nil, time.Hour, nil, "")
	slow := request(-3, 0)
	r.Add(slow, steps(time.Hour), nil, time.Hour, nil, "")
	got := r.Find(slow.RequestID)
	r.Compare(got)
	const middle = maxCompared + maxCompared/2
	u := got.GetSteps()[1].GetUsual()
	if got.GetCompared() != maxCompared || got.GetUsualTotal().AsDuration() != 10*middle || u.GetQueueWait().AsDuration() != middle || u.GetRun().AsDuration() != time.Second || u.GetBatchSize() != 1 {
		t.Errorf("compared %d: usual are %s, %v", got.GetCompared(), got.GetUsualTotal().AsDuration(), u)
	}
	alone := r.Find(other.RequestID)
	if r.Compare(alone); alone.GetCompared() != 0 || alone.GetUsualTotal() != nil {
		t.Errorf("compares a request with itself: %v", alone)
	}
}

// Timings of blocks come in any order, and not each request has the same.
func TestUsualOfAStepIsThatOfTheSameStep(t *testing.T) {
	t.Parallel()
	timing := func(step, path string, run time.Duration) envelope.StepTiming {
		return envelope.StepTiming{Step: pipeline.StepName(step), Path: path, Run: run, BatchSize: 1}
	}
	r := NewRing()
	fast, slow, items := timing("a", "both/fast", 1), timing("b", "both/slow", 9), []envelope.StepTiming{timing("c", "each[0]", 3), timing("c", "each[7]", 5)}
	r.Add(request(1, 0), []envelope.StepTiming{slow, fast}, nil, time.Second, nil, "")
	r.Add(request(2, 0), []envelope.StepTiming{slow}, nil, time.Second, nil, "")
	r.Add(request(3, 0), append(items, slow), nil, time.Second, nil, "")
	asked := request(4, 0)
	r.Add(asked, []envelope.StepTiming{timing("a", "both/fast", 2), timing("b", "both/slow", 2), timing("c", "each[3]", 2), timing("d", "new", 2)}, nil, time.Second, nil, "")
	got := r.Find(asked.RequestID)
	r.Compare(got)
	for i, want := range []time.Duration{1, 9, 5, 0} {
		if usual := got.GetSteps()[i].GetUsual(); usual.GetRun().AsDuration() != want || (usual == nil) != (want == 0) {
			t.Errorf("step %d: %v", i, usual)
		}
	}
	if got.GetCompared() != 3 {
		t.Errorf("compared %d", got.GetCompared())
	}
}

func TestFullRingAllocatesNothing(t *testing.T) {
	r := newRing(80, maxBytes)
	e, timings := request(1, 0), steps(1)
	for range 1000 {
		r.Add(e, timings, nil, time.Second, nil, "")
	}
	if n := testing.AllocsPerRun(1000, func() { r.Add(e, timings, nil, time.Second, nil, "") }); n != 0 {
		t.Errorf("a record costs %v allocations", n)
	}
}

func TestRingServesManyAtOnce(t *testing.T) {
	t.Parallel()
	r := newRing(80, maxBytes)
	var work sync.WaitGroup
	for i := range 8 {
		work.Go(func() {
			for n := range 200 {
				e := request(i*1000+n, 0)
				r.Add(e, nil, nil, time.Second, fault.New(fault.DeadlineExceeded, "no answer"), "")
				r.Complete(e.ExecutionID, func() []envelope.StepTiming { return steps(1) })
				if report := r.Find(e.RequestID); report != nil {
					r.Compare(report)
				}
				r.RemembersSince()
			}
		})
	}
	work.Wait()
}

func BenchmarkAdd(b *testing.B) {
	r := NewRing()
	e, timings := request(1, 0), append(steps(1), steps(2)[0])
	b.ReportAllocs()
	for n := range b.N {
		r.Add(e, timings, nil, time.Duration(n%1000)*time.Microsecond, nil, "")
	}
}
