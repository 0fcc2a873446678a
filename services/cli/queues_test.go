package cli_test

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/jobs/dispatch"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

func TestOperatorsPauseQueuesAndSeeWhatHoldsJobs(t *testing.T) {
	t.Parallel()
	file := jobsFile(t)
	file.Jobs.Pools["shut"] = dispatch.PoolConfig{
		Target: dispatch.TargetConfig{Pipelines: []string{"digits"}},
		Gate:   &dispatch.GateConfig{Gate: dispatch.Gate{Constant: &dispatch.ConstantGate{Value: new(float64)}}},
	}
	for name, pool := range map[string]string{"nightly": "main", "small": "main", "held": "shut"} {
		q := file.Jobs.Queues[name]
		q.Pool = pool
		file.Jobs.Queues[name] = q
	}
	m := meshtest.FromFile(t, file, stagemesh.FileSettings{Dispatcher: true})
	address := meshtest.Start(t, m).URL()
	ask := func(args ...string) string {
		t.Helper()
		at := m.AdminURL()
		if args[0] == "jobs" {
			at = address
		}
		out, err := run(t, append(args, "-a", at)...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	submit := func(queue string) (id string) {
		t.Helper()
		return strings.Fields(ask("jobs", "submit", queue, image("07-9.png")))[8]
	}
	testbed.Eventually(t, "the pools have an owner", func() bool { return !strings.Contains(ask("gates"), "no owner") })
	for range 5 {
		ask("queues", "pause", "nightly")
		id, resumed := submit("nightly"), time.Now()
		ask("queues", "resume", "nightly")
		ask("jobs", "wait", id)
		var r inferencev1.ExplainJobResponse
		err := protojson.Unmarshal([]byte(ask("jobs", "explain", id, "--json")), &r)
		if started := r.GetJob().GetStartedAt().AsTime(); err != nil || started.Before(resumed) {
			t.Errorf("started at %v, resumed at %v, %v", started, resumed, err)
		}
	}
	match(t, ask("queues", "pause", "nightly"), `queue nightly paused`)
	paused, held := submit("nightly"), submit("held")
	testbed.Eventually(t, "the owner has the jobs", func() bool {
		return strings.Contains(ask("jobs", "explain", paused), "position") && strings.Contains(ask("jobs", "explain", held), "position")
	})
	match(t, ask("gates"), `POOL  STATE +D +B +N +OUT  SOURCE +AGE +WHY`,
		`main +open +1\.00  0\.00  64 +0 +constant +\d+s +-`,
		`shut +closed +0\.00  0\.05  0 +0 +constant +\d+s +D <= B for \d+s`)
	match(t, ask("queues"), `QUEUE +POOL +STATE +QUEUED  DELAYED  RUNNING  OLDEST  PAUSED`,
		`held +shut +closed +1 +0 +0 +\d+s +-`, `nightly +main +paused +1 +0 +0 +\d+s +\d+s`, `small +main +open +0 +0 +0 +- +-`)
	match(t, ask("jobs", "explain", paused), "job "+paused, ` +queue +nightly, pool main`, ` +state +queued, accepted \d+s ago, 0 attempts`, ` +held by +paused for \d+s`, ` +position +1`)
	match(t, ask("jobs", "explain", held), "job "+held, ` +queue +held, pool shut`, ` +state .*`, ` +held by +closed: D <= B for \d+s`, ` +position +1`)
	match(t, ask("queues", "resume", "nightly"), `queue nightly resumed`)
	ask("jobs", "wait", paused)
	var r inferencev1.ExplainJobResponse
	if err := protojson.Unmarshal([]byte(ask("jobs", "explain", paused, "--json")), &r); err != nil || r.GetPlace().GetHold() != "ended" || r.GetPlace().GetSince() == nil || r.GetJob().GetId() != paused {
		t.Errorf("%v, %v", &r, err)
	}
	if _, err := run(t, "queues", "pause", "none", "-a", m.AdminURL()); err == nil || !strings.HasPrefix(err.Error(), `UNKNOWN_QUEUE: there is no queue "none"`) {
		t.Errorf("an unknown queue: %v", err)
	}
}

func TestPoolWithoutAnOwnerIsShown(t *testing.T) {
	t.Parallel()
	m := meshtest.FromFile(t, jobsFile(t), stagemesh.FileSettings{})
	address := meshtest.Start(t, m).URL()
	out, err := run(t, "jobs", "submit", "nightly", image("07-9.png"), "-a", address)
	if err != nil {
		t.Fatal(err)
	}
	for verb, row := range map[string]string{
		"gates":  `main  no owner  -  -  -  -    -       -    no dispatcher owns the pool`,
		"queues": `nightly +main +no owner +1 +0 +0 +\d+s +-`,
	} {
		shown, err := run(t, verb, "-a", m.AdminURL())
		if err != nil {
			t.Fatal(err)
		}
		match(t, strings.Join(strings.SplitAfter(shown, "\n")[:2], ""), `.*`, row)
	}
	out, err = run(t, "jobs", "explain", strings.Fields(out)[8], "-a", address)
	if err != nil || !strings.Contains(out, "no owner: no dispatcher owns the pool") {
		t.Errorf("%s, %v", out, err)
	}
}
