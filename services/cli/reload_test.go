package cli_test

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestSavedJobsAreTakenWhileUpRuns(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	file, text := filepath.Join(folder, "mesh.yaml"), filepath.Join(folder, "a.txt")
	save(t, text, "seven")
	save(t, file, echoes+freePorts) // without jobs
	p := up(t, "-c", file)
	address, _ := p.ready(t)
	took := 0
	saveJobs := func(queues string) {
		t.Helper()
		save(t, file, echoes+freePorts+"jobs:\n  pools: {main: {target: {pipelines: [p]}}}\n  queues:\n"+queues)
		took++
		testbed.Eventually(t, "the file is taken", func() bool {
			return strings.Count(p.errOut.String(), "the jobs of the mesh file were replaced") == took
		})
	}
	submit := func(queue string) (id string) {
		t.Helper()
		out, err := run(t, "jobs", "submit", queue, text, "--wait", "-a", address)
		if err != nil {
			t.Fatal(err)
		}
		match(t, out, `FILE .*`, `a\.txt +`+jobID+` +p +succeeded .* seven`)
		return regexp.MustCompile(jobID).FindString(out)
	}
	saveJobs("    nightly: {max_bytes: 64MiB}\n")
	id := submit("nightly")
	saveJobs("    other: {max_bytes: 64MiB}\n")
	submit("other")
	if out, err := run(t, "jobs", "get", id, "-a", address); err != nil || !strings.Contains(out, id) {
		t.Errorf("a job of a queue that was taken out: %q, %v", out, err)
	}
	if out, err := run(t, "jobs", "list", "nightly", "--ended", "-a", address); err != nil || !strings.Contains(out, id) {
		t.Errorf("list: %q, %v", out, err)
	}
	if out, err := run(t, "jobs", "submit", "nightly", text, "-a", address); err == nil || !strings.Contains(out+err.Error(), "UNKNOWN_QUEUE") {
		t.Errorf("submitted to a queue that was taken out: %q, %v", out, err)
	}
	if _, err := run(t, "jobs", "list", "never", "-a", address); err == nil || !strings.Contains(err.Error(), "UNKNOWN_QUEUE") {
		t.Errorf("a queue that never was: %v", err)
	}
	save(t, file, echoes+freePorts+"jobs:\n  pools: {main: {target: {pipelines: [p]}}}\n  queues:\n    more: {weight: -1}\n")
	testbed.Eventually(t, "the error is logged", func() bool {
		return p.errOut.Has(`mesh.yaml:11:12: jobs.queues.more.weight: -1 is negative`)
	})
	submit("other")
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}
