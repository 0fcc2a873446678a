package cli_test

import (
	"strings"
	"testing"
)

func TestFlagsOfUpMayBeVariables(t *testing.T) {
	for name, test := range map[string]struct {
		variable, value string
		args            []string
		want            string
	}{
		"a file":      {"STAGEMESH_CONFIG", "nowhere.yaml", nil, "--config: open nowhere.yaml: "},
		"an address":  {"STAGEMESH_LISTEN", "8080", nil, `--listen: "8080" is not an address`},
		"for workers": {"STAGEMESH_OPS", "9090", []string{"worker.py"}, `--ops: "9090" is not an address`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(test.variable, test.value)
			_, err := run(t, append([]string{"up"}, test.args...)...)
			if err == nil || !strings.HasPrefix(err.Error(), test.want) || !strings.HasSuffix(err.Error(), "(set by "+test.variable+")") {
				t.Errorf("got %v", err)
			}
		})
	}
	t.Setenv("STAGEMESH_CONFIG", "nowhere.yaml")
	if _, err := run(t, "up", "nowhere.py"); err == nil || strings.Contains(err.Error(), "yaml") {
		t.Errorf("a worker, and a file that only the environment names: %v", err)
	}
}
