package bed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/bench/baseline"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/bench"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost"
)

// CommandName is the name of the command that runs a process of the mesh.
const CommandName = "part"

// The flags of the command.
const (
	fileFlag     = "mesh"
	stageFlag    = "stage"
	brokerFlag   = "nats"
	baselineFlag = "baseline"
)

// NewCommand returns the command that runs a process of the mesh. It is for Start alone.
func NewCommand() *cobra.Command {
	var p part
	cmd := &cobra.Command{
		Use: CommandName, Hidden: true, Args: cobra.NoArgs, SilenceErrors: true, SilenceUsage: true,
		Short: "Run a process of the measured mesh until standard input ends",
	}
	cmd.Flags().StringVar(&p.file, fileFlag, "", "the mesh's file")
	cmd.Flags().StringVar(&p.stage, stageFlag, "", "the stage of the host; broker and gateway if empty")
	cmd.Flags().StringVar(&p.broker, brokerFlag, "", "the broker of a host")
	cmd.Flags().StringVar(&p.baseline, baselineFlag, "", "the route of a baseline, as JSON; none if empty")
	log := program.AddLog(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if p.logger, err = log.Logger(cmd.ErrOrStderr()); err != nil {
			return err
		}
		ctx, stop := process.SignalContext(cmd.Context())
		defer stop()
		return p.run(ctx, cmd.InOrStdin(), cmd.OutOrStdout())
	}
	return cmd
}

// part is the part of the mesh in one process: broker and gateway, or a host; or a host
// of the baseline.
type part struct {
	file string
	// stage of the host; empty means broker and gateway.
	stage string
	// broker is the URL for a host.
	broker string
	// baseline is the baseline's route as JSON. With it, the baseline's front runs beside
	// the gateway, and a host is one of the baseline.
	baseline string
	logger   *slog.Logger
}

// readiness is the line of JSON of a process that is ready. Hosts have no addresses.
type readiness struct {
	Broker   string `json:"broker,omitempty"`
	URL      string `json:"url,omitempty"`
	Baseline string `json:"baseline,omitempty"`
}

func reportReady(out io.Writer, r readiness) error { return json.NewEncoder(out).Encode(r) }

// run runs the part until the input or the context ends.
func (p part) run(ctx context.Context, in io.Reader, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// It outlives run if the input does, and ends with the process.
	go func() {
		defer cancel()
		_, _ = io.Copy(io.Discard, in) // until its end
	}()
	var route *baseline.Route
	if p.baseline != "" {
		route = &baseline.Route{}
		if err := json.Unmarshal([]byte(p.baseline), route); err != nil {
			return fmt.Errorf("--%s: %w", baselineFlag, err)
		}
	}
	switch {
	case p.stage == "":
		return p.runFront(ctx, out, route)
	case route != nil:
		return p.runBaselineHost(ctx, out, *route)
	}
	return p.runHost(ctx, out)
}

// runFront runs broker and gateway, and the front of a route that is not nil.
func (p part) runFront(ctx context.Context, out io.Writer, route *baseline.Route) error {
	f, err := bench.LoadMesh(p.file)
	if err != nil {
		return err
	}
	if f.NATS.URL == "" {
		f.NATS.Listen = "127.0.0.1:0" // for the hosts
	}
	m, err := stagemesh.FromFile(f, stagemesh.FileSettings{Stages: []string{}, Logger: p.logger, Version: process.Version()})
	if err != nil {
		return err
	}
	if err := m.Start(ctx); err != nil {
		return err
	}
	return errors.Join(p.serveFront(ctx, out, m, route), m.Stop())
}

func (p part) serveFront(ctx context.Context, out io.Writer, m *stagemesh.Mesh, route *baseline.Route) error {
	ready := readiness{Broker: m.BrokerURL(), URL: m.URL()}
	stop := func() error { return nil }
	if route != nil {
		front, err := baseline.StartFront(ctx, brokerOf(m), *route)
		if err != nil {
			return err
		}
		ready.Baseline, stop = front.URL(), front.Stop
	}
	err := reportReady(out, ready)
	if err == nil {
		err = m.Wait(ctx)
	}
	return errors.Join(err, stop())
}

func (p part) runBaselineHost(ctx context.Context, out io.Writer, route baseline.Route) error {
	f, err := meshfile.ReadAt(p.file, p.broker, runners.All()...)
	if err != nil {
		return err
	}
	host, err := baseline.StartHost(ctx, baseline.Broker{URL: p.broker, Auth: f.NATS.Broker}, route, p.stage)
	if err != nil {
		return err
	}
	if err = reportReady(out, readiness{}); err == nil {
		<-ctx.Done()
	}
	return errors.Join(err, host.Stop())
}

func (p part) runHost(ctx context.Context, out io.Writer) error {
	f, err := meshfile.ReadAt(p.file, p.broker, runners.All()...)
	if err != nil {
		return err
	}
	bench.Separate(f)
	settings, err := f.Host(p.stage)
	if err != nil {
		return err
	}
	settings.Host, settings.Version, settings.Logger = pipeline.HostID(uuid.Must(uuid.NewV7()).String()), process.Version(), p.logger
	settings.Meter = noop.Meter{}
	known, err := meshfile.NewRegistry(f.Mesh, f.Registry, settings.Bus, p.logger)
	if err != nil {
		return err
	}
	settings.Registry = known.Host()
	h, err := stagehost.New(settings)
	if err != nil {
		return fmt.Errorf("stage %s: %w", p.stage, err)
	}
	return known.Around(ctx, func() error { return serve(ctx, h, out) })
}

// serve runs the host and reports when it is ready.
func serve(ctx context.Context, h *stagehost.Host, out io.Writer) error {
	group := process.New(slog.New(slog.DiscardHandler), process.Part{Name: "host", Run: h.Run, Ready: h.WaitReady})
	if err := group.Start(ctx); err != nil {
		return err
	}
	err := reportReady(out, readiness{})
	if err == nil {
		err = group.Wait(ctx)
	}
	if stopped := group.Stop(); err == nil {
		err = stopped
	}
	return err
}
