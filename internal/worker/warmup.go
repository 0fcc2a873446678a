package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// zeroName is the name of the example of zeros.
const zeroName = "zeros"

// warmUp runs the worker's examples, or zeros, as a batch of one and, unless it runs
// items one by one, as a full batch. The end of the incarnation ends it. A worker that loads models has none
// yet, so it runs nothing.
func (n *incarnation) warmUp() error {
	s := n.worker.settings()
	if s.Models != nil {
		return nil
	}
	spec := n.worker.runner.Spec()
	for _, example := range examplesOf(spec) {
		for _, size := range sizes(example, spec, s) {
			began := time.Now()
			if err := n.runExample(context.Background(), "warm-up", example, size, spec.BatchAxis); err != nil {
				advice := ""
				if example.Name == zeroName {
					advice = "; give the worker an example that it can answer"
				}
				return fmt.Errorf("the warm-up with %d of %q failed: %w%s", size, example.Name, err, advice)
			}
			n.warmUpTook = max(n.warmUpTook, time.Since(began))
		}
	}
	return nil
}

// checkExample runs an example of a worker that has been idle for Health.Examples.
func (l *workerLoop) checkExample(now time.Time) {
	every, of := l.settings().Health.Examples, l.current
	if every == 0 || l.machine.state != Ready || l.settings().Models != nil || now.Before(later(l.machine.readySince, l.machine.work.Ended).Add(every)) {
		return
	}
	leave := l.pool().takeIdle(l.index, of)
	if leave == nil {
		return
	}
	spec := l.runner.Spec()
	examples := examplesOf(spec)
	if len(examples) == 0 {
		leave()
		return
	}
	l.checks++
	example := examples[l.checks%len(examples)]
	wait := max(l.runner.pace.lateAfter(l.settings().HeartbeatLimit), lateFactor*of.warmUpTook)
	l.tasks.Go(func() {
		ctx, end := context.WithTimeout(context.Background(), wait) // then it is late, and nobody waits for it
		err := of.runExample(ctx, "health check", example, 1, spec.BatchAxis)
		end()
		leave()
		if err != nil && !errors.Is(err, runner.ErrNotStarted) {
			of.fail(fmt.Errorf("its example %q failed: %s", example.Name, err.Error()))
		}
	})
}

func (n *incarnation) runExample(ctx context.Context, id string, example runner.Example, size int, axis runner.BatchAxis) error {
	items := make([]runner.Item, size)
	rows := rowsOf(example.Inputs, axis)
	for i := range items {
		items[i] = runner.Item{RequestID: id, Inputs: example.Inputs, Rows: rows}
	}
	sink := &firstFault{}
	batch := runner.Batch{Items: items, Rows: size * rows}
	if err := n.do(ctx, request{batch: batch, warmup: true}, sink); err != nil {
		return err
	}
	if sink.fault != nil {
		return sink.fault
	}
	return nil
}

// sizes returns the numbers of items of the warm-ups with an example: one, and as many
// as fit the largest batch.
func sizes(example runner.Example, spec runner.Spec, s *Settings) []int {
	if spec.Stream || spec.OneByOne {
		return []int{1}
	}
	most := min(s.MaxSize/rowsOf(example.Inputs, spec.BatchAxis), warmUpParts/max(1, len(example.Inputs)))
	if bytes := payload.Size(example.Inputs); bytes > 0 {
		most = min(most, int(s.MaxFrame/int64(bytes)))
	}
	if most <= 1 {
		return []int{1}
	}
	return []int{1, most}
}

func rowsOf(inputs []payload.Part, axis runner.BatchAxis) int {
	for _, p := range inputs {
		if axis == runner.BatchRows && p.Tensor != nil {
			return max(1, int(p.Tensor.Rows()))
		}
	}
	return 1
}

// examplesOf returns the examples of a warm-up: none where the spec has none and does not
// describe all inputs.
func examplesOf(spec runner.Spec) []runner.Example {
	if len(spec.Examples) > 0 {
		return spec.Examples
	}
	zero := runner.Example{Name: zeroName}
	for _, want := range spec.Inputs {
		switch t, ok := zerosOf(want); {
		case ok:
			zero.Inputs = append(zero.Inputs, payload.OfTensor(want.Name, t))
		case !want.Optional:
			return nil
		}
	}
	if len(zero.Inputs) == 0 {
		return nil
	}
	return []runner.Example{zero}
}

// zerosOf returns a tensor of zeros, whose extents are 1 where the spec has -1.
func zerosOf(want runner.PartSpec) (tensor.Tensor, bool) {
	if !want.IsTensor() {
		return tensor.Tensor{}, false
	}
	shape := make([]int64, len(want.Shape))
	for i, extent := range want.Shape {
		if shape[i] = extent; extent < 0 {
			shape[i] = 1
		}
	}
	elements, ok := tensor.Elements(shape)
	size := want.Datatype.Size()
	if want.Datatype == tensor.Bytes {
		size = 4 // an empty element is its length
	}
	if !ok || elements > maxZeros/int64(size) {
		return tensor.Tensor{}, false
	}
	return tensor.Tensor{Datatype: want.Datatype, Shape: shape, Raw: make([]byte, elements*int64(size))}, true
}

// firstFault is a sink that keeps the first fault.
type firstFault struct {
	mu    sync.Mutex
	fault *fault.Fault
}

var _ runner.Sink = (*firstFault)(nil)

// Chunk implements runner.Sink.
func (*firstFault) Chunk(int, []payload.Part) error { return nil }

// SetOutcome implements runner.Sink.
func (s *firstFault) SetOutcome(_ int, o runner.Outcome) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fault == nil {
		s.fault = o.Fault
	}
	return nil
}
