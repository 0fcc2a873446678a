package cli_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// The script fails at first, then names what it was called for; the test starts and ends hosts
// accordingly.
func TestScaleAppliesHostsWantedByACommand(t *testing.T) {
	t.Parallel()
	broker, folder := testbed.StartBroker(t), t.TempDir()
	file, script, calls, text := filepath.Join(folder, "mesh.yaml"), filepath.Join(folder, "scale.sh"), filepath.Join(folder, "calls"), filepath.Join(folder, "a.txt")
	save(t, text, "hello")
	save(t, file, strings.ReplaceAll(echoes, "{echo: {}}", "{echo: {}}, min_hosts: 0")+freePorts)
	save(t, script, `if ! test -e `+folder+`/failed; then touch `+folder+`/failed; echo no capacity in this zone >&2; exit 3; fi
echo "$1 $2 $STAGEMESH_STAGE $STAGEMESH_HOSTS" >> `+calls+"\n")
	g := start(t, "gateway", "--config", file, "--nats", broker.URL())
	testbed.Eventually(t, "the gateway is ready", func() bool { return g.out.Has("\n") })
	words := regexp.MustCompile(`ready on (http://\S+) \(.*admin: (http://[^,)]+)`).FindStringSubmatch(g.out.String())
	if words == nil {
		t.Fatalf("it printed %q", g.out.String())
	}
	s := start(t, "scale", "--admin", words[2], "--exec", "sh "+script+" {stage} {hosts}")
	answer := make(chan string, 1)
	go func() {
		out, err := run(t, "infer", "p", text, "-a", words[1])
		if err != nil {
			out = err.Error()
		}
		answer <- out
	}()
	testbed.Eventually(t, "the command is run again", func() bool {
		data, _ := os.ReadFile(calls)
		return string(data) == "a 1 a 1\n"
	})
	for _, want := range []string{"no capacity in this zone", "stage a: the command for 1 host failed: exit status 3; it runs again in 1s"} {
		if !strings.Contains(s.errOut.String(), want) {
			t.Errorf("it printed %q, want %q", s.errOut.String(), want)
		}
	}
	if !strings.Contains(s.out.String(), "stage a: 0 hosts, 1 wanted: ") {
		t.Errorf("it printed %q", s.out.String())
	}
	h := start(t, "stage", "a", "--config", file, "--nats", broker.URL())
	if out := testbed.Receive(t, "answer", answer); !strings.Contains(out, "hello") {
		t.Errorf("the request is answered with %q", out)
	}
	testbed.Eventually(t, "the status has the host", func() bool { // the answer may come before what the host publishes
		out, err := run(t, "status", "--admin", words[2])
		return err == nil && strings.Contains(out, "HOSTS WANTED") && regexp.MustCompile(`(?m)^a +ready +1/1 .* 1 +\S`).MatchString(out)
	})
	for name, p := range map[string]*process{"scale": s, "the host": h, "the gateway": g} {
		if err := p.end(t); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
