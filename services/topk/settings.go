package topk

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// DefaultK is the number of labels a row gets where nobody says.
const DefaultK = 3

// Settings say which labels there are and how many of them an answer has.
type Settings struct {
	// K is the number of labels a row gets, at most all of them; 0 means
	// DefaultK.
	K int `yaml:"k"`
	// Labels are the names of the scores, in order. Either they or LabelsFile
	// are set.
	Labels []string `yaml:"labels"`
	// LabelsFile is the path of a text file with one label a line.
	LabelsFile string `yaml:"labels_file,path"`
	// Softmax turns scores that are logits into probabilities.
	Softmax bool `yaml:"softmax"`
	// Concurrency is the number of batches that run at once; 0 means 1.
	Concurrency int `yaml:"concurrency"`

	// Files, where set, is what LabelsFile is read from instead of the disk.
	Files fs.FS `yaml:"-"`
}

// Validate says what is wrong with the settings, by key. It does not look at
// the file.
func (s Settings) Validate() error {
	switch {
	case s.K < 0:
		return fmt.Errorf("k: %d is negative", s.K)
	case len(s.Labels) == 0 && s.LabelsFile == "":
		return errors.New("labels: are missing; list them, or name a labels_file")
	case len(s.Labels) > 0 && s.LabelsFile != "":
		return errors.New("labels_file: is set beside labels; set one of them")
	case s.Concurrency < 0:
		return fmt.Errorf("concurrency: %d is negative", s.Concurrency)
	}
	return nil
}

func (s Settings) k(labels int) int { return min(cmp.Or(s.K, DefaultK), labels) }

// labels returns the labels, of which there is at least one.
func (s Settings) labels() ([]string, error) {
	if s.LabelsFile == "" {
		return s.Labels, nil
	}
	text, err := s.read()
	if err != nil {
		return nil, fmt.Errorf("labels_file: %w", err)
	}
	lines := strings.Split(strings.TrimSuffix(strings.ReplaceAll(string(text), "\r\n", "\n"), "\n"), "\n")
	if len(text) == 0 {
		return nil, fmt.Errorf("labels_file: %s is empty", s.LabelsFile)
	}
	return lines, nil
}

func (s Settings) read() ([]byte, error) {
	if s.Files != nil {
		return fs.ReadFile(s.Files, s.LabelsFile)
	}
	return os.ReadFile(s.LabelsFile)
}
