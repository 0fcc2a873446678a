package cli

import (
	"context"
	"errors"
	"io"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// benchCommand is one call of stagemesh bench.
type benchCommand struct {
	gateway port
	flags   load.Flags
	mesh    string
}

func newBench() *cobra.Command {
	var b benchCommand
	cmd := &cobra.Command{
		Use:   "bench PIPELINE [FILE...]",
		Short: "Load-test a pipeline and report throughput, latency and where time is spent",
		Long: "Bench measures a pipeline of a running mesh, or of the mesh that --mesh starts, and prints throughput, latencies,\n" +
			"where the time went, batches and failures. Requests send the FILEs in turn, or generated input.\n\n" +
			"With --concurrency, each caller waits for its answer before it sends again. With --rate, requests arrive whatever\n" +
			"becomes of earlier ones, and latency counts from their planned time. Several values make several runs. Ctrl-C ends\n" +
			"the run and prints what was measured.",
		Example: "  stagemesh bench digits examples/digits/images/*.png\n" +
			"  stagemesh bench digits image.png --rate 100,200,400 --arrivals poisson --deadline 20ms\n" +
			"  stagemesh bench stage:classify --tensor FP32[1,64] --concurrency 1,8,64 --json digits.json\n" +
			"  stagemesh bench digits image.png --mesh examples/digits/mesh.yaml",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usageError(cmd, errors.New("give a PIPELINE, and FILEs, --payload or --tensor"))
			}
			err := b.flags.Check(cmd.Flags(), len(args)-1)
			if cmd.Flags().Changed("mesh") && cmd.Flags().Changed("address") {
				err = errors.New("--address: is for a running mesh, and --mesh starts one; give one of them")
			}
			if err != nil {
				return usageError(cmd, err)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := process.SignalContext(cmd.Context())
			defer stop()
			return b.run(ctx, cmd, args[0], args[1:])
		},
	}
	b.gateway.addPublic(cmd)
	b.flags.Add(cmd.Flags())
	cmd.Flags().StringVar(&b.mesh, "mesh", "", "start the mesh of this file in this process, instead of using the one at --address")
	return cmd
}

func (b *benchCommand) run(ctx context.Context, cmd *cobra.Command, name string, files []string) error {
	inputs := make([][]payload.Part, len(files))
	for i, file := range files {
		data, err := readInput(file, cmd.InOrStdin())
		if err != nil {
			return err
		}
		inputs[i] = []payload.Part{payload.OfBlob("", contentType(file, data), data)}
	}
	return b.flags.Execute(cmd, name, inputs, func(session *load.Session) (any, func(io.Writer) error, error) {
		err := b.measure(ctx, session)
		return session.Report, func(w io.Writer) error { return load.WriteText(w, session.Report) }, err
	})
}

// measure makes the runs, against a running mesh or one of its own.
func (b *benchCommand) measure(ctx context.Context, session *load.Session) (err error) {
	subject := &session.Report.Subject
	if b.mesh == "" {
		subject.Place = load.Elsewhere
		if err := b.gateway.complete(); err != nil {
			return err
		}
		if session.Client.Address, err = b.gateway.url(); err != nil {
			return err
		}
		subject.Address = redact(session.Client.Address)
		return b.measureAt(ctx, session)
	}
	subject.Place, subject.File = load.InProcess, b.mesh
	file, err := load.LoadMesh(b.mesh)
	if err != nil {
		return err
	}
	mesh, err := stagemesh.FromFile(file, stagemesh.FileSettings{Version: process.Version()})
	if err != nil {
		return err
	}
	if err := mesh.Start(ctx); err != nil {
		return err
	}
	session.Client.Address = mesh.URL()
	if session.Client.Protocol == load.GRPC {
		session.Client.Address = mesh.GRPCURL()
	}
	return errors.Join(b.measureAt(ctx, session), mesh.Stop())
}

// measureAt makes the runs at the client's address.
func (b *benchCommand) measureAt(ctx context.Context, session *load.Session) error {
	var err error
	if session.Client.Token, err = b.gateway.token(); err != nil {
		return err
	}
	transport, err := b.gateway.transport()
	if err != nil {
		return err
	}
	session.Client.TLS = transport.TLSClientConfig
	client, err := load.NewClient(session.Client)
	if err != nil {
		return err
	}
	defer client.Close()
	if err := session.Try(ctx, client.Do); err != nil {
		return b.gateway.advise(session.Client.Address, err)
	}
	return session.RunAll(ctx, client.Do)
}
