package report

import (
	"math/bits"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/stagemesh/stagemesh/services/bench/load"
)

// step is what is recorded of one step.
type step struct {
	name              string
	queue, batch, run *hdrhistogram.Histogram
	sizes             map[uint32]int64
	dispatches        map[string]int64
	redelivered       int64
}

func newStep(name string) *step {
	return &step{
		name: name, queue: newHistogram(coarse), batch: newHistogram(coarse), run: newHistogram(coarse),
		sizes: map[uint32]int64{}, dispatches: map[string]int64{},
	}
}

// Bounds on what is told apart.
const (
	// maxSizes are the sizes of batches; more go to the next power of two.
	maxSizes = 1024
	// maxDispatches are the reasons of a dispatch.
	maxDispatches = 16
)

func (s *step) record(of *load.Step) {
	record(s.queue, of.Queue)
	record(s.batch, of.Batch)
	record(s.run, of.Run)
	if of.Attempt > 1 {
		s.redelivered++
	}
	if of.BatchSize == 0 {
		return
	}
	size := of.BatchSize
	if _, known := s.sizes[size]; !known && len(s.sizes) >= maxSizes {
		size = 1 << min(bits.Len32(size-1), 31)
	}
	s.sizes[size]++
	reason := of.Dispatch
	if _, known := s.dispatches[reason]; !known && len(s.dispatches) >= maxDispatches {
		reason = other
	}
	s.dispatches[reason]++
}
