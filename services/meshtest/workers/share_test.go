package workers_test

import (
	"testing"

	"github.com/stagemesh/stagemesh/services/meshtest/workers"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker"
)

func TestFastWorkerGetsTheWork(t *testing.T) {
	t.Parallel()
	const requests = 400
	one := batch.Settings{Mode: batch.Eager, MaxSize: 1}
	bed := workers.New(t, workers.Spec{File: "obedient.py", Batch: one, Worker: func(s *worker.Settings) {
		s.Replicas = []worker.Replica{{Env: map[string]string{"PAUSE": "0.2"}}, {Env: map[string]string{"PAUSE": "0.002"}}}
	}})
	l := begin(bed, 8)
	for l.next.Load() < requests {
		l.book(bed.Ask("one more"))
	}
	by := map[string]int{}
	for _, a := range l.end() {
		a.Succeeds(t)
		by[a.Worker()]++
	}
	t.Logf("requests by worker: %v; 0 takes a hundred times as long as 1", by)
	if by["1"] < 10*by["0"] || by["0"] == 0 {
		t.Errorf("requests by worker: %v", by)
	}
}
