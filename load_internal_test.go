package stagemesh

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/internal/jobs/dispatch"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/runners"
)

func TestGatesKnowTheLoadOfStages(t *testing.T) {
	t.Parallel()
	f, err := meshfile.Parse("mesh.yaml", []byte(`
mesh: m
gateway: {listen: "127.0.0.1:0"}
stages: {slow: {runner: {sleep: {base: 1m}}, batch: {max_size: 1}, max_in_flight: 7, hosts: 2}}
pipelines: {p: {steps: [{name: s, stage: slow}]}}
`), "", runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	m, err := FromFile(f, FileSettings{})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var calls sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		calls.Wait()
		if err := m.Stop(); err != nil {
			t.Error(err)
		}
	})
	mesh := meshTarget{m.parts.Load().gateway}
	want := func(items int) {
		t.Helper()
		var got []dispatch.StageLoad
		testbed.Eventually(t, "the load of the stage", func() bool {
			got, err = mesh.stages(t.Context(), []string{"p"})
			return err == nil && len(got) == 1 && got[0].Name == "slow" && got[0].MaxInFlight == 14 && got[0].Items == items
		})
		if t.Failed() {
			t.Errorf("%+v, %v", got, err)
		}
	}
	want(0)
	if n, err := mesh.readyHosts("slow"); n != 2 || err != nil {
		t.Errorf("%d hosts, %v", n, err)
	}
	if n, err := mesh.readyHosts("fast"); n != 0 || err != nil {
		t.Errorf("%d hosts, %v", n, err)
	}
	for range 3 {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, m.URL()+"/v1/pipelines/p:infer", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		calls.Go(func() {
			if response, err := http.DefaultClient.Do(r); err == nil {
				t.Errorf("status %d", response.StatusCode)
				_ = response.Body.Close()
			}
		})
	}
	want(3)
}
