package runners_test

import (
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// do runs a batch whose items have one input each.
func do(t testing.TB, r runner.Runner, inputs ...payload.Part) []runner.Outcome {
	t.Helper()
	slot, err := r.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := &sink{outcomes: map[int]runner.Outcome{}, chunks: map[int]int{}}
	batch := runner.Batch{Rows: len(inputs)}
	for _, in := range inputs {
		batch.Items = append(batch.Items, runner.Item{Inputs: []payload.Part{in}, Rows: 1})
	}
	if err := slot.Do(t.Context(), batch, s); err != nil {
		t.Fatal(err)
	}
	out := make([]runner.Outcome, len(inputs))
	for i := range inputs {
		out[i] = s.outcomes[i]
	}
	return out
}

func newTopK(t testing.TB, s runners.TopKSettings) runner.Runner {
	t.Helper()
	r, err := runners.NewTopK(s)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return r
}

func scores(t testing.TB, columns int, values ...float32) payload.Part {
	t.Helper()
	x, err := tensor.FromFP32([]int64{int64(len(values) / columns), int64(columns)}, values)
	if err != nil {
		t.Fatal(err)
	}
	return payload.OfTensor("scores", x)
}

// answer returns an outcome's labels and scores.
func answer(t testing.TB, o runner.Outcome) ([]string, []float32) {
	t.Helper()
	if o.Fault != nil {
		t.Fatal(o.Fault)
	}
	labels, ok := payload.Find(o.Parts, "labels")
	if !ok {
		t.Fatal("no labels")
	}
	elements, err := labels.Tensor.BytesElements()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range elements {
		names = append(names, string(e))
	}
	best, ok := payload.Find(o.Parts, "scores")
	if !ok {
		t.Fatal("no scores")
	}
	values, err := best.Tensor.FP32Values()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(best.Tensor.Shape, labels.Tensor.Shape) {
		t.Fatalf("labels of shape %v, scores of %v", labels.Tensor.Shape, best.Tensor.Shape)
	}
	return names, values
}

var inf = float32(math.Inf(1))

func TestBestLabels(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name     string
		settings runners.TopKSettings
		scores   []float32
		labels   []string
		best     []float32
	}{
		{"three where nobody says", runners.TopKSettings{}, []float32{1, 4, 2, 3}, []string{"b", "d", "c"}, []float32{4, 3, 2}},
		{"one", runners.TopKSettings{K: 1}, []float32{1, 4, 2, 3}, []string{"b"}, []float32{4}},
		{"all, where more are asked for", runners.TopKSettings{K: 9}, []float32{1, 4, 2, 3}, []string{"b", "d", "c", "a"}, []float32{4, 3, 2, 1}},
		{"equal scores in order", runners.TopKSettings{K: 3}, []float32{7, 8, 8, 8}, []string{"b", "c", "d"}, []float32{8, 8, 8}},
		{"equal scores at the end", runners.TopKSettings{K: 2}, []float32{7, 8, 7, 7}, []string{"b", "a"}, []float32{8, 7}},
		{"infinities", runners.TopKSettings{K: 4}, []float32{-inf, inf, 0, -1}, []string{"b", "c", "d", "a"}, []float32{inf, 0, -1, -inf}},
		{"two rows", runners.TopKSettings{K: 1}, []float32{1, 4, 2, 3, 9, 8, 7, 6}, []string{"b", "a"}, []float32{4, 9}},
		{"no rows", runners.TopKSettings{}, nil, nil, nil},
		{"softmax", runners.TopKSettings{K: 2, Softmax: true}, []float32{0, float32(math.Log(3)), -inf, -inf}, []string{"b", "a"}, []float32{0.75, 0.25}},
		{"softmax of large logits", runners.TopKSettings{K: 2, Softmax: true}, []float32{1000, 1000, 0, 0}, []string{"a", "b"}, []float32{0.5, 0.5}},
		{"softmax row by row", runners.TopKSettings{K: 1, Softmax: true}, []float32{0, 0, 0, 0, 5, -inf, -inf, -inf}, []string{"a", "a"}, []float32{0.25, 1}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			row.settings.Labels = []string{"a", "b", "c", "d"}
			in := scores(t, 4, row.scores...)
			before := slices.Clone(in.Tensor.Raw)
			labels, best := answer(t, do(t, newTopK(t, row.settings), in)[0])
			if !slices.Equal(labels, row.labels) {
				t.Errorf("got %v, want %v", labels, row.labels)
			}
			if !slices.EqualFunc(best, row.best, func(a, b float32) bool { return a == b || math.Abs(float64(a-b)) < 1e-6 }) {
				t.Errorf("got %v, want %v", best, row.best)
			}
			if !slices.Equal(in.Tensor.Raw, before) {
				t.Error("the input was written to")
			}
		})
	}
}

