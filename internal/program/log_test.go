package program_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/internal/program"
)

// logged returns what a command with the arguments logs at every level.
func logged(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd := &cobra.Command{SilenceErrors: true, SilenceUsage: true}
	flags := program.AddFlags(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		log, err := flags.Apply(&out)
		if err != nil {
			return err
		}
		log.Debug("one")
		log.Info("two")
		log.Warn("three")
		log.Error("four")
		return nil
	}
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func TestLogFlagsSetLevelAndFormat(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		args  []string
		lines int
		has   string
	}{
		"defaults": {nil, 3, "level=INFO msg=two"},
		"debug":    {[]string{"--log-level", "debug"}, 4, "level=DEBUG msg=one"},
		"warn":     {[]string{"--log-level", "warn"}, 2, "level=WARN msg=three"},
		"error":    {[]string{"--log-level", "error"}, 1, "level=ERROR msg=four"},
		"json":     {[]string{"--log-format", "json"}, 3, `"level":"INFO","msg":"two"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, err := logged(t, test.args...)
			if err != nil || strings.Count(out, "\n") != test.lines || !strings.Contains(out, test.has) {
				t.Errorf("got %v and\n%s", err, out)
			}
		})
	}
}

func TestInvalidLogFlagsAreNamed(t *testing.T) {
	t.Parallel()
	for flag, want := range map[string]string{
		"--log-level":  `--log-level: "loud" is not debug, info, warn or error`,
		"--log-format": `--log-format: "loud" is not text or json`,
	} {
		if out, err := logged(t, flag, "loud"); err == nil || err.Error() != want || out != "" {
			t.Errorf("got %v and %q, want %s", err, out, want)
		}
	}
}
