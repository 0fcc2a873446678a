package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// sourcePath is a path of the tree as pages write it.
var sourcePath = regexp.MustCompile("`((?:bench|deploy|discovery|examples|gateway|internal|mesh|proto|sdk|services|stagehost|tools)/[A-Za-z0-9_./-]+)`")

// Code moves, and pages stay behind.
func TestPagesNamePathsThatExist(t *testing.T) {
	t.Parallel()
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/design/*.md"} {
		pages, err := filepath.Glob(filepath.Join(repository, pattern))
		if err != nil || len(pages) == 0 {
			t.Fatalf("%s: %d pages, %v", pattern, len(pages), err)
		}
		for _, page := range pages {
			for _, named := range sourcePath.FindAllStringSubmatch(read(t, filepath.Join(filepath.Dir(pattern), filepath.Base(page))), -1) {
				if _, err := os.Stat(filepath.Join(repository, named[1])); err != nil {
					t.Errorf("%s: %v", page, err)
				}
			}
		}
	}
}
