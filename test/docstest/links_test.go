package docstest

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

// link matches [text](target) and [text]: target.
var link = regexp.MustCompile(`\]\(([^)\s]+)\)|(?m:^\[[^\]]+\]:\s+(\S+)$)`)

func TestRelativeLinksLeadSomewhere(t *testing.T) {
	t.Parallel()
	all := pages(t)
	for _, p := range all {
		_, prose := blocks(p.text)
		for _, match := range link.FindAllStringSubmatch(prose, -1) {
			target := match[1] + match[2]
			if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			if err := follow(all, p, target); err != nil {
				t.Errorf("%s: link to %s: %v", p.path, target, err)
			}
		}
	}
}

var errNoHeading = errors.New("the page has no such heading")

func follow(all []page, from page, target string) error {
	file, heading, named := strings.Cut(target, "#")
	to := from.path
	if file != "" {
		to = path.Join(path.Dir(from.path), file)
	}
	if _, err := os.Stat(filepath.Join(repository, filepath.FromSlash(to))); err != nil {
		return err
	}
	if !named {
		return nil
	}
	i := slices.IndexFunc(all, func(p page) bool { return p.path == to })
	if i < 0 {
		return fmt.Errorf("%s is not a page of ours", to)
	}
	if !slices.Contains(headings(all[i].text), heading) {
		return errNoHeading
	}
	return nil
}

// headings returns the anchors that a page's headings get.
func headings(text string) []string {
	_, prose := blocks(text)
	var out []string
	for line := range strings.Lines(prose) {
		if title, ok := strings.CutPrefix(strings.TrimLeft(line, "#"), " "); ok && strings.HasPrefix(line, "#") {
			out = append(out, anchor(strings.TrimSpace(title)))
		}
	}
	return out
}

// anchor is a heading's name in links: lower case, spaces as dashes, without
// punctuation.
func anchor(title string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
			return unicode.ToLower(r)
		}
		return -1
	}, title)
}
