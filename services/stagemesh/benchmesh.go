package stagemesh

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/bench/bed"
	"github.com/stagemesh/stagemesh/services/bench/report"
	"github.com/stagemesh/stagemesh/services/bench/target"
)

// places are where is asked: for the mesh, and for the baseline where there is one.
type places struct{ mesh, baseline string }

// mesh returns where is asked, and what stops the mesh where it was started for that.
func (b *bench) mesh(ctx context.Context, s *report.Subject) (at places, stop func() error, err error) {
	if b.flags.mesh == "" {
		p := b.flags.address.portFlags
		at.mesh, err = baseURL("--"+p.flag, p.address, p.standard)
		s.Place, s.Address = report.Elsewhere, redacted(at.mesh)
		return at, func() error { return nil }, err
	}
	settings := bed.Settings{File: b.flags.mesh}
	if b.flags.baseline {
		settings.Baseline, settings.Durability = b.target.Pipeline, b.target.Durability
	}
	s.Place, s.File = report.InProcess, b.flags.mesh
	if b.flags.processes {
		s.Place, settings.Arguments = report.Processes, []string{partVerb}
		if settings.Program, err = os.Executable(); err != nil {
			return at, nil, fmt.Errorf("--processes: %w", err)
		}
	}
	started, err := bed.Start(ctx, settings)
	if err != nil {
		return at, nil, err
	}
	return places{started.URL(), started.BaselineURL()}, started.Stop, nil
}

// reach returns what asks at the address.
func (b *bench) reach(address string) (*target.Target, error) {
	p := b.flags.address.portFlags
	token, err := p.token()
	if err != nil {
		return nil, err
	}
	transport, err := p.transport()
	if err != nil {
		return nil, err
	}
	s := b.target
	s.Address, s.TLS = address, transport.TLSClientConfig
	if known, ok := token.(bearer); ok {
		s.Token = string(known)
	}
	for _, l := range b.loads {
		s.Connections = max(s.Connections, l.Concurrency, l.MaxInFlight)
	}
	return target.New(s)
}

// partVerb runs a part of a mesh for bench --processes.
const partVerb = "bench-part"

// newBenchPart is for bench alone, and is not shown.
func newBenchPart() *cobra.Command {
	var part bed.Part
	cmd := &cobra.Command{
		Use: partVerb, Hidden: true, Args: cobra.NoArgs,
		Short: "Run a part of the mesh that bench measures, until standard input ends",
	}
	cmd.Flags().StringVar(&part.File, bed.FileFlag, "", "the mesh's file")
	cmd.Flags().StringVar(&part.Stage, bed.StageFlag, "", "the stage to be a host of; the broker and the gateway if empty")
	cmd.Flags().StringVar(&part.Broker, bed.BrokerFlag, "", "the broker that a host joins")
	cmd.Flags().StringVar(&part.Baseline, bed.BaselineFlag, "", "the route of a baseline, as JSON; none if empty")
	log := program.AddLog(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if part.Logger, err = log.Logger(cmd.ErrOrStderr()); err != nil {
			return err
		}
		ctx, stop := process.SignalContext(cmd.Context())
		defer stop()
		return part.Run(ctx, cmd.InOrStdin(), cmd.OutOrStdout())
	}
	return cmd
}
