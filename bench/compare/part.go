package compare

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/bench/baseline"
	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/services/runners"
)

// PartName is the name of the command that runs a process of the mesh.
const PartName = "part"

// DispatcherFlag has the process of the gateway forward jobs.
const DispatcherFlag = "dispatcher"

// The flags of the command.
const (
	fileFlag     = "mesh"
	stageFlag    = "stage"
	brokerFlag   = "nats"
	baselineFlag = "baseline"
)

// part is the part of the mesh in one process.
type part struct {
	file string
	// stage of the host; empty means broker and gateway.
	stage string
	// broker is the URL for a host.
	broker string
	// baseline is the baseline's route as JSON. With it, the baseline's front runs beside
	// the gateway, and a host is one of the baseline.
	baseline string
	// dispatcher has the process of the gateway forward jobs.
	dispatcher bool
}

// NewPartCommand returns the command that runs a process of the mesh. It is for StartBed alone.
func NewPartCommand() *cobra.Command {
	var p part
	cmd := &cobra.Command{
		Use: PartName, Hidden: true, Args: cobra.NoArgs, SilenceErrors: true, SilenceUsage: true,
		Short: "Run a process of the measured mesh until standard input ends",
	}
	cmd.Flags().StringVar(&p.file, fileFlag, "", "the mesh's file")
	cmd.Flags().StringVar(&p.stage, stageFlag, "", "the stage of the host; broker and gateway if empty")
	cmd.Flags().StringVar(&p.broker, brokerFlag, "", "the broker of a host")
	cmd.Flags().StringVar(&p.baseline, baselineFlag, "", "the route of a baseline, as JSON; none if empty")
	cmd.Flags().BoolVar(&p.dispatcher, DispatcherFlag, false, "forward jobs beside the gateway")
	log := program.AddFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		logger, err := log.Apply(cmd.ErrOrStderr())
		if err != nil {
			return err
		}
		ctx, stop := process.SignalContext(cmd.Context())
		defer stop()
		return p.run(ctx, cmd.InOrStdin(), cmd.OutOrStdout(), stagemesh.FileSettings{Logger: logger, Version: process.Version()})
	}
	return cmd
}

// readiness is the line of JSON of a process that is ready. Hosts have no addresses.
type readiness struct {
	Broker   string `json:"broker,omitempty"`
	URL      string `json:"url,omitempty"`
	GRPC     string `json:"grpc,omitempty"`
	Baseline string `json:"baseline,omitempty"`
}

// run runs the part until the input or the context ends.
func (p part) run(ctx context.Context, in io.Reader, out io.Writer, settings stagemesh.FileSettings) error {
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
	if p.stage == "" {
		f, err := load.LoadMesh(p.file)
		if err != nil {
			return err
		}
		if f.NATS.URL == "" {
			f.NATS.Listen = "127.0.0.1:0" // for the hosts
		}
		settings.Stages, settings.Dispatcher = []string{}, p.dispatcher
		return runMesh(ctx, out, f, settings, route)
	}
	f, err := meshfile.Flags{Broker: p.broker}.Read(p.file, runners.All()...)
	if err != nil {
		return err
	}
	if route == nil {
		load.Separate(f)
		s := f.Stages[p.stage]
		s.Hosts = 1
		f.Stages[p.stage] = s
		settings.Stages, settings.NoGateway = []string{p.stage}, true
		return runMesh(ctx, out, f, settings, nil)
	}
	host, err := baseline.StartHost(ctx, baseline.Broker{URL: p.broker, Auth: f.NATS.Broker}, *route, p.stage)
	if err != nil {
		return err
	}
	if err = json.NewEncoder(out).Encode(readiness{}); err == nil {
		<-ctx.Done()
	}
	return errors.Join(err, host.Stop())
}

// runMesh runs a part of the mesh, and the baseline's front if there is a route.
func runMesh(ctx context.Context, out io.Writer, f *meshfile.File, settings stagemesh.FileSettings, route *baseline.Route) error {
	flush, err := withTracing(ctx, f, &settings)
	if err != nil {
		return err
	}
	m, err := stagemesh.FromFile(f, settings)
	if err != nil {
		return errors.Join(err, flush())
	}
	if err := m.Start(ctx); err != nil {
		return errors.Join(err, flush())
	}
	var ready readiness
	stop := func() error { return nil }
	if !settings.NoGateway {
		ready.Broker, ready.URL, ready.GRPC = m.BrokerURL(), m.URL(), m.GRPCURL()
	}
	if route != nil {
		front, err := baseline.StartFront(ctx, brokerOf(m), *route)
		if err != nil {
			return errors.Join(err, m.Stop())
		}
		ready.Baseline, stop = front.URL(), front.Stop
	}
	if err = json.NewEncoder(out).Encode(ready); err == nil {
		err = m.Wait(ctx)
	}
	return errors.Join(err, stop(), m.Stop(), flush())
}
