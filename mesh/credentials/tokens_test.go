package credentials_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/credentials"
)

func TestTokensAreReadFromAFileOneALine(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	for name, test := range map[string]struct{ text, want string }{
		"good":      {"  open-sesame\n", ""},
		"several":   {"\nopen-sesame\n\n  open-simsim  \r\n", ""},
		"empty":     {" \n", "there is no token in it"},
		"a tenant":  {"open-sesame treasure\nopen-simsim\ttreasure\n", ""},
		"two words": {"open-sesame\nopen Sesame-Secret", "the name of its tenant"},
		"three":     {"open sesame secret", "the name of its tenant"},
		"long name": {"open " + strings.Repeat("a", 64), "the name of its tenant"},
		"two names": {"open sesame\nopen secret", "there twice"},
		"foreign":   {"s\u00e9same", "one word of visible ASCII"},
		"large":     {strings.Repeat("x", 2<<20), "larger than 1048576 bytes"},
	} {
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, []byte(test.text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := credentials.ReadTokens(path)
		if (err == nil) != (test.want == "") || err != nil && (!strings.Contains(err.Error(), test.want) || !strings.HasPrefix(err.Error(), path) || strings.Contains(strings.TrimPrefix(err.Error(), path), "ecret")) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if _, err := credentials.ReadTokens(filepath.Join(folder, "nowhere")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestTokensCannotBePrinted(t *testing.T) {
	t.Parallel()
	tokens, err := credentials.NewTokens("open-sesame")
	if err != nil {
		t.Fatal(err)
	}
	if text := fmt.Sprintf("%v %+v %#v %s", tokens, tokens, tokens, tokens); strings.Contains(text, "sesame") {
		t.Error(text)
	}
}
