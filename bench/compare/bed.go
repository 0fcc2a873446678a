package compare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/bench/baseline"
	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// BedSettings describe the mesh to start.
type BedSettings struct {
	// File is the path of the mesh's file.
	File string
	// Program is the path of the program that runs the mesh's processes; empty means
	// that the mesh runs in this process.
	Program string
	// Arguments precede the process's.
	Arguments []string
	// Baseline is the pipeline, or stage:<name>, whose hops a baseline has. It runs
	// beside the mesh and in the same way; empty means none.
	Baseline string
	// Handler has a baseline without hops: a handler that returns its input.
	Handler bool
	// Durability is the baseline's; empty means the pipeline's own.
	Durability pipeline.Durability
	// Peer is the command of another server, which runs in the baseline's place; empty
	// means none. It prints its address and ends as a process of the mesh does.
	Peer []string
	// Logger may be nil: nothing is logged.
	Logger *slog.Logger
}

// Bed is a running mesh.
type Bed struct {
	url      string
	grpcURL  string
	baseline string
	stop     func() error
	// broker and hosts, which are in the order of their starts, belong to a mesh in processes.
	broker    string
	hosts     []*child
	startHost func(ctx context.Context, stage string) (*child, error)
}

// URL is the address of the mesh's gateway.
func (b *Bed) URL() string { return b.url }

// GRPCURL is the address of its port for gRPC alone.
func (b *Bed) GRPCURL() string { return b.grpcURL }

// BaselineURL is the address of the baseline or the peer; empty if there is none.
func (b *Bed) BaselineURL() string { return b.baseline }

// BrokerURL is the address of the broker of a mesh in processes.
func (b *Bed) BrokerURL() string { return b.broker }

// StopHost stops the first of the mesh's hosts, or kills it, and waits for its end.
func (b *Bed) StopHost(kill bool) error {
	first := b.hosts[0]
	b.hosts = b.hosts[1:]
	if !kill {
		return first.stop()
	}
	err := killGroup(first.cmd.Process)
	<-first.ended
	return err
}

// AddHost starts another host of a stage.
func (b *Bed) AddHost(ctx context.Context, stage string) error {
	host, err := b.startHost(ctx, stage)
	if err == nil {
		b.hosts = append(b.hosts, host)
	}
	return err
}

// Stop stops everything, and returns the errors that the mesh ended with.
func (b *Bed) Stop() error { return b.stop() }

// StartBed starts a mesh, and a peer, and returns when they are ready. The context is only
// for the start.
func StartBed(ctx context.Context, s BedSettings) (*Bed, error) {
	b, err := startMesh(ctx, s)
	if err != nil || len(s.Peer) == 0 {
		return b, err
	}
	peer, err := startChild(ctx, BedSettings{Program: s.Peer[0]}, "the peer", s.Peer[1:]...)
	if err != nil {
		return nil, errors.Join(err, b.Stop())
	}
	mesh := b.stop
	b.baseline, b.stop = peer.ready.URL, func() error { return errors.Join(peer.stop(), mesh()) }
	return b, nil
}

func startMesh(ctx context.Context, s BedSettings) (*Bed, error) {
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	f, err := load.LoadMesh(s.File)
	if err != nil {
		return nil, err
	}
	route, err := s.route(f)
	if err != nil {
		return nil, err
	}
	if s.Program != "" {
		return startProcesses(ctx, s, f, route)
	}
	settings := stagemesh.FileSettings{Logger: s.Logger, Version: process.Version()}
	flush, err := withTracing(ctx, f, &settings)
	if err != nil {
		return nil, err
	}
	m, err := stagemesh.FromFile(f, settings)
	if err != nil {
		return nil, errors.Join(err, flush())
	}
	stopMesh := func() error { return errors.Join(m.Stop(), flush()) }
	if err := m.Start(ctx); err != nil {
		return nil, errors.Join(err, flush())
	}
	b := &Bed{url: m.URL(), grpcURL: m.GRPCURL(), stop: stopMesh}
	if route == nil {
		return b, nil
	}
	url, stop, err := startBaseline(ctx, brokerOf(m), *route, f)
	b.baseline, b.stop = url, func() error { return errors.Join(stop(), stopMesh()) }
	if err != nil {
		return nil, errors.Join(err, b.stop())
	}
	return b, nil
}

// route returns the baseline's, nil without a baseline.
func (s BedSettings) route(f *meshfile.File) (*baseline.Route, error) {
	if s.Handler {
		out := baseline.NewRoute(nil, pipeline.Memory)
		return &out, nil
	}
	if s.Baseline == "" {
		return nil, nil
	}
	var stages []string
	durability := pipeline.Memory
	if stage, ok := strings.CutPrefix(s.Baseline, pipeline.StagePrefix); ok {
		stages = []string{stage}
	} else {
		all, err := f.Routes()
		if err != nil {
			return nil, err
		}
		for _, p := range all {
			if string(p.Name) == s.Baseline {
				durability = cmp.Or(p.Durability, durability)
				for _, step := range p.Steps {
					stages = append(stages, string(step.Stage))
				}
			}
		}
		if len(stages) == 0 {
			return nil, fmt.Errorf("%s: pipelines.%s: there is none", s.File, s.Baseline)
		}
	}
	for _, stage := range stages {
		if _, ok := f.Stages[stage]; !ok {
			return nil, fmt.Errorf("%s: stages.%s: there is none, so the baseline has no number of hosts", s.File, stage)
		}
	}
	out := baseline.NewRoute(stages, cmp.Or(s.Durability, durability))
	return &out, nil
}

// startBaseline starts the route's front and as many hosts of each stage as the mesh has.
// The stop function is never nil. It stops the hosts before the front.
func startBaseline(ctx context.Context, broker baseline.Broker, route baseline.Route, f *meshfile.File) (url string, stop func() error, err error) {
	var stops []func() error
	stop = func() error {
		var errs []error
		for i := len(stops) - 1; i >= 0; i-- {
			errs = append(errs, stops[i]())
		}
		return errors.Join(errs...)
	}
	front, err := baseline.StartFront(ctx, broker, route)
	if err != nil {
		return "", stop, err
	}
	stops = append(stops, front.Stop)
	for _, stage := range eachHost(f, route.StageNames()) {
		host, err := baseline.StartHost(ctx, broker, route, stage)
		if err != nil {
			return "", stop, err
		}
		stops = append(stops, host.Stop)
	}
	return front.URL(), stop, nil
}

// brokerOf returns the broker of a mesh in this process.
func brokerOf(m *stagemesh.Mesh) baseline.Broker {
	to := m.Broker()
	return baseline.Broker{URL: to.URL, Server: to.Server, Auth: to.Auth}
}

// eachHost returns the stages, each once per host.
func eachHost(f *meshfile.File, stages []string) []string {
	var out []string
	for _, stage := range stages {
		for range max(1, f.Stages[stage].Hosts) {
			out = append(out, stage)
		}
	}
	return out
}
