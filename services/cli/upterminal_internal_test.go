package cli

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
)

func TestTerminalShowsOnceWhyAWorkerDoesNotStart(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		exception []any
		want      string
	}{
		"an ERROR alone":       {nil, "s: no GPU\n"},
		"with an exception":    {[]any{"traceback", "", "error", "no GPU"}, "s: no GPU\n"},
		"with its lines":       {[]any{"traceback", "in setup\nno GPU", "error", "no GPU"}, "s:\nin setup\nno GPU\n"},
		"with another message": {[]any{"traceback", "", "error", "RuntimeError: no GPU"}, "s: RuntimeError: no GPU\n"},
	} {
		var screen bytes.Buffer
		log := slog.New(newTerminalHandler(&screen, slog.NewTextHandler(&screen, nil))).With("stage", "s")
		log.Info("state of a worker", "state", "ERROR", "message", "no GPU")
		if row.exception != nil {
			log.Error("exception", row.exception...)
		}
		log.Error("the worker is DEAD", "cause", "it reports ERROR: no GPU")
		log.Error("the worker does not start", "error", "it reports ERROR: no GPU")
		if got := screen.String(); !strings.HasPrefix(got, row.want) || strings.Count(got, "no GPU") != 1 || strings.Count(got, "level=ERROR") != 2 {
			t.Errorf("%s: %s", name, got)
		}
	}
}
