package dispatch

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// bed adds jobs to an order and takes them from it.
type bed struct {
	*order
	seq uint64
}

func newBed(policy string) *bed { return &bed{order: newOrder(policy)} }

func (b *bed) put(queue string, class pipeline.Class, tenant string, deadline int64) *entry {
	b.seq++
	e := &entry{id: [16]byte{byte(b.seq)}, seq: b.seq, line: b.line(queue, class, tenant), deadline: deadline, cost: 1}
	b.add(e, 0)
	return e
}

// fill adds n jobs with one deadline.
func (b *bed) fill(n int, queue string, class pipeline.Class, tenant string) {
	for range n {
		b.put(queue, class, tenant, math.MaxInt64)
	}
}

// run takes the next n jobs and counts them by name.
func (b *bed) run(n int, name func(*line) string) map[string]int {
	got := map[string]int{}
	for range n {
		if e := b.next(nil); e != nil {
			b.take(e)
			got[name(e.line)]++
		}
	}
	return got
}

func byQueue(l *line) string  { return l.queue }
func byClass(l *line) string  { return string(l.class) }
func byTenant(l *line) string { return l.tenant }

func TestSharesFollowWeights(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		policy string
		name   func(*line) string
		want   map[string]int
	}{
		"queues":             {weighted, byQueue, map[string]int{"a": 630, "b": 210}},
		"classes":            {weighted, byClass, map[string]int{"high": 640, "normal": 160, "low": 40}},
		"tenants":            {weighted, byTenant, map[string]int{"x": 560, "y": 280}},
		"strict queues":      {strict, byQueue, map[string]int{"a": 792, "b": 48}},
		"classes, no queues": {byDeadline, byClass, map[string]int{"high": 640, "normal": 160, "low": 40}},
		"tenants, no queues": {byDeadline, byTenant, map[string]int{"x": 560, "y": 280}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(test.policy)
			b.setWeight(ofQueue, "a", 3)
			for _, queue := range []string{"a", "b"} {
				for _, class := range pipeline.Classes() {
					for _, tenant := range []string{"x", "y"} {
						b.fill(840, queue, class, tenant)
					}
				}
			}
			b.setWeight(ofTenant, "x", 2)
			got := b.run(840, test.name)
			for name, want := range test.want {
				// A class or tenant has its share within each of the nodes above.
				if diff := got[name] - want; diff < -6 || diff > 6 {
					t.Errorf("%s ran %d jobs, not about %d: %v", name, got[name], want, got)
				}
			}
		})
	}
}

func TestCostsCountAgainstShare(t *testing.T) {
	t.Parallel()
	b := newBed(weighted)
	for range 100 {
		b.put("a", pipeline.Normal, "x", 1).cost = 9
		b.put("a", pipeline.Normal, "y", 1).cost = 1
	}
	if got := b.run(100, byTenant); got["x"] != 10 {
		t.Errorf("got %v; a job of x costs nine of y", got)
	}
}

func TestIdleTimeSavesNoShare(t *testing.T) {
	t.Parallel()
	b := newBed(weighted)
	b.fill(300, "a", pipeline.Normal, "x")
	b.run(100, byTenant)
	b.fill(100, "a", pipeline.Normal, "y")
	if got := b.run(100, byTenant); got["x"] != 50 {
		t.Errorf("got %v after y was idle, not half each", got)
	}
}

func TestPassedOverLineSavesNoShare(t *testing.T) {
	t.Parallel()
	b := newBed(weighted)
	for _, tenant := range []string{"x", "y", "z"} {
		b.fill(300, "a", pipeline.Normal, tenant)
	}
	for range 100 {
		e := b.next(func(l *line) bool { return l.tenant != "x" })
		if e.line.tenant != "x" {
			t.Fatalf("tenant %s was not passed over", e.line.tenant)
		}
		b.take(e)
	}
	if e := b.next(func(*line) bool { return true }); e != nil {
		t.Fatalf("job of %s goes although all are passed over", e.line.tenant)
	}
	if got := b.run(90, byTenant); got["x"] < 29 {
		t.Errorf("got %v, not a third each", got)
	}
}

func TestPausedQueueIsPassedOverAsAWhole(t *testing.T) {
	t.Parallel()
	b := newBed(weighted)
	for i := range 100 {
		b.put("a", pipeline.Normal, fmt.Sprint(i), 1)
	}
	b.put("b", pipeline.Normal, "x", 1)
	b.queue("a").pausedSince = epoch
	asked := 0
	ask := func(*line) bool { asked++; return false }
	if e := b.next(ask); e == nil || e.line.queue != "b" || asked != 1 {
		t.Errorf("%+v goes after a look at %d lines", e, asked)
	}
	b.queue("a").pausedSince = time.Time{}
	if b.run(10, byQueue)["a"] < 9 {
		t.Error("jobs of the resumed queue wait")
	}
	merged := newBed(byDeadline)
	merged.put("a", pipeline.Normal, "x", 1)
	merged.put("b", pipeline.Normal, "x", 2)
	merged.queue("a").pausedSince = epoch
	if merged.next(nil).line.queue != "b" {
		t.Error("a job of a paused queue goes")
	}
}

