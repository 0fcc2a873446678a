package workers_test

import (
	"testing"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/services/meshtest/workers"
)

func TestOutOfMemoryHalvesTheBatchAndBlamesNobody(t *testing.T) {
	t.Parallel()
	const fits = 5
	bed := workers.New(t, workers.Spec{File: "obedient.py", Options: map[string]any{"fits": fits}, Batch: full(size)})
	for _, a := range bed.AskAll(echoes("fine", size)) {
		a.Succeeds(t)
	}
	var sizes []int
	for _, e := range bed.Entries("run") {
		sizes = append(sizes, len(e.Texts))
	}
	t.Logf("batches of %v", sizes)
	// 1 + 2 + 4, and 8 that fit.
	if len(sizes) != 15 {
		t.Errorf("there were batches of %v", sizes)
	}
	if n := bed.Exits(); n > 0 {
		t.Errorf("%d processes ended", n)
	}
}

func TestTooLargeItemIsOutOfMemory(t *testing.T) {
	t.Parallel()
	bed := workers.New(t, workers.Spec{File: "obedient.py", Options: map[string]any{"fits": size}, Batch: full(size)})
	texts := echoes("fine", size)
	texts[7] = "huge"
	for _, a := range bed.AskAll(texts) {
		if a.Text == "huge" {
			a.Fails(t, fault.RunnerOutOfMemory, "memory")
			continue
		}
		a.Succeeds(t)
	}
}
