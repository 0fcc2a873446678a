package runners

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// TopKSettings configure a stage that names the best of a classifier's scores.
type TopKSettings struct {
	// K is the number of labels a row gets, at most all of them; 0 means 3.
	K int `yaml:"k"`
	// Labels are the names of the scores, in order. Either they or LabelsFile are set.
	Labels []string `yaml:"labels"`
	// LabelsFile is a text file with one label a line, in the order of the scores. It may
	// end with a line break, and a label may be empty.
	LabelsFile string `yaml:"labels_file,path"`
	// Softmax turns scores that are logits into probabilities.
	Softmax bool `yaml:"softmax"`
	// Concurrency is the number of batches that run at once; 0 means 1.
	Concurrency int `yaml:"concurrency"`
}

const defaultK = 3

// The names of the parts of a top_k stage. Scores are an input and an output.
const (
	Scores = "scores"
	Labels = "labels"
)

// NewTopK returns a runner that takes an FP32 tensor of scores of shape [rows, C], where C
// is the number of labels, and returns for every row its k best, best first: labels, BYTES
// [rows, k], and scores, FP32 [rows, k]. Of equal scores the one with the lower index
// comes first. An item with a score that is NaN, or under softmax with a row that has no
// finite maximum, fails alone with INVALID_INPUT. NewTopK reads the labels.
func NewTopK(s TopKSettings) (*inproc.Runner, error) {
	switch {
	case len(s.Labels) == 0 && s.LabelsFile == "":
		return nil, errors.New("labels: are missing; list them, or name a labels_file")
	case len(s.Labels) > 0 && s.LabelsFile != "":
		return nil, errors.New("labels_file: is set beside labels; set one of them")
	}
	err := errors.Join(config.NotNegative("k", s.K), config.NotNegative("concurrency", s.Concurrency))
	if err != nil {
		return nil, err
	}
	names := s.Labels
	if s.LabelsFile != "" {
		text, err := os.ReadFile(s.LabelsFile)
		if err != nil {
			return nil, fmt.Errorf("labels_file: %w", err)
		}
		if len(text) == 0 {
			return nil, fmt.Errorf("labels_file: %s is empty", s.LabelsFile)
		}
		names = strings.Split(strings.TrimSuffix(strings.ReplaceAll(string(text), "\r\n", "\n"), "\n"), "\n")
	}
	r := topK{k: min(cmp.Or(s.K, defaultK), len(names)), softmax: s.Softmax}
	for _, name := range names {
		r.labels = append(r.labels, []byte(name))
	}
	return inproc.Each(inproc.Settings{Spec: r.spec(), Concurrency: s.Concurrency}, r.answer), nil
}

type topK struct {
	labels  [][]byte
	k       int
	softmax bool
}

func (r topK) spec() runner.Spec {
	k := int64(r.k)
	return runner.Spec{
		Inputs: []runner.PartSpec{{
			Name: Scores, Datatype: tensor.FP32, Shape: []int64{-1, int64(len(r.labels))},
			Description: "one score for each label",
		}},
		Outputs: []runner.PartSpec{
			{Name: Labels, Datatype: tensor.Bytes, Shape: []int64{-1, k}, Description: "the best labels, best first"},
			{Name: Scores, Datatype: tensor.FP32, Shape: []int64{-1, k}, Description: "their scores"},
		},
		Parameters: []runner.ParameterSpec{}, // none
		BatchAxis:  runner.BatchRows,
	}
}

func (r topK) answer(_ context.Context, item runner.Item) ([]payload.Part, error) {
	part, ok := item.Input(Scores)
	if !ok || part.Tensor == nil {
		return nil, invalid(Scores, "no tensor of that name is there")
	}
	t := *part.Tensor
	if len(t.Shape) != 2 || t.Shape[1] != int64(len(r.labels)) {
		return nil, invalid(Scores, "its shape is %v, the %d labels take [rows %d]", t.Shape, len(r.labels), len(r.labels))
	}
	all, err := t.FP32Values() // a copy
	if err != nil {
		return nil, invalid(Scores, "%w", err)
	}
	rows := int(t.Rows())
	labels := make([][]byte, 0, rows*r.k)
	scores := make([]float32, 0, rows*r.k)
	for i, row := range slices.Collect(slices.Chunk(all, len(r.labels))) {
		if r.softmax {
			if err := softmax(row); err != nil {
				return nil, invalid(Scores, "row %d: %w", i, err)
			}
		}
		order, err := best(row, r.k)
		if err != nil {
			return nil, invalid(Scores, "row %d: %w", i, err)
		}
		for _, at := range order {
			labels = append(labels, r.labels[at])
			scores = append(scores, row[at])
		}
	}
	shape := []int64{int64(rows), int64(r.k)}
	labelled, err := tensor.FromBytes(shape, labels)
	if err != nil {
		return nil, err
	}
	scored, err := tensor.FromFP32(shape, scores)
	return []payload.Part{payload.OfTensor(Labels, labelled), payload.OfTensor(Scores, scored)}, err
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
