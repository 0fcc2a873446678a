package fleet

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// valve is a gate that a test opens and shuts.
type valve struct {
	isOpen atomic.Bool
	gate   map[string]any
}

// newValve returns a shut valve, which dispatchers ask that often.
func newValve(t *testing.T, every time.Duration) *valve {
	t.Helper()
	v := &valve{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprint(w, map[bool]int{true: 1}[v.isOpen.Load()])
	}))
	t.Cleanup(server.Close)
	v.gate = map[string]any{"value": map[string]any{"url": server.URL}, "interval": every.String()}
	return v
}

// bulk submits that many jobs, by lines. Each is JSON, and the text of its job as it is.
func (f *jobsFleet) bulk(jobs int, query string) {
	f.t.Helper()
	for jobs > 0 {
		var body bytes.Buffer
		texts := make([]string, 0, bulkLines)
		for range min(jobs, bulkLines) {
			text := fmt.Sprintf("%q", fmt.Sprint("job-", f.next.Add(1)))
			texts = append(texts, text)
			fmt.Fprintln(&body, text)
		}
		jobs -= len(texts)
		testbed.Eventually(f.t, "the jobs are accepted", func() bool { return f.upload(body.Bytes(), texts, query) })
	}
}

// upload submits the lines of a body, and reports whether all were accepted. Repeated, it submits
// none twice.
func (f *jobsFleet) upload(body []byte, texts []string, query string) bool {
	f.t.Helper()
	request, err := http.NewRequestWithContext(f.t.Context(), http.MethodPost, "http://"+f.gateways[0].address()+"/v1/queues/nightly/jobs"+query, bytes.NewReader(body))
	must(f.t, err)
	request.Header.Set("Content-Type", "application/x-ndjson")
	request.Header.Set("Idempotency-Key", strings.Trim(texts[0], `"`))
	answer, err := http.DefaultClient.Do(request)
	must(f.t, err)
	defer answer.Body.Close()
	lines := bufio.NewScanner(answer.Body)
	for lines.Scan() && len(texts) > 0 {
		var job struct{ ID string }
		if err := json.Unmarshal(lines.Bytes(), &job); err != nil || job.ID == "" {
			f.t.Logf("%s: %s", texts[0], lines.Bytes())
			return false
		}
		f.accepted[texts[0]], texts = job.ID, texts[1:]
	}
	return len(texts) == 0
}

// bulkLines are the lines of one upload, whose answers the gateway holds until its end.
const bulkLines = 5_000

// streams reads the states of the mesh's streams.
type streams struct {
	t  *testing.T
	js jetstream.JetStream
}

func (f *jobsFleet) streams() *streams {
	f.t.Helper()
	conn, err := nats.Connect(f.url())
	must(f.t, err)
	f.t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	must(f.t, err)
	return &streams{t: f.t, js: js}
}

func (s *streams) state(name string) (out jetstream.StreamState) {
	s.t.Helper()
	testbed.Eventually(s.t, "the broker answers", func() bool {
		stream, err := s.js.Stream(s.t.Context(), name)
		if err != nil {
			s.t.Log(err)
			return false
		}
		out = stream.CachedInfo().State
		return true
	})
	return out
}

// Each job has a record of its start and one of its end, and nothing else is left of it. The soak
// measures a queue of a million jobs.
func TestManyJobsEndOnce(t *testing.T) {
	if !*soak { // which measures
		t.Parallel()
	}
	jobs, gate := pick(6_000, 1_000_000), newValve(t, time.Second)
	f := newJobsFleet(t, hostSpec{run: 0}, map[string]any{"max_in_flight": 256, "gate": gate.gate})
	f.dispatch()
	names, state := bus.SubjectsOf(f.mesh), f.streams().state
	dispatcher, broker := f.owner.heap(), f.broker.memory()
	begin := time.Now()
	f.bulk(jobs, "")
	t.Logf("%d jobs queued at %.0f/s; %d B of files a job", jobs, float64(jobs)/time.Since(begin).Seconds(), folderSize(t, f.folder)/jobs)
	if *soak {
		testbed.Eventually(t, "the owner knows all jobs", func() bool {
			return f.owner.count("stagemesh_job_queued", "queue", "nightly", "state", "waiting") == jobs
		})
		least := f.holdShut()
		f.bound("heap of a dispatcher", "B a job", float64(f.owner.heap()-dispatcher)/float64(jobs), 256)
		f.bound("memory of the broker", "B a job", float64(least-broker)/float64(jobs), 512)
	}
	if runs := f.stage.runs(); runs > 0 {
		t.Errorf("%d jobs ran while the gate was shut", runs)
	}
	gate.isOpen.Store(true)
	left := func() int { return int(state(names.JobStream("nightly")).Msgs) }
	full := f.rate(left, jobs-1, jobs-jobs/10)
	if *soak {
		f.owner.Kill()
		items := func() int { return f.stage.count("stagemesh_stage_items_total") }
		before := items()
		until(t, "the next owner sends", 20*time.Second, func() bool { return items() > before+256 })
	}
	drained := f.rate(left, min(left()-1, jobs/10), 0)
	t.Logf("drained at %.0f/s with all in the queue, and at %.0f/s at the end: %.2fx (may be 0.90x)", full, drained, full/drained)
	if *soak && full < .9*drained {
		t.Error("a long queue drains slowly")
	}
	testbed.Eventually(t, "no stored result is left", func() bool { return state(names.ResultStream()).Msgs == 0 })
	records := state(names.JobRecordStream())
	if int(records.Msgs) != jobs || int(records.LastSeq) != 2*jobs && !*soak {
		t.Errorf("%d records of %d jobs, after %d changes", records.Msgs, jobs, records.LastSeq)
	}
	runs := f.runs()
	for text := range f.accepted {
		if n := len(runs[text]); n != 1 {
			t.Errorf("%s: %d runs", text, n)
		}
	}
	if !*soak && f.owner.count("stagemesh_job_ended_total", "queue", "nightly", "state", "succeeded") != jobs {
		t.Error("jobs have ended otherwise")
	}
}

