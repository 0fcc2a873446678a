package cli_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
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

// The chart sets the delay so.
func TestDrainDelayMayBeAVariable(t *testing.T) {
	broker, file := testbed.StartBroker(t), filepath.Join(t.TempDir(), "mesh.yaml")
	save(t, file, echoes+freePorts)
	args := []string{"gateway", "--config", file, "--nats", broker.URL()}
	t.Setenv("STAGEMESH_DRAIN_DELAY", "40ms")
	g := start(t, args...)
	testbed.Eventually(t, "the gateway is ready", func() bool { return g.out.Has("\n") })
	if err := g.end(t); err != nil || !strings.Contains(g.errOut.String(), "delay=40ms") {
		t.Errorf("%v; it logged\n%s", err, g.errOut.String())
	}
	t.Setenv("STAGEMESH_DRAIN_DELAY", "-1s")
	if _, err := run(t, args...); err == nil || !strings.HasPrefix(err.Error(), "--drain-delay: -1s is negative") {
		t.Errorf("got %v", err)
	}
}
