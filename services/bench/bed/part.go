package bed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/bench/baseline"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost"
)

// Part says which part of a mesh a process is: the front, or a host; or a host of the
// baseline.
type Part struct {
	// File is the path of the mesh's file.
	File string
	// Stage that it is a host of; empty means the broker and the gateway.
	Stage string
	// Broker is the URL for a host to join.
	Broker string
	// Baseline, where not empty, is a route of the baseline as JSON: the front has that
	// of the baseline beside it, and a host is one of the baseline.
	Baseline string
	Logger   *slog.Logger
}

// announcement is what a process says when it is ready.
type announcement struct {
	// Broker is where hosts join, URL where callers ask, and Baseline where they ask
	// that; hosts have none of them.
	Broker   string `json:"broker,omitempty"`
	URL      string `json:"url,omitempty"`
	Baseline string `json:"baseline,omitempty"`
}

// Run runs the part until the input ends, or the context does. Out gets one line when
// it is ready.
func (p Part) Run(ctx context.Context, in io.Reader, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// It outlives Run where the input does, and ends with the process.
	go func() {
		defer cancel()
		_, _ = io.Copy(io.Discard, in) // its end is what is waited for
	}()
	var route *baseline.Route
	if p.Baseline != "" {
		route = &baseline.Route{}
		if err := json.Unmarshal([]byte(p.Baseline), route); err != nil {
			return fmt.Errorf("--%s: %w", BaselineFlag, err)
		}
	}
	switch {
	case p.Stage == "":
		return p.front(ctx, out, route)
	case route != nil:
		return p.baselineHost(ctx, out, *route)
	}
	return p.host(ctx, out)
}

func announce(out io.Writer, a announcement) error { return json.NewEncoder(out).Encode(a) }

// front runs the broker and the gateway, and the front of a route that is not nil.
func (p Part) front(ctx context.Context, out io.Writer, route *baseline.Route) error {
	f, err := read(p.File)
	if err != nil {
		return err
	}
	reachable(f)
	m, err := stagemesh.FromFile(f, stagemesh.FileSettings{Stages: []string{}, Logger: p.Logger, Version: process.Version()})
	if err != nil {
		return err
	}
	if err := m.Start(ctx); err != nil {
		return err
	}
	return errors.Join(p.serveFront(ctx, out, m, route), m.Stop())
}

// serveFront serves until the context ends.
func (p Part) serveFront(ctx context.Context, out io.Writer, m *stagemesh.Mesh, route *baseline.Route) error {
	said := announcement{Broker: m.BrokerURL(), URL: m.URL()}
	stop := func() error { return nil }
	if route != nil {
		front, err := baseline.StartFront(ctx, brokerOf(m), *route)
		if err != nil {
			return err
		}
		said.Baseline, stop = front.URL(), front.Stop
	}
	err := announce(out, said)
	if err == nil {
		err = m.Wait(ctx)
	}
	return errors.Join(err, stop())
}

// baselineHost runs one host of the baseline.
func (p Part) baselineHost(ctx context.Context, out io.Writer, route baseline.Route) error {
	f, err := meshfile.ReadAt(p.File, p.Broker, runners.All()...)
	if err != nil {
		return err
	}
	host, err := baseline.StartHost(ctx, baseline.Broker{URL: p.Broker, Auth: f.NATS.Broker}, route, p.Stage)
	if err != nil {
		return err
	}
	if err = announce(out, announcement{}); err == nil {
		<-ctx.Done()
	}
	return errors.Join(err, host.Stop())
}

// host runs one host of the stage.
func (p Part) host(ctx context.Context, out io.Writer) error {
	f, err := meshfile.ReadAt(p.File, p.Broker, runners.All()...)
	if err != nil {
		return err
	}
	apart(f)
	settings, err := f.Host(p.Stage)
	if err != nil {
		return err
	}
	settings.Host, settings.Version, settings.Logger = pipeline.HostID(uuid.Must(uuid.NewV7()).String()), process.Version(), p.Logger
	settings.Meter = noop.Meter{}
	known, err := meshfile.NewRegistry(f.Mesh, f.Registry, settings.Bus, p.Logger)
	if err != nil {
		return err
	}
	settings.Registry = known.Host()
	h, err := stagehost.New(settings)
	if err != nil {
		return fmt.Errorf("stage %s: %w", p.Stage, err)
	}
	return known.Around(ctx, func() error { return serve(ctx, h, out) })
}

// serve runs the host, and says once that it is ready.
func serve(ctx context.Context, h *stagehost.Host, out io.Writer) error {
	group := process.New(slog.New(slog.DiscardHandler), process.Part{Name: "host", Run: h.Run, Ready: h.WaitReady})
	if err := group.Start(ctx); err != nil {
		return err
	}
	err := announce(out, announcement{})
	if err == nil {
		err = group.Wait(ctx)
	}
	if stopped := group.Stop(); err == nil {
		err = stopped
	}
	return err
}
