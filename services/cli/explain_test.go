package cli_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"
	"google.golang.org/protobuf/encoding/protojson"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

func TestExplainShowsWhereTheTimeWent(t *testing.T) {
	t.Parallel()
	g := newDoomed(t)
	dead := string(g.doom("poison")[0].RequestID)
	g.open(1)
	explain := func(args ...string) (string, error) {
		t.Helper()
		return run(t, append([]string{"explain", "-a", g.admin}, args...)...)
	}
	file := filepath.Join(t.TempDir(), "x.txt")
	save(t, file, "x")
	var answer inferencev1.InferResponse
	for range 6 {
		out, err := run(t, "infer", "stage:poisoned", file, "--json", "-a", g.address)
		if err == nil {
			err = protojson.Unmarshal([]byte(out), &answer)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	out, err := explain(answer.GetRequestId())
	if err != nil {
		t.Fatal(err)
	}
	const times = `[0-9.]+ ms \([0-9.]+ ms\)`
	lines := strings.Split(out, "\n")
	match(t, strings.Join(lines[:11], "\n"), `request `+answer.GetRequestId(),
		`  pipeline +stage:poisoned`, `  gateway +`+anyID, `  queue +memory`, `  admitted +\d{4}-.* UTC, \d+s ago`, `  took +`+times, ``,
		`STEP +HOST +DELIVERY +QUEUE +WAIT +RUN +BATCH +DISPATCH`,
		`poisoned +`+anyID+` +1 +`+times+` +`+times+` +`+times+` +1 \(1\) +idle`, ``,
		`It took [0-9.]+(µs|ms|s): .*\.`)
	if len(lines) < 13 || !strings.HasPrefix(lines[11], "That is ") || !strings.Contains(lines[11], "the median of the last 5 requests of pipeline stage:poisoned that succeeded is ") {
		t.Errorf("it says\n%s", out)
	}
	out, err = explain(answer.GetRequestId(), "--json")
	var report meshv1.RequestReport
	if err != nil || protojson.Unmarshal([]byte(out), &report) != nil || strings.Count(out, "\n") != 1 || report.GetCompared() != 5 || len(report.GetSummary()) < 2 || report.GetSteps()[0].GetUsual() == nil {
		t.Errorf("in JSON it is %s, %v", out, err)
	}

	failed := []string{`  fault +RUNNER_CRASHED: the process that ran the item alone ended 2 times, .*`}
	said := []string{
		`It failed with RUNNER_CRASHED at step poisoned on host ` + anyID + `: the item ends the process that runs it\.`,
		`The log of that host has more about it\.`, `It is dead letter 1: stagemesh dead-letters replay 1 runs it again\.`,
	}
	if out, err = explain(dead); err != nil || !strings.Contains(out, "this is what its stored result says.") {
		t.Errorf("of a dead letter with a result it says %s, %v", out, err)
	}
	if err := g.bus.JetStream().DeleteStream(t.Context(), g.bus.ResultStream()); err != nil {
		t.Fatal(err)
	}
	if out, err = explain(dead); err != nil {
		t.Fatal(err)
	}
	match(t, out, append(append(append([]string{`request ` + dead, `  pipeline +stage:poisoned`, `  gateway +gone`, `  queue +file`, `  admitted +.*`}, failed...),
		``, `No gateway that answered remembers it: this is what its dead letter says\.`), said...)...)

	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"no ID":         {nil, "give one REQUEST_ID"},
		"no UUID":       {[]string{"x"}, "INVALID_REQUEST: "},
		"an unknown ID": {[]string{uuid.NewString()}, "gateways remember all requests of the last "},
	} {
		if out, err := explain(test.args...); err == nil || !strings.Contains(err.Error(), test.want) || out != "" {
			t.Errorf("%s: %q, %v", name, out, err)
		}
	}
}
