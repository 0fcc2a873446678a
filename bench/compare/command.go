package compare

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/bench/chart"
	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

const (
	defaultPairs = 5
	maxPairs     = 1000
)

// command is one call of bench run.
type command struct {
	flags     load.Flags
	mesh      string
	processes bool
	baseline  bool
	handler   bool
	peer      string
	plot      string
	pairs     int
	// trace is the share of requests that are traced, or untraced.
	trace float64
}

// untraced is the value of a mesh without tracing.
const untraced = -1

// NewCommand returns the command run. With --processes it starts this program's command
// part, which is NewPartCommand.
func NewCommand() *cobra.Command {
	var c command
	cmd := &cobra.Command{
		Use:   "run PIPELINE [FILE...]",
		Short: "Measure a pipeline of a mesh that it starts, alone or in pairs with the baseline",
		Long: "Run is `stagemesh bench` for a mesh that it starts itself: in this process, or in processes of its own. With\n" +
			"--baseline, the mesh alternates with a minimal implementation of the same hops, and the ratios are printed.",
		Example: "  bench run echo --payload 1KiB --mesh bench/echo3.yaml --processes --baseline --pairs 3 --concurrency 1,64,256",
		Args:    func(cmd *cobra.Command, args []string) error { return c.check(cmd, args) },
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := process.SignalContext(cmd.Context())
			defer stop()
			return c.run(ctx, cmd, args[0], args[1:])
		},
		SilenceErrors: true, SilenceUsage: true,
	}
	c.flags.Add(cmd.Flags())
	cmd.Flags().StringVar(&c.mesh, "mesh", "", "the file of the mesh to start")
	cmd.Flags().BoolVar(&c.processes, "processes", false, "start it as processes: one for broker and gateway, and one for each host of a stage")
	cmd.Flags().BoolVar(&c.baseline, "baseline", false, "measure the baseline too, in pairs with the mesh, and print the ratios")
	cmd.Flags().BoolVar(&c.handler, "handler", false, "measure a bare handler that returns its input in the baseline's place; for one stage or more that do")
	cmd.Flags().Float64Var(&c.trace, "trace", untraced, "trace that share of the requests, and discard their spans")
	cmd.Flags().StringVar(&c.peer, "peer", "", "measure the server that this command runs in the baseline's place; for --protocol http")
	cmd.Flags().StringVar(&c.plot, "plot", "", "draw the report as SVG to this file")
	cmd.Flags().IntVar(&c.pairs, "pairs", defaultPairs, "the number of pairs for each load")
	return cmd
}

func (c *command) check(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return errors.New("give a PIPELINE, and FILEs, --payload or --tensor")
	}
	switch err := c.flags.Check(cmd.Flags(), len(args)-1); {
	case err != nil:
		return err
	case c.trace != untraced && !(c.trace >= 0 && c.trace <= 1):
		return fmt.Errorf("--trace: %v is not a share from 0 to 1", c.trace)
	case c.mesh == "":
		return errors.New("--mesh: name the file of the mesh to start; stagemesh bench measures a running one")
	case c.baseline && (c.peer != "" || c.handler), c.handler && c.peer != "":
		return errors.New("--handler and --peer: take the place of --baseline; give one of them")
	case cmd.Flags().Changed("pairs") && !c.paired():
		return errors.New("--pairs: is for --baseline, --handler and --peer")
	case c.pairs < 1 || c.pairs > maxPairs:
		return fmt.Errorf("--pairs: %d is not between 1 and %d", c.pairs, maxPairs)
	}
	return nil
}

// paired is true if the mesh alternates with something.
func (c *command) paired() bool { return c.baseline || c.handler || c.peer != "" }

// checkBaseline returns an error for requests that the baseline, or the handler in its place,
// does not serve.
func (c *command) checkBaseline(s load.ClientSettings) error {
	switch {
	case s.Protocol != load.GRPC && s.Protocol != load.Connect && (s.Protocol != load.HTTP || c.baseline):
		return fmt.Errorf("--protocol: the baseline serves grpc and connect, and a handler http, not %s", s.Protocol)
	case s.Streams:
		return errors.New("--streams: the baseline does not answer in chunks")
	case len(s.Inputs[0]) > 1:
		return errors.New("--tensor: the baseline takes one input")
	}
	return nil
}

