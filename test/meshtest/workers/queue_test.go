package workers

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// held waits until the host has so many items in flight.
func held(t *testing.T, m *mesh, items int) {
	t.Helper()
	stream := m.Broker.Connect(meshtest.Mesh).Stream(stage, pipeline.Memory)
	js, err := m.Broker.Client().JetStream()
	if err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the host has the items", func() bool {
		n := 0
		for consumer := range js.ConsumersInfo(stream) {
			n += consumer.NumAckPending
		}
		return n == items
	})
}

func TestFullQueueRejectsAtOnce(t *testing.T) {
	t.Parallel()
	const bound = 4
	m := start(t, spec{
		file: "obedient.py", host: func(s *stagehost.Settings) { s.Queue.MaxItems = bound },
		gateway: func(s *gateway.Settings) { s.Timeout, s.Bus.AckTimeout = call.DefaultMaxTimeout, time.Hour },
	})
	var inside []<-chan answer
	for range bound {
		inside = append(inside, m.send(t.Context(), "wait go"))
	}
	held(t, m, bound)
	testbed.Returns(t, "the refusals", func() {
		for _, a := range m.inferAll(texts("too many", 20)) {
			a.checkFault(t, fault.QueueFull, stage)
		}
	})
	m.files.setFlag("go")
	for _, from := range inside {
		m.receive(from).checkEcho(t)
	}
}

// longWait is longer than a caller waits.
const longWait = time.Hour

func TestIdleWorkerGetsLoneRequestAtOnce(t *testing.T) {
	t.Parallel()
	m := start(t, spec{
		file: "obedient.py", batch: batch.Settings{Mode: batch.Eager, MaxSize: size, MaxBytes: 1 << 20, MaxWait: longWait},
	})
	begin := time.Now()
	for _, text := range texts("one by one", 20) {
		m.infer(text).checkEcho(t)
	}
	t.Logf("20 requests, one after the other, in %s", time.Since(begin))
}

// The window of those that arrive while the worker is busy is over when it is free.
func TestWindowBeginsWithArrival(t *testing.T) {
	t.Parallel()
	const window, busyFor = 1500 * time.Millisecond, "nap 2"
	m := start(t, spec{
		file: "obedient.py", batch: batch.Settings{Mode: batch.Window, MaxSize: 3, MaxBytes: 1 << 20, MaxWait: window},
	})
	var first []<-chan answer
	for _, text := range []string{busyFor, "beside", "beside"} {
		first = append(first, m.send(t.Context(), text))
	}
	m.files.await("run", busyFor)
	late := []<-chan answer{m.send(t.Context(), "later"), m.send(t.Context(), "later")}
	var free, answered time.Time
	for _, from := range first {
		a := m.receive(from)
		a.checkEcho(t)
		free = a.at
	}
	for _, from := range late {
		a := m.receive(from)
		a.checkEcho(t)
		answered = a.at
	}
	took := answered.Sub(free)
	t.Logf("answered %s after the worker was free; the window is %s", took, window)
	if took > window/2 {
		t.Errorf("it took %s: the window began when the worker was free", took)
	}
}

func TestFastWorkerGetsTheWork(t *testing.T) {
	t.Parallel()
	const requests = 400
	one := batch.Settings{Mode: batch.Eager, MaxSize: 1}
	m := start(t, spec{file: "obedient.py", batch: one, worker: func(s *worker.Settings) {
		s.Replicas = []worker.Replica{{Env: map[string]string{"PAUSE": "1"}}, {Env: map[string]string{"PAUSE": "0.002"}}}
	}})
	l := startLoad(m, 8)
	for l.next.Load() < requests {
		l.add(m.infer("one more"))
	}
	by := map[string]int{}
	for _, a := range l.finish() {
		a.checkEcho(t)
		by[a.worker()]++
	}
	t.Logf("requests by worker: %v; 0 pauses 500 times as long as 1", by)
	if by["1"] < 10*by["0"] || by["0"] == 0 {
		t.Errorf("requests by worker: %v", by)
	}
}

func TestCancelledRequestsNeverReachTheWorker(t *testing.T) {
	t.Parallel()
	const many = 20
	m := start(t, spec{file: "obedient.py"})
	first := m.send(t.Context(), "wait go")
	m.files.await("run", "wait go")
	ctx, leave := context.WithCancel(t.Context())
	var left, stayed []<-chan answer
	for i := range many {
		left = append(left, m.send(ctx, fmt.Sprintf("left %d", i)))
		stayed = append(stayed, m.send(t.Context(), fmt.Sprintf("stayed %d", i)))
	}
	held(t, m, 1+2*many)
	leave()
	for _, from := range left {
		m.receive(from).checkFault(t, fault.Cancelled, "")
	}
	testbed.Eventually(t, "the host knows", func() bool { return m.count("stagemesh_stage_cancelled_total") == many })
	m.files.setFlag("go")
	for _, from := range append(stayed, first) {
		m.receive(from).checkEcho(t)
	}
	for _, e := range m.files.all("run") {
		if at := slices.IndexFunc(e.Texts, func(text string) bool { return strings.HasPrefix(text, "left ") }); at >= 0 {
			t.Errorf("%q ran although its caller had gone", e.Texts[at])
		}
	}
}

func TestCancelReachesRunningItem(t *testing.T) {
	t.Parallel()
	m := start(t, spec{file: "obedient.py", batch: full(2)})
	ctx, leave := context.WithCancel(t.Context())
	beside := m.send(t.Context(), "beside it")
	gone := m.send(ctx, "hold me")
	m.files.await("run", "hold me")
	leave()
	m.receive(gone).checkFault(t, fault.Cancelled, "")
	m.files.await("cancelled", "me")
	m.receive(beside).checkEcho(t)
	m.checkNoExit()
}