func TestWakingTenantStartsAtLeastShare(t *testing.T) {
	t.Parallel()
	b := newBed(weighted)
	b.put("a", pipeline.Normal, "x", 1).cost = 9
	b.fill(1, "a", pipeline.Normal, "x")
	b.run(1, byTenant)
	b.fill(1, "a", pipeline.Normal, "y")
	if e := b.next(nil); e.line.tenant != "x" {
		t.Error("y goes before x, as if it had waited while x ran")
	}
}

func TestWakingTenantIgnoresPassedOverLine(t *testing.T) {
	t.Parallel()
	b := newBed(weighted)
	b.fill(200, "a", pipeline.Normal, "x")
	b.fill(1, "a", pipeline.Normal, "limited")
	for range 100 {
		b.take(b.next(func(l *line) bool { return l.tenant == "limited" }))
	}
	b.fill(100, "a", pipeline.Normal, "y")
	if got := b.run(41, byTenant); got["x"] < 19 {
		t.Errorf("got %v; y saved up a share", got)
	}
}

func TestCancelledJobsLeaveNothing(t *testing.T) {
	t.Parallel()
	b := newBed(weighted)
	var jobs []*entry
	for i := range 1000 {
		jobs = append(jobs, b.put("a", pipeline.Normal, "x", int64(i)))
	}
	b.take(jobs[0])
	for i, e := range jobs {
		if i%10 != 5 {
			b.remove(e)
		}
	}
	if l := jobs[5].line; len(l.jobs.items) != 100 {
		t.Errorf("%d places for 100 jobs", len(l.jobs.items))
	}
	b.remove(jobs[505])
	for i := 5; i < 1000; i += 10 {
		if i == 505 {
			continue
		}
		if e := b.next(nil); e != jobs[i] {
			t.Fatalf("job %d goes, not %d", e.deadline, i)
		}
		b.take(jobs[i])
	}
}

func TestOneJobAtATimeGetsNoMoreThanItsShare(t *testing.T) {
	t.Parallel()
	b := newBed(weighted)
	b.setWeight(ofTenant, "x", 10)
	b.fill(300, "a", pipeline.Normal, "x")
	got := map[string]int{}
	for range 110 {
		if len(b.line("a", pipeline.Normal, "y").jobs.items) == 0 {
			b.fill(1, "a", pipeline.Normal, "y")
		}
		e := b.next(nil)
		b.take(e)
		got[e.line.tenant]++
	}
	if got["y"] > 11 {
		t.Errorf("got %v; y has a tenth of x's weight", got)
	}
}

func TestStrictServesHighestWeightFirst(t *testing.T) {
	t.Parallel()
	b := newBed(strict)
	for i, queue := range []string{"a", "b", "c"} {
		b.setWeight(ofQueue, queue, float64(3-i))
		b.fill(1000, queue, pipeline.Normal, "x")
	}
	if got := b.run(256, byQueue); got["a"] != 256 {
		t.Fatalf("got %v of the first 256, not a only", got)
	}
	b.run(256, byQueue)
	if got := b.run(256, byQueue); got["b"] != 16 || got["c"] != 16 {
		t.Errorf("got %v, not a sixteenth for b and for c", got)
	}
	b.setWeight(ofQueue, "c", 9)
	if e := b.next(nil); e.line.queue != "c" {
		t.Errorf("%s goes after c became first", e.line.queue)
	}
	if got := b.run(256, byQueue); got["c"] < 200 {
		t.Errorf("got %v after c became first", got)
	}
}

func TestStrictStarvesNoneOfManyQueues(t *testing.T) {
	t.Parallel()
	b := newBed(strict)
	for i := range 40 {
		queue := fmt.Sprint(i)
		b.setWeight(ofQueue, queue, float64(i+1))
		b.fill(100, queue, pipeline.Normal, "x")
	}
	got := b.run(256+40*10, byQueue)
	for i := range 40 {
		if got[fmt.Sprint(i)] < 5 {
			t.Errorf("queue %d got %d jobs", i, got[fmt.Sprint(i)])
		}
	}
}

