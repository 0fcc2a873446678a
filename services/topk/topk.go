package topk

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// The names of the runner's parts. Scores are an input and an output.
const (
	Scores = "scores"
	Labels = "labels"
)

// New returns a runner that names the best scores. It reads the labels.
func New(settings Settings) (*inproc.Runner, error) {
	if err := settings.Validate(); err != nil {
		return nil, err
	}
	names, err := settings.labels()
	if err != nil {
		return nil, err
	}
	n := namer{k: settings.k(len(names)), softmax: settings.Softmax}
	for _, name := range names {
		n.labels = append(n.labels, []byte(name))
	}
	return inproc.Each(inproc.Settings{Spec: n.spec(), Concurrency: settings.Concurrency}, n.answer), nil
}

type namer struct {
	labels  [][]byte
	k       int
	softmax bool
}

func (n namer) spec() runner.Spec {
	k := int64(n.k)
	return runner.Spec{
		Inputs: []runner.PartSpec{{
			Name: Scores, Datatype: tensor.FP32, Shape: []int64{-1, int64(len(n.labels))},
			Description: "one score for each label",
		}},
		Outputs: []runner.PartSpec{
			{Name: Labels, Datatype: tensor.Bytes, Shape: []int64{-1, k}, Description: "the best labels, best first"},
			{Name: Scores, Datatype: tensor.FP32, Shape: []int64{-1, k}, Description: "their scores"},
		},
		BatchAxis: runner.BatchRows,
	}
}

func (n namer) answer(_ context.Context, item runner.Item) ([]payload.Part, error) {
	rows, all, err := n.scores(item)
	if err != nil {
		return nil, err
	}
	labels := make([][]byte, 0, rows*n.k)
	scores := make([]float32, 0, rows*n.k)
	for i, row := range slices.Collect(slices.Chunk(all, len(n.labels))) {
		if n.softmax {
			if err := softmax(row); err != nil {
				return nil, invalid("row %d: %w", i, err)
			}
		}
		order, err := best(row, n.k)
		if err != nil {
			return nil, invalid("row %d: %w", i, err)
		}
		for _, at := range order {
			labels = append(labels, n.labels[at])
			scores = append(scores, row[at])
		}
	}
	shape := []int64{int64(rows), int64(n.k)}
	named, err := tensor.FromBytes(shape, labels)
	if err != nil {
		return nil, err
	}
	scored, err := tensor.FromFP32(shape, scores)
	return []payload.Part{payload.OfTensor(Labels, named), payload.OfTensor(Scores, scored)}, err
}

// scores returns the item's rows, and a copy of their scores.
func (n namer) scores(item runner.Item) (rows int, scores []float32, err error) {
	part, ok := item.Input(Scores)
	if !ok || part.Tensor == nil {
		return 0, nil, invalid("no tensor of that name is there")
	}
	t := *part.Tensor
	if len(t.Shape) != 2 || t.Shape[1] != int64(len(n.labels)) {
		return 0, nil, invalid("its shape is %v, the %d labels take [rows %d]", t.Shape, len(n.labels), len(n.labels))
	}
	scores, err = t.FP32Values()
	if err != nil {
		return 0, nil, invalid("%w", err)
	}
	return int(t.Rows()), scores, nil
}

// best returns the indices of the k highest scores, highest first.
func best(row []float32, k int) ([]int, error) {
	if i := slices.IndexFunc(row, isNaN); i >= 0 {
		return nil, fmt.Errorf("score %d is NaN", i)
	}
	order := make([]int, 0, k+1)
	for i, score := range row {
		at, _ := slices.BinarySearchFunc(order, i, func(j, _ int) int {
			// Equal scores sort before: the lower index stays in front.
			return cmp.Or(cmp.Compare(score, row[j]), -1)
		})
		if at == k {
			continue
		}
		order = slices.Insert(order, at, i)
		order = order[:min(k, len(order))]
	}
	return order, nil
}

// softmax replaces logits by probabilities.
func softmax(row []float32) error {
	top := slices.Max(row)
	if isNaN(top) || math.IsInf(float64(top), 0) {
		return fmt.Errorf("the highest score is %v; softmax needs a finite one", top)
	}
	sum := 0.0
	for _, v := range row {
		sum += math.Exp(float64(v - top))
	}
	for i, v := range row {
		row[i] = float32(math.Exp(float64(v-top)) / sum)
	}
	return nil
}

func isNaN(f float32) bool { return f != f }

// invalid returns the fault of an item whose scores cannot be used.
func invalid(format string, args ...any) error {
	cause := fmt.Errorf(format, args...)
	return fault.Newf(fault.InvalidInput, "input %s: %w", Scores, cause).WithViolation("inputs."+Scores, "%s", cause)
}
