package bed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/bench/baseline"
	"github.com/stagemesh/stagemesh/services/meshfile"
)

// route returns that of the baseline, nil where there is to be none.
func (s Settings) route(f *meshfile.File) (*baseline.Route, error) {
	if s.Baseline == "" {
		return nil, nil
	}
	if stage, ok := strings.CutPrefix(s.Baseline, pipeline.StagePrefix); ok {
		return s.routeOver(f, pipeline.Memory, stage)
	}
	all, err := f.Routes()
	if err != nil {
		return nil, err
	}
	for _, p := range all {
		if string(p.Name) == s.Baseline {
			return s.routeOver(f, p.Durability, stagesOf(p)...)
		}
	}
	return nil, fmt.Errorf("%s: pipelines.%s: there is none", s.File, s.Baseline)
}

func (s Settings) routeOver(f *meshfile.File, d pipeline.Durability, stages ...string) (*baseline.Route, error) {
	for _, stage := range stages {
		if _, ok := f.Stages[stage]; !ok {
			return nil, fmt.Errorf("%s: stages.%s: there is none, so that a baseline cannot have its hosts", s.File, stage)
		}
	}
	out := baseline.NewRoute(stages, cmp.Or(s.Durability, d, pipeline.Memory))
	return &out, nil
}

func stagesOf(p pipeline.Pipeline) []string {
	out := make([]string, len(p.Steps))
	for i, step := range p.Steps {
		out[i] = string(step.Stage)
	}
	return out
}

// beside is a baseline in this process.
type beside struct {
	front *baseline.Front
	hosts []*baseline.Host
}

// startBaseline starts the route's front, and for each of its stages as many hosts as
// the mesh has.
func startBaseline(ctx context.Context, broker baseline.Broker, route baseline.Route, f *meshfile.File) (b beside, err error) {
	if b.front, err = baseline.StartFront(ctx, broker, route); err != nil {
		return b, err
	}
	for _, stage := range hostsOf(f, route.StageNames()) {
		host, err := baseline.StartHost(ctx, broker, route, stage)
		if err != nil {
			return b, errors.Join(err, b.stop())
		}
		b.hosts = append(b.hosts, host)
	}
	return b, nil
}

// stop stops the hosts before what they answer to.
func (b beside) stop() error {
	var errs []error
	for _, host := range b.hosts {
		errs = append(errs, host.Stop())
	}
	return errors.Join(append(errs, b.front.Stop())...)
}

// brokerOf returns the broker of a mesh that runs in this process.
func brokerOf(m *stagemesh.Mesh) baseline.Broker {
	to := m.Broker()
	return baseline.Broker{URL: to.URL, Server: to.Server, Auth: to.Auth}
}

// hostsOf returns the stages, each as often as it has hosts.
func hostsOf(f *meshfile.File, stages []string) []string {
	var out []string
	for _, stage := range stages {
		for range max(1, f.Stages[stage].Hosts) {
			out = append(out, stage)
		}
	}
	return out
}
