package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// jobsInFlight is the bound of the pool of jobsFleet.
const jobsInFlight = 8

// jobsFleet is a fleet with a host, a gateway and two dispatchers, which are gateways too.
type jobsFleet struct {
	*fleet
	t           *testing.T
	stage       *member
	dispatchers []*member
	// owner is the dispatcher that owns the pool.
	owner *member
	// accepted are the IDs of the jobs, by their texts.
	mu       sync.Mutex
	accepted map[string]string
	next     atomic.Int64
	// jobs is the section of that name.
	jobs map[string]any
}

// newJobsFleet starts all but the dispatchers. A job takes that long. The pool has the keys of
// pool, too.
func newJobsFleet(t *testing.T, stage hostSpec, pool map[string]any) *jobsFleet {
	t.Helper()
	keys := map[string]any{"target": map[string]any{"pipelines": []string{"echo"}}, "max_in_flight": jobsInFlight}
	maps.Copy(keys, pool)
	f := &jobsFleet{t: t, fleet: newFleet(t, brokerRegistry), accepted: map[string]string{}}
	f.jobs = map[string]any{"pools": map[string]any{"main": keys}, "queues": map[string]any{"nightly": map[string]any{}}}
	stage.chunks, stage.slots = max(1, stage.chunks), max(8*jobsInFlight, keys["max_in_flight"].(int))
	f.stage = f.host(stage)
	f.gatewayOf(f.spec(false))
	return f
}

func (f *jobsFleet) spec(dispatches bool) gatewaySpec {
	return gatewaySpec{dispatches: dispatches, jobs: f.jobs}
}

func (f *jobsFleet) dispatch() {
	f.t.Helper()
	for range 2 {
		f.dispatchers = append(f.dispatchers, f.gatewayOf(f.spec(true)))
	}
	f.awaitOwner()
}

// awaitOwner waits until another dispatcher than the last one owns the pool.
func (f *jobsFleet) awaitOwner() {
	f.t.Helper()
	before := f.owner
	testbed.Eventually(f.t, "a dispatcher owns the pool", func() bool {
		for _, m := range f.dispatchers {
			if m != before && m.Err.Has("owns the pool") {
				f.owner = m
				return true
			}
		}
		return false
	})
}

// submit submits a job until a gateway has accepted it, with a key of its own.
func (f *jobsFleet) submit(ctx context.Context, client *http.Client, text string) {
	for try := 0; ctx.Err() == nil; try++ {
		f.fleet.mu.Lock()
		at := f.gateways[try%len(f.gateways)]
		f.fleet.mu.Unlock()
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+at.address()+"/v1/queues/nightly/jobs", strings.NewReader(text))
		if err != nil {
			f.t.Error(err)
			return
		}
		r.Header.Set("Content-Type", "text/plain")
		r.Header.Set("Idempotency-Key", text)
		var job struct{ ID string }
		answer, err := client.Do(r)
		if err == nil {
			err = json.NewDecoder(answer.Body).Decode(&job)
			_ = answer.Body.Close()
			if answer.StatusCode == http.StatusAccepted && err == nil {
				f.mu.Lock()
				f.accepted[text] = job.ID
				f.mu.Unlock()
				return
			}
		}
		_ = wait(ctx, pollEvery)
	}
}

// submitMany submits that many jobs, and returns when they are accepted.
func (f *jobsFleet) submitMany(jobs int) {
	f.load(jobs, 0)()
}

// load submits jobs, with a pause before each, until the returned function is called, or that
// many are accepted.
func (f *jobsFleet) load(jobs int, pause time.Duration) (finish func()) {
	const submitters = 16
	var submitting sync.WaitGroup
	var stopped atomic.Bool
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: submitters}}
	last := f.next.Load() + int64(jobs)
	for range submitters {
		submitting.Go(func() {
			for !stopped.Load() && wait(f.t.Context(), pause) == nil {
				n := f.next.Add(1)
				if n > last {
					return
				}
				f.submit(f.t.Context(), client, "job-"+strconv.FormatInt(n, 10))
			}
		})
	}
	return func() {
		stopped.Store(jobs > 1<<30)
		submitting.Wait()
		client.CloseIdleConnections()
	}
}

const endless = 1 << 31

// results returns the ends of all jobs: their states by their IDs.
func (f *jobsFleet) results() map[string]string {
	out := map[string]string{}
	for next := uint64(0); ; {
		var page struct {
			Jobs []struct{ ID, State, Message string }
			Next uint64
		}
		status, body := f.get(fmt.Sprintf("http://%s/v1/queues/nightly/results?limit=1000&after=%d", f.gateways[0].address(), next))
		if err := json.Unmarshal([]byte(body), &page); status != http.StatusOK || err != nil {
			f.t.Fatalf("%d %s", status, body)
		}
		for _, job := range page.Jobs {
			if _, again := out[job.ID]; again {
				f.t.Errorf("job %s has two ends", job.ID)
			}
			out[job.ID] = job.State + job.Message
		}
		if next = page.Next; next == 0 {
			return out
		}
	}
}

