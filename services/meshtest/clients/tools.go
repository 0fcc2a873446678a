package clients

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

// Installed is where the clients are.
type Installed struct {
	// Root is the folder of the repository.
	Root string
	// Python is the program that has tritonclient and numpy, NodeModules the folder
	// with the packages for Node, and GRPCurl the program.
	Python, NodeModules, GRPCurl string
}

// Tools returns where the clients are, which are installed where they are missing.
func Tools(t *testing.T) Installed {
	t.Helper()
	out, err := installed()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

var installed = sync.OnceValues(func() (Installed, error) {
	root, err := repository()
	if err != nil {
		return Installed{}, err
	}
	cmd := exec.Command("make", "--no-print-directory", "-s", "-C", root, "clients")
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return Installed{}, fmt.Errorf("the clients that these tests are about cannot be had; make clients installs them: %w\n%s", err, &said)
	}
	paths := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(paths) != 3 {
		return Installed{}, fmt.Errorf("make clients prints %q, not three paths", out)
	}
	for _, path := range paths {
		if _, err := os.Stat(path); err != nil {
			return Installed{}, fmt.Errorf("make clients installed none: %w", err)
		}
	}
	return Installed{Root: root, Python: paths[0], NodeModules: paths[1], GRPCurl: paths[2]}, nil
})

// repository returns the folder of the repository, above that of the test.
func repository() (string, error) {
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
