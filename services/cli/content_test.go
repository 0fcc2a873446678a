package cli_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/jobs/dispatch"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

func TestFilesHaveParametersAndAContentType(t *testing.T) {
	t.Parallel()
	m, err := stagemesh.New(stagemesh.Settings{
		Gateway:    gateway.Settings{Config: gateway.Config{Listen: "127.0.0.1:0"}},
		Dispatcher: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	told := func(_ context.Context, item runner.Item) ([]payload.Part, error) {
		text := fmt.Sprintf("%s %v", item.Inputs[0].Blob.ContentType, item.Parameters)
		return []payload.Part{payload.OfBlob("", "text/plain", []byte(text))}, nil
	}
	if err := m.AddStage(stagemesh.Stage{Name: "told", Runner: inproc.Each(inproc.Settings{}, told)}); err != nil {
		t.Fatal(err)
	}
	if err := m.AddPipeline(stagemesh.Pipeline{Name: "told", Steps: []stagemesh.Step{{Name: "told", Stage: "told"}}}); err != nil {
		t.Fatal(err)
	}
	jobs := dispatch.Config{Pools: map[string]dispatch.PoolConfig{"main": {Target: dispatch.TargetConfig{Pipelines: []string{"told"}}}}, Queues: map[string]dispatch.QueueConfig{"nightly": {}}}
	address := meshtest.Start(t, m).URL()
	if err := m.SetJobs(jobs); err != nil {
		t.Fatal(err)
	}
	file := testbed.SecretFile(t, "hello")
	for _, args := range [][]string{{"infer", "told", file}, {"jobs", "submit", "nightly", file, "--wait"}} {
		out, err := run(t, append(args, "-a", address, "--content-type", "text/x-ours", "--parameter", "deep=true", "--parameter", `to=say "a=b,c=d"`)...)
		if err != nil || !strings.Contains(out, `text/x-ours map[deep:true to:say "a=b,c=d"]`) {
			t.Errorf("%v: got %s, %v", args, out, err)
		}
	}
	for _, flag := range []string{"--parameter=k=3", "--pipeline=told"} {
		if _, err := run(t, "jobs", "submit", "nightly", file, "--path", "/x", flag, "-a", address); err == nil || !strings.HasPrefix(err.Error(), "--pipeline and --parameter are ") {
			t.Errorf("for a target over HTTP: %v", err)
		}
	}
}

// What has been answered is printed although the rest is not sent.
func TestInferThatIsStoppedPrintsItsAnswers(t *testing.T) {
	t.Parallel()
	m, err := stagemesh.New(stagemesh.Settings{Gateway: gateway.Settings{Config: gateway.Config{Listen: "127.0.0.1:0"}}})
	if err != nil {
		t.Fatal(err)
	}
	hangs := make(chan struct{})
	answer := func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
		if string(item.Inputs[0].Blob.Data) == "hang" {
			close(hangs)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return item.Inputs, nil
	}
	if err := m.AddStage(stagemesh.Stage{Name: "a", Runner: inproc.Each(inproc.Settings{}, answer)}); err != nil {
		t.Fatal(err)
	}
	meshtest.Start(t, m)
	p := start(t, "infer", "stage:a", testbed.SecretFile(t, "hello"), testbed.SecretFile(t, "hang"), testbed.SecretFile(t, "never"), "-a", m.URL())
	testbed.Receive(t, "the second request runs", hangs)
	if err := p.end(t); err == nil || err.Error() != "stopped by a signal after 1 of 3 files" {
		t.Errorf("it ended with %v", err)
	}
	if !p.out.Has("hello") || p.out.Has("hang") {
		t.Errorf("it printed %s", p.out.String())
	}
}
