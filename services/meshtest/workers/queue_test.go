package workers_test

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/meshtest"
	"github.com/stagemesh/stagemesh/services/meshtest/workers"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/batch"
)

// held waits until the host has so many items in flight.
func held(t *testing.T, bed *workers.Bed, items int) {
	t.Helper()
	stream := bed.Broker.Connect(meshtest.Mesh).Stream(workers.Stage, pipeline.Memory)
	js, err := bed.Broker.Client().JetStream()
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
	bed := workers.New(t, workers.Spec{
		File: "obedient.py", Host: func(s *stagehost.Settings) { s.Queue.MaxItems = bound },
	})
	var inside []<-chan workers.Answer
	for range bound {
		inside = append(inside, bed.Send(t.Context(), "wait go"))
	}
	held(t, bed, bound)
	for _, a := range bed.AskAll(echoes("too many", 20)) {
		a.Fails(t, fault.QueueFull, workers.Stage)
		if a.Took > 2*time.Second {
			t.Errorf("%q is refused after %s", a.Text, a.Took)
		}
	}
	bed.SetFlag("go")
	for _, from := range inside {
		bed.Received(from).Succeeds(t)
	}
}

const longWait = 10 * time.Second

func TestIdleWorkerGetsLoneRequestAtOnce(t *testing.T) {
	t.Parallel()
	bed := workers.New(t, workers.Spec{
		File: "obedient.py", Batch: batch.Settings{Mode: batch.Eager, MaxSize: size, MaxBytes: 1 << 20, MaxWait: longWait},
	})
	begin := time.Now()
	for _, text := range echoes("one by one", 20) {
		bed.Ask(text).Succeeds(t)
	}
	took := time.Since(begin)
	t.Logf("20 requests, one after the other, in %s", took)
	if took > longWait/2 {
		t.Errorf("20 requests took %s", took)
	}
}

// The window of those that arrive while the worker is busy is over when it is free.
func TestWindowBeginsWithArrival(t *testing.T) {
	t.Parallel()
	const window, busyFor = 1500 * time.Millisecond, "nap 2"
	bed := workers.New(t, workers.Spec{
		File: "obedient.py", Batch: batch.Settings{Mode: batch.Window, MaxSize: 3, MaxBytes: 1 << 20, MaxWait: window},
	})
	var first []<-chan workers.Answer
	for _, text := range []string{busyFor, "beside", "beside"} {
		first = append(first, bed.Send(t.Context(), text))
	}
	bed.AwaitEntry("run", busyFor)
	late := []<-chan workers.Answer{bed.Send(t.Context(), "later"), bed.Send(t.Context(), "later")}
	var free, answered time.Time
	for _, from := range first {
		a := bed.Received(from)
		a.Succeeds(t)
		free = a.At
	}
	for _, from := range late {
		a := bed.Received(from)
		a.Succeeds(t)
		answered = a.At
	}
	took := answered.Sub(free)
	t.Logf("answered %s after the worker was free; the window is %s", took, window)
	if took > window/2 {
		t.Errorf("it took %s: the window began when the worker was free", took)
	}
}