func TestBestMatchesSorting(t *testing.T) {
	t.Parallel()
	const columns, rows, k = 200, 50, 17
	source := rand.New(rand.NewPCG(1, 1))
	labels := make([]string, columns)
	for i := range labels {
		labels[i] = string(rune('A' + i))
	}
	values := make([]float32, columns*rows)
	for i := range values {
		values[i] = float32(source.IntN(60)) // Few enough to meet equals.
	}
	got, _ := answer(t, do(t, newTopK(t, runners.TopKSettings{K: k, Labels: labels}), scores(t, columns, values...))[0])
	var want []string
	for row := range slices.Chunk(values, columns) {
		order := make([]int, columns)
		for i := range order {
			order[i] = i
		}
		slices.SortStableFunc(order, func(i, j int) int { return int(row[j] - row[i]) })
		for _, i := range order[:k] {
			want = append(want, labels[i])
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestBadScoresFailAlone(t *testing.T) {
	t.Parallel()
	nan := float32(math.NaN())
	wrong := func(d tensor.Datatype, raw int, shape ...int64) payload.Part {
		return payload.OfTensor("scores", tensor.Tensor{Datatype: d, Shape: shape, Raw: make([]byte, raw)})
	}
	for _, row := range []struct {
		name    string
		part    payload.Part
		softmax bool
		want    string
	}{
		{"not a number", scores(t, 2, 1, 2, nan, 3), false, "row 1: score 0 is NaN"},
		{"not a number under softmax", scores(t, 2, 1, nan), true, "row 0: the highest score is NaN"},
		{"infinite logit", scores(t, 2, 1, inf), true, "row 0: the highest score is +Inf"},
		{"no finite logit", scores(t, 2, -inf, -inf), true, "row 0: the highest score is -Inf"},
		{"another number of scores", scores(t, 3, 1, 2, 3), false, "its shape is [1 3], the 2 labels take [rows 2]"},
		{"another rank", wrong(tensor.FP32, 8, 2), false, "its shape is [2]"},
		{"another datatype", wrong(tensor.FP64, 16, 1, 2), false, "datatype is FP64"},
		{"too few bytes", wrong(tensor.FP32, 4, 1, 2), false, "takes 8 bytes, got 4"},
		{"enormous shape", wrong(tensor.FP32, 8, math.MaxInt64, 2), false, ""},
		{"another name", payload.OfTensor("x", *scores(t, 2, 1, 2).Tensor), false, "no tensor of that name"},
		{"blob", payload.OfBlob("scores", "", []byte("12345678")), false, "no tensor of that name"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			r := newTopK(t, runners.TopKSettings{Labels: []string{"a", "b"}, K: 1, Softmax: row.softmax})
			out := do(t, r, scores(t, 2, 1, 2), row.part, scores(t, 2, 2, 1))
			f := out[1].Fault
			if f == nil || f.Reason != fault.InvalidInput || !strings.HasPrefix(f.Message, "input scores: ") || !strings.Contains(f.Message, row.want) {
				t.Errorf("got %v, want %q", f, row.want)
			}
			for i, want := range map[int]string{0: "b", 2: "a"} {
				if got, _ := answer(t, out[i]); !slices.Equal(got, []string{want}) {
					t.Errorf("item %d: got %v, want %v", i, got, want)
				}
			}
		})
	}
}

func TestTopKSpec(t *testing.T) {
	t.Parallel()
	spec := newTopK(t, runners.TopKSettings{Labels: []string{"a", "b"}, K: 5}).Spec()
	if got := spec.Inputs[0]; got.Name != "scores" || got.Datatype != tensor.FP32 || !slices.Equal(got.Shape, []int64{-1, 2}) {
		t.Errorf("got input %v", got)
	}
	for i, want := range []tensor.Datatype{tensor.Bytes, tensor.FP32} {
		if got := spec.Outputs[i]; got.Datatype != want || !slices.Equal(got.Shape, []int64{-1, 2}) {
			t.Errorf("got output %v, want %v", got, want)
		}
	}
	if spec.BatchAxis != runner.BatchRows {
		t.Error("the items do not share rows")
	}
}

func TestLabelsFile(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"line breaks": "cat\ndog\n\nbird\n", "no last one": "cat\ndog\n\nbird", "of the other kind": "cat\r\ndog\r\n\r\nbird\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			folder := t.TempDir()
			if err := os.WriteFile(filepath.Join(folder, "l.txt"), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			s := runners.TopKSettings{K: 4, LabelsFile: filepath.Join(folder, "l.txt")}
			got, _ := answer(t, do(t, newTopK(t, s), scores(t, 4, 4, 3, 2, 1))[0])
			if want := []string{"cat", "dog", "", "bird"}; !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}

func TestTopKSettingsAreChecked(t *testing.T) {
	t.Parallel()
	empty := filepath.Join(t.TempDir(), "l")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name     string
		settings runners.TopKSettings
		want     string
	}{
		{"negative k", runners.TopKSettings{K: -1, Labels: []string{"a"}}, "k: -1 "},
		{"no labels", runners.TopKSettings{}, "labels: "},
		{"both", runners.TopKSettings{Labels: []string{"a"}, LabelsFile: "l"}, "labels_file: "},
		{"negative concurrency", runners.TopKSettings{Labels: []string{"a"}, Concurrency: -1}, "concurrency: -1 "},
		{"no such file", runners.TopKSettings{LabelsFile: "no-such-file"}, "labels_file: open no-such-file"},
		{"empty file", runners.TopKSettings{LabelsFile: empty}, "labels_file: " + empty + " is empty"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			if _, err := runners.NewTopK(row.settings); err == nil || !strings.HasPrefix(err.Error(), row.want) {
				t.Errorf("got %v, want %q", err, row.want)
			}
		})
	}
}
