package digits_test

import (
	"errors"
	"io/fs"
	"path"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/examples/digits"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/services/onnx"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// accuracy is what the stages reach at least on the fifty images; they read all
// of them right where the network was trained.
const accuracy = 0.98

// sink collects outcomes.
type sink struct{ outcomes map[int]runner.Outcome }

func (s *sink) Chunk(int, []payload.Part) error { return errors.ErrUnsupported }

func (s *sink) SetOutcome(i int, o runner.Outcome) error {
	s.outcomes[i] = o
	return nil
}

// stage runs the items, of one row each, as one batch and returns what they
// became as items of the next stage, whose only input is named next.
func stage(t *testing.T, r runner.Runner, items []runner.Item, output, next string) []runner.Item {
	t.Helper()
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	slot, err := r.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := &sink{outcomes: map[int]runner.Outcome{}}
	if err := slot.Do(t.Context(), runner.Batch{Items: items, Rows: len(items)}, s); err != nil {
		t.Fatal(err)
	}
	out := make([]runner.Item, len(items))
	for i := range items {
		if f := s.outcomes[i].Fault; f != nil {
			t.Fatalf("item %d: %v", i, f)
		}
		part, ok := payload.Find(s.outcomes[i].Parts, output)
		if !ok {
			t.Fatalf("item %d: no output %s", i, output)
		}
		part.Name = next
		out[i] = runner.Item{Inputs: []payload.Part{part}, Rows: 1}
	}
	return out
}

func TestStagesReadTheImages(t *testing.T) {
	t.Parallel()
	decode, err := runners.NewImageDecode(runners.ImageDecodeSettings{
		Width: 8, Height: 8, Channels: runners.Grey, Layout: runners.Flat, Resample: runners.Box,
	})
	if err != nil {
		t.Fatal(err)
	}
	classify, err := onnx.New(onnx.Settings{Model: "digits.onnx"})
	if err != nil {
		t.Fatal(err)
	}
	label, err := runners.NewTopK(runners.TopKSettings{K: 3, Labels: strings.Split("0123456789", "")})
	if err != nil {
		t.Fatal(err)
	}

	images, labels := load(t)
	pixels := stage(t, decode, images, runners.Pixels, "x")
	probabilities := stage(t, classify, pixels, "p", runners.Scores)
	named := stage(t, label, probabilities, runners.Labels, runners.Labels)

	right := 0
	for i, item := range named {
		best, err := item.Inputs[0].Tensor.BytesElements()
		if err != nil {
			t.Fatal(err)
		}
		if string(best[0]) == labels[i] {
			right++
		}
	}
	if got := float64(right) / float64(len(named)); got < accuracy {
		t.Errorf("%d of %d images are read right, want %v of them", right, len(named), accuracy)
	}
}

// load returns the fifty images as items, and their digits.
func load(t *testing.T) (items []runner.Item, labels []string) {
	t.Helper()
	names, err := fs.Glob(digits.FS, "images/*.png")
	if err != nil || len(names) != 50 {
		t.Fatalf("got %d images, %v", len(names), err)
	}
	for _, name := range names {
		data, err := fs.ReadFile(digits.FS, name)
		if err != nil {
			t.Fatal(err)
		}
		_, label, _ := strings.Cut(strings.TrimSuffix(path.Base(name), ".png"), "-")
		items = append(items, runner.Item{
			Inputs: []payload.Part{payload.OfBlob(runners.Image, "image/png", data)}, Rows: 1,
		})
		labels = append(labels, label)
	}
	return items, labels
}