func (c *command) run(ctx context.Context, cmd *cobra.Command, name string, files []string) error {
	inputs := make([][]payload.Part, len(files))
	for i, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		inputs[i] = []payload.Part{payload.OfBlob("", http.DetectContentType(data), data)}
	}
	if c.plot != "" { // a wrong path fails before the measurement
		if err := os.WriteFile(c.plot, nil, 0o644); err != nil {
			return fmt.Errorf("--plot: %w", err)
		}
	}
	m := measurement{command: c}
	err := c.flags.Execute(cmd, name, inputs, func(session *load.Session) (any, func(io.Writer) error, error) {
		if err := c.checkBaseline(session.Client); (c.baseline || c.handler) && err != nil {
			return nil, nil, err
		}
		if c.peer != "" && session.Client.Protocol != load.HTTP {
			return nil, nil, errors.New("--peer: is for --protocol http")
		}
		m.session = session
		err := m.measure(ctx)
		m.report.Report = session.Report
		return m.report, func(w io.Writer) error { return WriteText(w, m.report) }, err
	})
	if c.plot != "" && len(m.report.Runs) > 0 {
		err = errors.Join(err, chart.WriteFile(c.plot, m.report.Report))
	}
	return err
}

// measurement is the work of one command.
type measurement struct {
	command *command
	session *load.Session
	// report lacks the session's.
	report Report
}

// measure starts the mesh, makes the runs, and stops the mesh.
func (m *measurement) measure(ctx context.Context) (err error) {
	c, client := m.command, &m.session.Client
	settings := BedSettings{File: c.mesh, Handler: c.handler, Peer: strings.Fields(c.peer)}
	if c.baseline {
		settings.Baseline, settings.Durability = client.Pipeline, client.Durability
	}
	subject := &m.session.Report.Subject
	subject.Place, subject.File = load.InProcess, c.mesh
	if c.processes {
		subject.Place, settings.Arguments = load.Processes, []string{PartName}
		if settings.Program, err = os.Executable(); err != nil {
			return fmt.Errorf("--processes: %w", err)
		}
	}
	if c.trace >= 0 {
		stop, err := traceToSink(ctx, c.trace)
		if err != nil {
			return fmt.Errorf("--trace: %w", err)
		}
		defer stop()
	}
	started, err := StartBed(ctx, settings)
	if err != nil {
		return err
	}
	return errors.Join(m.measureOn(ctx, started), started.Stop())
}

func (m *measurement) measureOn(ctx context.Context, on *Bed) error {
	address := on.URL()
	if m.session.Client.Protocol == load.GRPC {
		address = on.GRPCURL()
	}
	mesh, err := m.connect(ctx, address)
	if err != nil {
		return err
	}
	defer mesh.Close()
	if !m.command.paired() {
		return m.session.RunAll(ctx, mesh.Do)
	}
	m.report.Handler, m.report.Peer = m.command.handler, m.command.peer
	baseline, err := m.connect(ctx, on.BaselineURL())
	if err != nil {
		return fmt.Errorf("the %s: %w", m.report.other(), err)
	}
	defer baseline.Close()
	for i, load := range m.session.Loads {
		of := fmt.Sprintf("%d of %d", i+1, len(m.session.Loads))
		if err := m.pairs(ctx, mesh.Do, baseline.Do, load, of); err != nil || ctx.Err() != nil {
			return err // the report has what was measured
		}
	}
	return nil
}

// connect returns a client of the address, which has had its first answer.
func (m *measurement) connect(ctx context.Context, address string) (*load.Client, error) {
	settings := m.session.Client
	settings.Address = address
	client, err := load.NewClient(settings)
	if err != nil {
		return nil, err
	}
	if err := m.session.Try(ctx, client.Do); err != nil {
		client.Close()
		return nil, err
	}
	return client, nil
}

// pairs measures one load in pairs and adds them to the report.
func (m *measurement) pairs(ctx context.Context, mesh, baseline load.Target, one load.Settings, of string) error {
	var ofMesh, ofBaseline []load.Run
	err := func() error {
		for pair := range m.command.pairs {
			for turn := range 2 {
				target, into, name := mesh, &ofMesh, "mesh"
				if turn != pair%2 {
					target, into, name = baseline, &ofBaseline, m.report.other()
				}
				run, err := m.session.Run(ctx, target, one, fmt.Sprintf("%s, pair %d of %d, %s", of, pair+1, m.command.pairs, name))
				if err != nil || run.Interrupted {
					return err // an incomplete run is not compared
				}
				*into = append(*into, run)
			}
		}
		return nil
	}()
	if comparison, median := Compare(ofMesh, ofBaseline); median >= 0 {
		m.report.Comparisons = append(m.report.Comparisons, comparison)
		m.report.Baseline = append(m.report.Baseline, ofBaseline[median])
		m.session.Report.Runs = append(m.session.Report.Runs, ofMesh[median])
	}
	return err
}
