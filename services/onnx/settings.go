package onnx

import (
	"cmp"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
)

// DefaultMaxRows is the largest batch that is run at once where nobody says.
const DefaultMaxRows = 64

// maxMaxRows bounds MaxRows: every power of two below is compiled.
const maxMaxRows = 1 << 16

// Settings say which model a runner runs, and how.
type Settings struct {
	// Model is the path of the model.
	Model string `yaml:"model,path"`
	// MaxRows is the largest number of rows that is run at once; 0 means
	// DefaultMaxRows. Larger batches are run in slices.
	MaxRows int `yaml:"max_rows"`
	// Axes fixes the extents of dynamic axes other than rows, by their names
	// in the model, e.g. {sequence: 128}.
	Axes map[string]int `yaml:"axes"`
	// Concurrency is the number of batches that run at once; 0 means 1.
	Concurrency int `yaml:"concurrency"`

	// Files, where set, is what Model is read from instead of the disk.
	Files fs.FS `yaml:"-"`
}

// Validate says what is wrong with the settings, by key. It does not look at
// the model.
func (s Settings) Validate() error {
	if s.Model == "" {
		return fmt.Errorf("model: is the path of an ONNX file and is missing")
	}
	if s.MaxRows < 0 || s.MaxRows > maxMaxRows {
		return fmt.Errorf("max_rows: %d is not between 1 and %d", s.MaxRows, maxMaxRows)
	}
	if s.Concurrency < 0 {
		return fmt.Errorf("concurrency: %d is negative", s.Concurrency)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Axes)) {
		if s.Axes[name] < 1 {
			return fmt.Errorf("axes: %s: %d is not positive", name, s.Axes[name])
		}
	}
	return nil
}

func (s Settings) maxRows() int { return cmp.Or(s.MaxRows, DefaultMaxRows) }

// sizes returns the batch sizes to compile: the powers of two below MaxRows,
// and MaxRows.
func (s Settings) sizes() []int {
	var out []int
	for n := 1; n < s.maxRows(); n *= 2 {
		out = append(out, n)
	}
	return append(out, s.maxRows())
}

func (s Settings) read() ([]byte, error) {
	if s.Files != nil {
		return fs.ReadFile(s.Files, s.Model)
	}
	return os.ReadFile(s.Model)
}