// rate returns how many jobs a second leave the queue between two lengths of it.
func (f *jobsFleet) rate(left func() int, from, to int) float64 {
	f.t.Helper()
	var begin time.Time
	var first, now int
	for begin.IsZero() || now > to {
		must(f.t, wait(f.t.Context(), pollEvery))
		if now = left(); begin.IsZero() && now <= from {
			begin, first = time.Now(), now
		}
	}
	return float64(first-now) / time.Since(begin).Seconds()
}

// bound logs a figure, and fails the test if it is above its bound.
func (f *jobsFleet) bound(what, unit string, value, most float64) {
	f.t.Helper()
	f.t.Logf("%s: %.3g %s (may be %.3g)", what, value, unit, most)
	if value > most {
		f.t.Errorf("%s: %.3g %s", what, value, unit)
	}
}

// holdShut measures a dispatcher whose gate is shut, and returns the least memory of the broker
// meanwhile. A process without work collects its heap every two minutes, and then returns memory
// bit by bit.
func (f *jobsFleet) holdShut() (least int) {
	f.t.Helper()
	const seconds = 240
	before := f.owner.processorTime()
	least = f.broker.memory()
	for range seconds {
		must(f.t, wait(f.t.Context(), time.Second))
		least = min(least, f.broker.memory())
	}
	f.bound("processor time of the owner of a shut pool", "% of a core", (f.owner.processorTime()-before).Seconds()/seconds*100, 2)
	return least
}

// heap returns the heap of the member's process after a collection, in bytes.
func (m *member) heap() (out int) {
	m.fleet.t.Helper()
	_, profile := m.fleet.get("http://" + m.ops + "/debug/pprof/heap?gc=1&debug=1")
	_, figures, _ := strings.Cut(profile, "# HeapAlloc = ")
	_, err := fmt.Sscan(figures, &out)
	must(m.fleet.t, err)
	return out
}

// processorTime returns what the member's process has used.
func (m *member) processorTime() time.Duration {
	m.fleet.t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", m.PID()))
	must(m.fleet.t, err)
	var user, system int64
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	_, err = fmt.Sscan(fields[11]+" "+fields[12], &user, &system)
	must(m.fleet.t, err)
	return time.Duration(user+system) * (time.Second / 100)
}

func folderSize(t *testing.T, folder string) int {
	t.Helper()
	size := 0
	must(t, filepath.WalkDir(folder, func(_ string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		info, err := entry.Info()
		if err == nil {
			size += int(info.Size())
		}
		return err
	}))
	return size
}

func TestShutGateHoldsJobsWhileOthersExpire(t *testing.T) {
	t.Parallel()
	const each = 100
	gate := newValve(t, 100*time.Millisecond)
	f := newJobsFleet(t, hostSpec{run: 100 * time.Millisecond}, map[string]any{"gate": gate.gate})
	f.dispatch()
	f.bulk(each, "?ttl=6s")
	f.bulk(each, "")
	gate.isOpen.Store(true)
	f.flow(2 * jobsInFlight)
	gate.isOpen.Store(false)
	settled(t, "the shut gate stops the flow", time.Second, func() bool {
		before := f.stage.runs()
		must(t, wait(t.Context(), 200*time.Millisecond))
		return f.stage.runs() == before
	})
	shut := f.stage.runs()
	testbed.Eventually(t, "those with a deadline have ended", func() bool { return len(f.results()) >= each })
	if runs := f.stage.runs(); runs != shut {
		t.Errorf("%d jobs started while the gate was shut", runs-shut)
	}
	gate.isOpen.Store(true)
	testbed.Eventually(t, "all have ended", func() bool { return len(f.results()) == 2*each })
	results, runs, ends := f.results(), f.runs(), map[string]int{}
	for text, id := range f.accepted {
		state, ran := results[id], len(runs[text])
		if ends[state]++; state == "succeeded" && ran != 1 || state != "succeeded" && (ran != 0 || !strings.HasPrefix(state, "expired")) {
			t.Errorf("%s: %s after %d runs", text, state, ran)
		}
	}
	if len(ends) != 2 || ends["succeeded"] != shut+each {
		t.Errorf("%v, %d ran before the gate was shut", ends, shut)
	}
}
