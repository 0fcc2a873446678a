package docstest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The commands of an example are for a shell at the root of the repository, one block
// by itself: the folders and scripts that they name are there.
func TestCommandsOfExamplesFindTheirFiles(t *testing.T) {
	t.Parallel()
	paths, err := filepath.Glob(filepath.Join(repository, "examples/*/README.md"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%q, %v", paths, err)
	}
	for _, path := range paths {
		relative, err := filepath.Rel(repository, path)
		if err != nil {
			t.Fatal(err)
		}
		found, _ := blocks(read(t, relative))
		for _, b := range found {
			for _, name := range missing(b) {
				t.Errorf("%s:%d: there is no %s", relative, b.line, name)
			}
		}
	}
}

// missing returns what the commands of a block name and is not there: where cd goes,
// and scripts and relative folders among the other words.
func missing(b block) (names []string) {
	if b.language != "sh" {
		return nil
	}
	folder := repository
	for _, line := range b.lines {
		words := strings.Fields(line)
		for i, word := range words {
			to := i == 1 && words[0] == "cd"
			if !to && !strings.HasPrefix(word, "..") && filepath.Ext(word) != ".py" {
				continue
			}
			path := filepath.Join(folder, word)
			if _, err := os.Stat(path); err != nil {
				names = append(names, word)
			}
			if to {
				folder = path
			}
		}
	}
	return names
}
