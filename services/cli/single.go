package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unicode"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/services/runners"
)

// single is a mesh of one stage that runs one worker: what `up FILE` is.
type single struct {
	// path of the worker's program.
	path    string
	workers int
	options string
}

// file returns the file that describes the mesh.
func (s single) file() (*meshfile.File, error) {
	command, err := s.command()
	if err != nil {
		return nil, err
	}
	if err := s.validate(); err != nil {
		return nil, err
	}
	text, err := s.text(command)
	if err != nil {
		return nil, err
	}
	return meshfile.Parse(s.path, text, ".", runners.All()...)
}

func (s single) validate() error {
	if s.workers < 1 {
		return fmt.Errorf("--workers: %d is not at least 1", s.workers)
	}
	var options map[string]json.RawMessage
	if err := json.Unmarshal([]byte(s.options), &options); err != nil || options == nil {
		return errors.New("--options: this is no JSON object")
	}
	return nil
}

// text is the mesh as its file would have it. JSON is YAML, too.
func (s single) text(command []string) ([]byte, error) {
	name := nameOf(s.path)
	worker := map[string]any{"command": command, "workers": s.workers, "options": json.RawMessage(s.options)}
	step := map[string]any{"name": name, "stage": name}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(map[string]any{
		"mesh":      name,
		"stages":    map[string]any{name: map[string]any{"runner": map[string]any{"worker": worker}}},
		"pipelines": map[string]any{name: map[string]any{"steps": []any{step}}},
	})
	return out.Bytes(), err
}

// command is what runs the program: the Python SDK for a Python file, else the
// program itself.
func (s single) command() ([]string, error) {
	path, err := filepath.Abs(s.path)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w; give the file of a worker, or a mesh by --config", err)
	case info.IsDir():
		return nil, fmt.Errorf("%s is a folder; give the file of a worker", s.path)
	case filepath.Ext(path) == ".py":
		return []string{"python3", "-m", "stagemesh", path}, nil
	case info.Mode()&0o111 == 0:
		return nil, fmt.Errorf("%s is neither a Python file nor a program: its mode is %s", s.path, info.Mode().Perm())
	}
	return []string{path}, nil
}

// longestName is the most that a name may have.
const longestName = 63

// nameOf makes a stage's name of a file's.
func nameOf(path string) string {
	base := strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))
	name := strings.Map(func(r rune) rune {
		switch r = unicode.ToLower(r); {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		default:
			return '-'
		}
	}, base)
	name = strings.Trim(name[:min(len(name), longestName)], "-")
	if name == "" {
		return "worker"
	}
	return name
}
