package cli_test

import (
	"encoding/json"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestTopPrintsFiguresForScripts(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "mesh.yaml")
	save(t, path, unregistered)
	p := up(t, "--config", path)
	admin := p.admin(t)
	out, err := run(t, "top", "--once", "--admin", admin)
	if err != nil || !regexp.MustCompile(`(?m)^echo +0\.0 +0 +1 +0\.0/1 +- +- +- +- +-$`).MatchString(out) ||
		!strings.Contains(out, "1 gateway   1 host\n0.0 requests/s   P50 -   P99 -   0 in flight\nno failures\n") || strings.Contains(out, "\x1b") {
		t.Errorf("it shows\n%s%v", out, err)
	}
	out, err = run(t, "top", "--once", "--json", "--admin", admin)
	var f struct {
		P50Seconds *float64
		Stages     []struct {
			Stage string
			Slots int
		}
	}
	if err != nil || json.Unmarshal([]byte(out), &f) != nil || strings.Count(out, "\n") != 1 || f.P50Seconds != nil || len(f.Stages) != 1 || f.Stages[0].Slots != 1 {
		t.Errorf("in JSON it is %s%v", out, err)
	}
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

func TestTopWithoutATerminalNamesOnce(t *testing.T) {
	t.Parallel()
	if _, err := run(t, "top"); err == nil || !strings.Contains(err.Error(), "--once") {
		t.Errorf("it ended with %v", err)
	}
}