// check waits for the ends of all jobs, and fails the test unless each has succeeded, has run no
// more often than that, and the pool kept its bound.
func (f *jobsFleet) check(mostRuns int) {
	f.t.Helper()
	f.t.Cleanup(f.explainUnended)
	// The length of the queue costs little to poll, all of the results much.
	state, queue := f.streams().state, bus.SubjectsOf(f.mesh).JobStream("nightly")
	for left := state(queue).Msgs; left > 0; {
		before := left
		testbed.Eventually(f.t, "further jobs end", func() bool { left = state(queue).Msgs; return left < before })
	}
	testbed.Eventually(f.t, "all jobs have ended", func() bool { return len(f.results()) >= len(f.accepted) })
	results, runs, reruns := f.results(), f.runs(), 0
	for text, id := range f.accepted {
		if results[id] != "succeeded" || len(runs[text]) == 0 || len(runs[text]) > mostRuns {
			f.t.Errorf("%s (%s): %q after runs %v", text, id, results[id], runs[text])
		}
		reruns += len(runs[text]) - 1
	}
	for _, line := range f.lines(f.stage.record + atOnceSuffix) {
		if n, err := strconv.Atoi(line[0]); err != nil || n > jobsInFlight {
			f.t.Errorf("%s items at once, %d may be", line[0], jobsInFlight)
		}
	}
	f.t.Logf("%d jobs, %d reruns", len(f.accepted), reruns)
}

// explainUnended logs what holds the jobs that have no end, once the test has failed.
func (f *jobsFleet) explainUnended() {
	if !f.t.Failed() {
		return
	}
	const most = 5
	ended, unended := f.results(), 0
	for text, id := range f.accepted {
		if ended[id] != "" {
			continue
		}
		if unended++; unended <= most {
			_, why := f.get(fmt.Sprintf("http://%s/v1/jobs/%s/explain", f.gateways[0].address(), id))
			f.t.Logf("%s has not ended: %s", text, why)
		}
	}
	f.t.Logf("%d of %d accepted jobs have no end; %d ends", unended, len(f.accepted), len(ended))
}

// Mesh attempts are never sent again while they may run, so no job runs twice.
func TestJobsRunOnceWhileTheirOwnersDie(t *testing.T) {
	t.Parallel()
	f := newJobsFleet(t, hostSpec{run: 20 * time.Millisecond}, map[string]any{"timeout": "10s"})
	f.dispatch()
	finish := f.load(endless, 400*time.Millisecond)
	for range pick(4, 25) {
		f.flow(50)
		f.owner.Kill()
		for _, m := range f.dispatchers {
			if m != f.owner {
				m.Kill() // while it waits for the lease
				m.start()
			}
		}
		f.awaitOwner()
		for _, m := range f.dispatchers {
			if m != f.owner {
				m.start()
			}
		}
	}
	f.flow(50)
	finish()
	f.check(1)
}

// flow waits until so many more items have run.
func (f *jobsFleet) flow(more int) {
	f.t.Helper()
	before := f.stage.runs()
	testbed.Eventually(f.t, "jobs run", func() bool { return f.stage.runs() >= before+more })
}

// The answers of attempts that run for longer than a takeover belong to the next owner.
func TestAttemptsOutliveTheirDispatcher(t *testing.T) {
	t.Parallel()
	f := newJobsFleet(t, hostSpec{run: 7 * time.Second}, nil)
	f.dispatch()
	f.submitMany(1)
	testbed.Eventually(t, "one holds a slot, and nothing waits", func() bool { return f.stage.runs() == 1 })
	f.submitMany(2*jobsInFlight - 1)
	testbed.Eventually(t, "the pool is full", func() bool { return f.stage.runs() == jobsInFlight })
	f.owner.Kill()
	f.check(1)
}

