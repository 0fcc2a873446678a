package cli

import (
	"fmt"
	"net"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/program"
)

func newDispatcher() *cobra.Command {
	var f stagemesh.JoinFlags
	cmd := &cobra.Command{
		Use:   "dispatcher",
		Short: "Forward the jobs of a mesh",
		Long: "Forward the jobs of a mesh file's queues. The dispatcher joins the mesh at its broker; the gateways and stages are other\n" +
			"processes. Start as many dispatchers as you need: one owns a pool at a time, and another one takes over when it ends.\n" +
			"The first SIGINT or SIGTERM waits for the running jobs, a second one leaves them to the next dispatcher, a third ends the\nprocess at once.\n\n" + program.EnvironmentHelp,
		Example: "  stagemesh dispatcher --config mesh.yaml --nats nats://127.0.0.1:4222 --ops 127.0.0.1:9092",
		Args:    cobra.NoArgs,
		RunE: program.WithEnvironment(func(cmd *cobra.Command, _ []string) error {
			ctx, stop := process.SignalContext(cmd.Context())
			defer stop()
			p, err := f.Read(cmd)
			if err != nil {
				return err
			}
			if err := p.File.ValidatePart(nil); err != nil {
				return err
			}
			if len(p.File.Jobs.Queues) == 0 {
				p.Logger.Warn("the file has no jobs.queues; the jobs of queues that it had are ended")
			}
			p.Stages, p.NoPorts, p.Dispatcher = []string{}, true, true
			p.Ready = func(_ *stagemesh.Mesh, operations net.Addr) error {
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "dispatcher of mesh %s is ready (operations: http://%s)\n", p.File.Mesh, operations)
				return err
			}
			return p.Run(ctx)
		}),
	}
	f.Add(cmd)
	return cmd
}