func TestDeadlineMergesQueues(t *testing.T) {
	t.Parallel()
	b := newBed(byDeadline)
	for i, deadline := range []int64{50, 20, 40, 10, 30} {
		b.put([]string{"a", "b"}[i%2], pipeline.Normal, "x", deadline)
	}
	var got []int64
	for e := b.next(nil); e != nil; e = b.next(nil) {
		b.take(e)
		got = append(got, e.deadline)
	}
	if !slices.Equal(got, []int64{10, 20, 30, 40, 50}) {
		t.Errorf("got the deadlines %v", got)
	}
}

func TestReturningJobFindsItsLine(t *testing.T) {
	t.Parallel()
	b := newBed(weighted)
	e := b.put("a", pipeline.Normal, "x", 1)
	b.take(e)
	for i := range 2*idleKept + 2 {
		b.remove(b.put("a", pipeline.Normal, fmt.Sprint(i), 1))
	}
	if n := len(b.root.children["a"].children["normal"].children); n > idleKept+1 {
		t.Fatalf("%d idle lines are kept", n)
	}
	b.put("a", pipeline.Normal, "x", 2)
	b.add(e, 0)
	if next := b.next(nil); next != e || b.ahead(b.next(nil)) != 0 || *b.queue("a") != (queueState{waiting: 2}) {
		t.Errorf("got %+v, counted %+v", next, *b.queue("a"))
	}
}

// TestOrderAgreesWithModel adds, takes and removes jobs at random and compares with a
// list that is searched.
func TestOrderAgreesWithModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := newBed(rapid.SampledFrom([]string{weighted, strict, byDeadline}).Draw(t, "policy"))
		var now int64
		var jobs []*entry // those in the order
		var running []*entry
		drop := func(e *entry) {
			jobs = slices.DeleteFunc(jobs, func(other *entry) bool { return other == e })
		}
		job := func(t *rapid.T) *entry {
			if len(jobs) == 0 {
				t.Skip("no job")
			}
			return rapid.SampledFrom(jobs).Draw(t, "job")
		}
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				for range rapid.IntRange(1, 40).Draw(t, "jobs") {
					b.seq++
					queue := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "queue")
					class := rapid.SampledFrom(pipeline.Classes()).Draw(t, "class")
					e := &entry{
						seq: b.seq, line: b.line(queue, class, rapid.SampledFrom([]string{"x", "y"}).Draw(t, "tenant")),
						deadline: now + rapid.SampledFrom([]int64{5, 20, 20, 20, 50}).Draw(t, "ttl"),
						cost:     rapid.Int64Range(0, 9).Draw(t, "cost"),
					}
					if rapid.IntRange(0, 4).Draw(t, "delay it") == 0 {
						e.notBefore = now + rapid.Int64Range(0, 30).Draw(t, "delay")
					}
					b.add(e, now)
					jobs = append(jobs, e)
				}
			},
			"remove": func(t *rapid.T) {
				e := job(t)
				b.remove(e)
				b.remove(e)
				drop(e)
			},
			"remove many": func(*rapid.T) {
				for i, e := range slices.Clone(jobs) {
					if i%8 != 0 {
						b.remove(e)
						drop(e)
					}
				}
			},
			"take": func(t *rapid.T) {
				class := rapid.SampledFrom(append(pipeline.Classes(), "")).Draw(t, "passed over")
				e := b.next(func(l *line) bool { return l.class == class })
				eligible := slices.ContainsFunc(jobs, func(e *entry) bool {
					return e.standing != delayed && e.line.class != class
				})
				if e == nil {
					if eligible {
						t.Fatal("nothing goes although a job may")
					}
					return
				}
				if e.line.class == class || b.ahead(e) != 0 {
					t.Fatalf("%+v goes, a job of class %s, and %d are ahead", e, e.line.class, b.ahead(e))
				}
				for _, other := range jobs {
					if b.policy == byDeadline && other.standing != delayed && other.before(e) &&
						other.line.class == e.line.class && other.line.tenant == e.line.tenant {
						t.Fatalf("%+v goes before %+v", e, other)
					}
				}
				b.take(e)
				drop(e)
				running = append(running, e)
			},
			"return": func(t *rapid.T) {
				if len(running) == 0 {
					t.Skip("nothing runs")
				}
				e := running[0]
				running = running[1:]
				e.notBefore = now + rapid.Int64Range(0, 9).Draw(t, "pause")
				b.add(e, now)
				jobs = append(jobs, e)
			},
			"reweigh": func(t *rapid.T) {
				b.setWeight(ofQueue, "a", rapid.Float64Range(.1, 10).Draw(t, "weight"))
				b.setWeight(ofTenant, "x", rapid.Float64Range(.1, 10).Draw(t, "weight"))
			},
			"wait": func(t *rapid.T) {
				now += rapid.Int64Range(0, 20).Draw(t, "time")
				for e := b.firstExpired(now); e != nil; e = b.firstExpired(now) {
					if e.deadline > now {
						t.Fatalf("%+v expired at %d", e, now)
					}
					b.remove(e)
					drop(e)
				}
				for _, e := range jobs {
					if e.deadline <= now || e.standing == delayed && e.notBefore <= now {
						t.Fatalf("%+v is left at %d", e, now)
					}
				}
			},
			"": func(t *rapid.T) { b.compare(t, jobs) },
		})
		// Nobody starves: the rest goes, each job once.
		b.wake(math.MaxInt64)
		for e := b.next(nil); e != nil; e = b.next(nil) {
			b.take(e)
			drop(e)
		}
		if len(jobs) > 0 || len(b.root.awake.items) > 0 || len(b.deadlines.items) > 0 {
			t.Fatalf("%d jobs are left", len(jobs))
		}
	})
}