// A watch gets each chunk once, and learns of those that died with a dispatcher.
func TestWatchOutlivesADispatcher(t *testing.T) {
	t.Parallel()
	const chunks = 20
	f := newJobsFleet(t, hostSpec{run: 10 * time.Second, chunks: chunks}, nil)
	f.dispatch()
	f.submitMany(1)
	testbed.Eventually(t, "it runs", func() bool { return f.stage.runs() == 1 })
	events := make(chan string, 1)
	go func() {
		_, body := f.get("http://" + f.gateways[0].address() + "/v1/jobs/" + f.accepted["job-1"] + "/events")
		events <- body
	}()
	kept := f.streams()
	testbed.Eventually(t, "chunks are kept", func() bool { return kept.state(bus.SubjectsOf(f.mesh).JobChunkStream()).Msgs >= 3 })
	f.owner.Kill()
	body := <-events
	next, gaps, last := 1, 0, ""
	for event := range strings.SplitSeq(strings.TrimSpace(body), "\n\n") {
		var what struct {
			Seq, First, Last int
			State            string
		}
		_, data, _ := strings.Cut(event, "data: ")
		if err := json.Unmarshal([]byte(data), &what); err != nil && !strings.HasPrefix(event, ":") {
			t.Errorf("%q: %v", event, err)
		}
		switch last = event; {
		case strings.Contains(event, "event: chunk"):
			if what.Seq != next {
				t.Errorf("chunk %d, want %d", what.Seq, next)
			}
			next = what.Seq + 1
		case strings.Contains(event, "event: gap"):
			if what.First != next {
				t.Errorf("a gap from %d, want %d", what.First, next)
			}
			next, gaps = what.Last+1, gaps+1
		}
	}
	if next != chunks+1 || gaps != 1 || !strings.Contains(last, `"state":"succeeded"`) {
		t.Errorf("%d chunks, %d gaps:\n%s", next-1, gaps, body)
	}
	f.check(1)
}

func TestPausedOwnerLeavesThePoolToAnother(t *testing.T) {
	t.Parallel()
	f := newJobsFleet(t, hostSpec{run: 20 * time.Millisecond}, nil)
	f.dispatch()
	finish := f.load(endless, pick(400*time.Millisecond, 200*time.Millisecond))
	for range pick(2, 10) {
		f.flow(50)
		paused := f.owner
		paused.pause()
		f.awaitOwner()
		f.flow(20)
		paused.resume()
		f.flow(50)
		testbed.Eventually(t, "the paused one stands by", func() bool { return paused.Err.Has("no longer owns the pool") })
		restart(paused)
	}
	finish()
	f.check(1)
}

// An owner that wakes up without its lease leaves its attempts to the next owner.
func TestPausedOwnerCancelsNoAttempt(t *testing.T) {
	t.Parallel()
	f := newJobsFleet(t, hostSpec{run: 12 * time.Second}, nil)
	f.dispatch()
	f.submitMany(jobsInFlight)
	testbed.Eventually(t, "all run", func() bool { return f.stage.runs() == jobsInFlight })
	paused := f.owner
	paused.pause()
	f.awaitOwner()
	paused.resume()
	testbed.Eventually(t, "the paused one stands by", func() bool { return paused.Err.Has("no longer owns the pool") })
	f.check(1)
}

func TestCancelledJobIsStoppedAtItsStage(t *testing.T) {
	t.Parallel()
	f := newJobsFleet(t, hostSpec{run: 10 * time.Millisecond}, nil)
	f.dispatch()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for _, text := range []string{holdPrefix + "-1", holdPrefix + "-2"} {
		f.submit(t.Context(), client, text)
		testbed.Eventually(t, "it runs", func() bool { return len(f.runs()[text]) == 1 })
		if text == holdPrefix+"-2" { // another owner resumes it
			f.owner.Kill()
			f.awaitOwner()
		}
		if status, body := f.send(client, http.MethodDelete, "http://"+f.gateways[0].address()+"/v1/jobs/"+f.accepted[text]); status != http.StatusOK {
			t.Fatalf("%d %s", status, body)
		}
		testbed.Eventually(t, "its run is cancelled", func() bool { return f.cancellations()[text] != time.Time{} })
		testbed.Eventually(t, "it has ended", func() bool { return strings.HasPrefix(f.results()[f.accepted[text]], "cancelled") })
	}
}

func TestJobsSurviveEveryPart(t *testing.T) {
	t.Parallel()
	f := newJobsFleet(t, hostSpec{run: 20 * time.Millisecond}, nil)
	f.host(hostSpec{run: 20 * time.Millisecond, chunks: 1, slots: 8 * jobsInFlight})
	f.dispatch()
	finish := f.load(endless, pick(400*time.Millisecond, 200*time.Millisecond))
	for range pick(1, 5) {
		for _, m := range []*member{f.stage, f.gateways[0], f.broker, f.owner} {
			f.flow(50)
			m.Kill()
			must(t, wait(t.Context(), time.Second))
			m.start()
		}
		f.owner = nil
		f.awaitOwner()
	}
	f.flow(50)
	finish()
	f.check(5)
}

// A queue of 10,000 jobs is followed again soon.
func TestNextOwnerSendsSoon(t *testing.T) {
	f := newJobsFleet(t, hostSpec{run: 20 * time.Millisecond}, nil)
	f.bulk(10_000, "")
	f.dispatch()
	f.flow(50)
	f.owner.Kill()
	before := f.stage.runs()
	until(t, "the next owner sends", 8*time.Second, func() bool { return f.stage.runs() > before+jobsInFlight })
}
