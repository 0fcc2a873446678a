// Package stagemain is what the programs of single stages share: each takes its
// stage from the file of the mesh, joins the mesh at its broker, and serves the
// stage until it is told to stop.
//
//	func main() {
//		program := stagemain.Program{
//			Name: "imagedecode", Short: "Serve a stage that decodes images", Stage: "decode",
//			Kinds: []meshfile.Kind{meshfile.KindOf("image_decode", imagedecode.New)},
//		}
//		if err := stagemain.New(program).ExecuteContext(context.Background()); err != nil {
//			fmt.Fprintln(os.Stderr, program.Name+":", err)
//			os.Exit(1)
//		}
//	}
//
// SIGINT and SIGTERM ask it to drain: it finishes what it holds and ends
// without an error. A second one has it give back what it holds, a third ends the
// process at once.
package stagemain

import (
	"context"
	"fmt"
	"io"
	"net"

	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/program"
	"github.com/stagemesh/stagemesh/services/registry"
	"github.com/stagemesh/stagemesh/stagehost"
)

// Program is one program that serves stages of some kinds.
type Program struct {
	Name  string
	Short string
	// Stage is a stage's name for the example in its help.
	Stage string
	Kinds []meshfile.Kind
}

// New returns the program's command.
func New(p Program) *cobra.Command {
	var f flags
	cmd := program.Command(&cobra.Command{
		Use:   p.Name,
		Short: p.Short,
		Long: p.Short + ", as the file of its mesh describes it.\n\n" +
			"--stage is required. The stage's runner, batching, queue and address, and nats.url, are the file's; flags go before it.\n" +
			"The process is one host of the stage, whatever the file says about hosts: start as many as you need.",
		Example: "  " + p.Name + " --config mesh.yaml --stage " + p.Stage + " --nats nats://127.0.0.1:4222 --ops 127.0.0.1:9091",
	}, func(ctx context.Context, out, errOut io.Writer) error { return p.run(ctx, f, out, errOut) })
	f.add(cmd)
	return cmd
}

// run serves the stage until the context ends.
func (p Program) run(ctx context.Context, f flags, out, errOut io.Writer) error {
	log, err := f.Log.Logger(errOut)
	if err != nil {
		return err
	}
	settings, known, err := f.settings(p.Kinds)
	if err != nil {
		return err
	}
	settings.Version, settings.Logger = process.Version(), log
	return program.Run(ctx, program.Settings{Ops: f.Ops, Broker: settings.Bus.URL, Registry: known, Logger: log},
		func(meter metric.Meter, known *registry.Registry) (program.Part, error) {
			settings.Meter, settings.Registry = meter, known.Host()
			return stagehost.New(settings)
		},
		func(operations net.Addr) error {
			_, err := fmt.Fprintf(out, "stage %s of mesh %s is ready on host %s (operations: http://%s)\n",
				settings.Stage, settings.Mesh, settings.Host, operations)
			return err
		})
}
