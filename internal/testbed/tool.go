package testbed

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// tools has the result of each target that Tools has made.
var tools sync.Map

// Tools returns the paths that a target of the Makefile prints, such as "consul", which
// builds or installs them if they are missing.
func Tools(target string) ([]string, error) {
	made, _ := tools.LoadOrStore(target, sync.OnceValues(func() ([]string, error) { return makeTools(target) }))
	return made.(func() ([]string, error))()
}

func makeTools(target string) ([]string, error) {
	root, err := Repository()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("make", "--no-print-directory", "-s", "-C", root, target)
	var log strings.Builder
	cmd.Stderr = &log
	out, err := cmd.Output()
	paths := strings.FieldsFunc(string(out), func(r rune) bool { return r == '\n' })
	if err == nil && len(paths) == 0 {
		err = errors.New("it prints no path")
	}
	for _, path := range paths {
		if err == nil {
			_, err = os.Stat(path)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("the test needs what make %s builds: %w\n%s", target, err, &log)
	}
	return paths, nil
}

// Repository returns the root of the repository, above the folder of the test.
func Repository() (string, error) {
	folder, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		_, err := os.Stat(filepath.Join(folder, "go.work"))
		if !errors.Is(err, fs.ErrNotExist) {
			return folder, err
		}
		above := filepath.Dir(folder)
		if above == folder {
			return "", fmt.Errorf("no go.work above the test: %w", err)
		}
		folder = above
	}
}

// Program is the program stagemesh, which the first test that needs it builds.
type Program struct {
	once   sync.Once
	folder string
	err    error
}

// Path returns where the program is, which is linked without C.
func (p *Program) Path(t testing.TB) string {
	t.Helper()
	p.once.Do(func() { p.err = p.build() })
	if p.err != nil {
		t.Fatal(p.err)
	}
	return filepath.Join(p.folder, "stagemesh")
}

func (p *Program) build() (err error) {
	// Other tests use it as well.
	if p.folder, err = os.MkdirTemp("", "stagemesh-"); err != nil {
		return err
	}
	// Linking is most of it, and the names of symbols half of that.
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", p.folder+string(filepath.Separator), "github.com/stagemesh/stagemesh/services/cmd/stagemesh")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build: %w\n%s", err, out)
	}
	return nil
}

// Remove removes what was built, after the last test.
func (p *Program) Remove() error { return os.RemoveAll(p.folder) }
