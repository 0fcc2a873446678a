package program_test

import (
	"errors"
	"testing"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/internal/program"
)

// run runs a command with two flags, and returns them.
func run(fails error, args ...string) (level string, many int, err error) {
	cmd := &cobra.Command{Use: "try", Version: "1", SilenceErrors: true, SilenceUsage: true}
	cmd.RunE = program.WithEnvironment(func(*cobra.Command, []string) error { return fails })
	cmd.Flags().StringVarP(&level, "log-level", "l", "info", "")
	cmd.Flags().IntVar(&many, "many", 1, "")
	cmd.SetArgs(args)
	err = cmd.Execute()
	return level, many, err
}

func TestVariablesSetMissingFlags(t *testing.T) {
	t.Setenv("STAGEMESH_LOG_LEVEL", "debug")
	t.Setenv("STAGEMESH_MANY", "3")
	t.Setenv("STAGEMESH_VERSION", "1.2.3")
	t.Setenv("STAGEMESH_HELP", "no switch")
	for name, test := range map[string]struct {
		args  []string
		level string
		many  int
	}{
		"none given":  {nil, "debug", 3},
		"one given":   {[]string{"--log-level", "warn"}, "warn", 3},
		"a short one": {[]string{"-l", "warn"}, "warn", 3},
		"the default": {[]string{"--many", "1"}, "debug", 1},
	} {
		t.Run(name, func(t *testing.T) {
			if level, many, err := run(nil, test.args...); level != test.level || many != test.many || err != nil {
				t.Errorf("got %s, %d, %v", level, many, err)
			}
		})
	}
}

func TestEmptyVariableIsNone(t *testing.T) {
	t.Setenv("STAGEMESH_LOG_LEVEL", "")
	if level, many, err := run(nil); level != "info" || many != 1 || err != nil {
		t.Errorf("got %s, %d, %v", level, many, err)
	}
}

func TestErrorsNameTheVariable(t *testing.T) {
	bad := errors.New(`--log-level: "loud" is not a level`)
	for name, test := range map[string]struct {
		variable, value string
		fails           error
		args            []string
		want            string
	}{
		"a bad value":    {"STAGEMESH_LOG_LEVEL", "loud", bad, nil, `--log-level: "loud" is not a level (set by STAGEMESH_LOG_LEVEL)`},
		"a bad flag":     {"STAGEMESH_LOG_LEVEL", "info", bad, []string{"-l", "loud"}, `--log-level: "loud" is not a level`},
		"another flag":   {"STAGEMESH_MANY", "3", bad, nil, `--log-level: "loud" is not a level`},
		"what cannot be": {"STAGEMESH_MANY", "x", nil, nil, `invalid argument "x" for "--many" flag: strconv.ParseInt: parsing "x": invalid syntax (set by STAGEMESH_MANY)`},
		"something else": {"STAGEMESH_MANY", "3", errors.New("no"), nil, "no"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(test.variable, test.value)
			if _, _, err := run(test.fails, test.args...); err == nil || err.Error() != test.want {
				t.Errorf("got %v, want %s", err, test.want)
			}
		})
	}
}
