package cli_test

import (
	"context"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

const echoJobs = echoes + "jobs:\n  pools: {main: {target: {pipelines: [p]}}}\n  queues: {nightly: {max_bytes: 64MiB}}\n" + freePorts

func TestDispatcherAloneForwardsJobsOfOthers(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	folder := t.TempDir()
	file, text := filepath.Join(folder, "mesh.yaml"), filepath.Join(folder, "a.txt")
	save(t, file, echoes+freePorts)
	save(t, text, "seven")
	join := func(verb string, line *regexp.Regexp) (words []string) {
		t.Helper()
		var out testbed.Log
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- command(ctx, strings.NewReader(""), &out, t.Output(), append(strings.Fields(verb), "--config", file, "--nats", broker.URL())...)
		}()
		t.Cleanup(func() {
			stop()
			if err := testbed.Receive(t, "the end of "+verb, ended); err != nil {
				t.Error(err)
			}
		})
		testbed.Eventually(t, verb+" is ready", func() bool { return out.Has("\n") })
		if words = line.FindStringSubmatch(out.String()); words == nil {
			t.Fatalf("%s printed %q", verb, out.String())
		}
		return words
	}
	join("stage a", regexp.MustCompile(`^stage a of mesh m is ready `))
	address := join("gateway", regexp.MustCompile(`^gateway of mesh m is ready on (http://\S+) `))[1]
	operations := join("dispatcher", regexp.MustCompile(`^dispatcher of mesh m is ready \(operations: (http://\S+)\)\n$`))[1]
	save(t, file, echoJobs) // both take the jobs while they run
	var out string
	testbed.Eventually(t, "the gateway knows the queue", func() bool {
		var err error
		out, err = run(t, "jobs", "submit", "nightly", text, "--wait", "-a", address)
		return err == nil
	})
	match(t, out, `FILE .*`, `a\.txt +`+jobID+` +p +succeeded +\d+s +1 +seven`)
	response, err := http.Get(operations + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if body, err := io.ReadAll(response.Body); err != nil || response.StatusCode != http.StatusOK {
		t.Errorf("/readyz: %s, %s, %v", response.Status, body, err)
	}
}