// compare checks what the order says of its jobs.
func (b *bed) compare(t *rapid.T, jobs []*entry) {
	event := int64(math.MaxInt64)
	counts := map[string]queueState{}
	for _, e := range jobs {
		count := counts[e.line.queue]
		if e.standing == delayed {
			count.delayed++
			event = min(event, e.notBefore)
		} else {
			count.waiting++
		}
		event = min(event, e.deadline)
		counts[e.line.queue] = count
	}
	for _, queue := range []string{"a", "b", "c"} {
		if got := *b.queue(queue); got != counts[queue] {
			t.Fatalf("queue %s: counted %+v, not %+v", queue, got, counts[queue])
		}
	}
	if at := b.nextEvent(); at != event {
		t.Fatalf("next event at %d, not %d", at, event)
	}
	if len(jobs) > 0 {
		e, want := jobs[0], 0
		for _, other := range jobs {
			if other.line == e.line && other.standing != delayed && other.before(e) {
				want++
			}
		}
		if got := b.ahead(e); got != want {
			t.Fatalf("%d jobs are ahead, not %d", got, want)
		}
	}
}

// ahead returns how many waiting jobs of its line go before a job. It looks at all of
// them.
func (o *order) ahead(e *entry) int {
	n := 0
	for _, other := range e.line.jobs.items {
		if other.before(e) {
			n++
		}
	}
	return n
}

// TestWaitIsBounded has lines with random weights and costs: while a line waits, it goes
// as soon as its share says, give or take a job of each line.
func TestWaitIsBounded(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := newBed(weighted)
		n := rapid.IntRange(2, 6).Draw(t, "queues")
		weights, got := make([]float64, n), make([]float64, n)
		for i := range n {
			weights[i] = rapid.Float64Range(.1, 10).Draw(t, "weight")
			b.setWeight(ofQueue, fmt.Sprint(i), weights[i])
			for range 200 {
				b.put(fmt.Sprint(i), pipeline.Low, "x", 1).cost = rapid.Int64Range(1, 10).Draw(t, "cost")
			}
		}
		for range 200 {
			e := b.next(nil)
			b.take(e)
			i := int(e.line.queue[0] - '0')
			got[i] += float64(e.cost) / weights[i]
			for j := range n {
				if ahead := got[i] - got[j]; ahead > 10/weights[i]+1e-6 {
					t.Fatalf("queue %d is %g ahead of queue %d, by weight", i, ahead, j)
				}
			}
		}
	})
}

// BenchmarkNext takes the next job and adds another, at two lengths of the queue.
func BenchmarkNext(b *testing.B) {
	for _, jobs := range []int{1_000, 1_000_000} {
		for name, deadline := range map[string]func(seq uint64) int64{
			"one ttl":          func(seq uint64) int64 { return int64(seq) },
			"random deadlines": func(uint64) int64 { return rand.Int64() },
		} {
			for _, tenants := range []int{1, 100} {
				b.Run(fmt.Sprintf("%d jobs, %s, %d tenants", jobs, name, tenants), func(b *testing.B) {
					o := newBed(weighted)
					put := func(tenant string) {
						o.put("nightly", pipeline.Low, tenant, deadline(o.seq))
					}
					var before, after runtime.MemStats
					runtime.GC()
					runtime.ReadMemStats(&before)
					for i := range jobs {
						put(fmt.Sprint(i % tenants))
					}
					runtime.GC()
					runtime.ReadMemStats(&after)
					b.ReportAllocs()
					for b.Loop() {
						e := o.next(nil)
						o.take(e)
						put(e.line.tenant)
					}
					b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(jobs), "B/job")
				})
			}
		}
	}
}
