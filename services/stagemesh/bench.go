package stagemesh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/bench/load"
	"github.com/stagemesh/stagemesh/services/bench/report"
	"github.com/stagemesh/stagemesh/services/bench/target"
)

// benchFlags are what the user said.
type benchFlags struct {
	address addressFlag
	loads   loadFlags
	sends   sendFlags

	mesh      string
	processes bool
	baseline  bool
	pairs     int
	deadline  time.Duration
	json      string
	plot      string
}

func newBench() *cobra.Command {
	var flags benchFlags
	bench := &cobra.Command{
		Use:   "bench PIPELINE [FILE...]",
		Short: "Load-test a pipeline and report throughput, latency and where time is spent",
		Long: "Bench asks a pipeline of a running mesh, or of one that it starts for the time with --mesh, and prints throughput,\n" +
			"latencies, where the time went, batches and failures. It sends the FILEs in turn, or what --payload or --tensor\n" +
			"generate.\n\n" +
			"With --concurrency so many callers each wait for their answer before they ask again. With --rate requests arrive\n" +
			"whatever becomes of those before, and are timed from the moment they were due. Several, with commas between them,\n" +
			"are run one after the other. Ctrl-C ends the run and prints what was measured.\n\n" +
			"With --baseline the least that could take the same hops is asked in turns with the mesh, and the ratios are printed.",
		Example: "  stagemesh bench digits examples/digits/images/*.png\n" +
			"  stagemesh bench digits image.png --rate 100,200,400 --arrivals poisson --deadline 20ms --plot digits.svg\n" +
			"  stagemesh bench stage:classify --tensor FP32[1,64] --concurrency 1,8,64 --json digits.json\n" +
			"  stagemesh bench digits image.png --mesh examples/digits/mesh.yaml --processes",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return misused(cmd, errors.New("give a PIPELINE, and FILEs, --payload or --tensor"))
			}
			return flags.check(cmd, args[1:])
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := process.SignalContext(cmd.Context())
			defer stop()
			return runBench(ctx, flags, args[0], args[1:], terminal{cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr()})
		},
	}
	flags.address.add(bench)
	flags.loads.add(bench)
	flags.sends.add(bench)
	bench.Flags().StringVar(&flags.mesh, "mesh", "", "start the mesh of this file for the time, instead of asking the one at --address")
	bench.Flags().BoolVar(&flags.processes, "processes", false, "start it as processes: one of broker and gateway, and one for each host of a stage")
	bench.Flags().BoolVar(&flags.baseline, "baseline", false, "ask a bare Connect handler and bare JetStream consumers too, in turns with the mesh, and print the ratios")
	bench.Flags().IntVar(&flags.pairs, "pairs", defaultPairs, "how many times mesh and baseline take turns for each load")
	bench.Flags().DurationVar(&flags.deadline, "deadline", 0, "count the answers within this time as goodput")
	bench.Flags().StringVar(&flags.json, "json", "", "write the report as JSON to this file; - is standard output, instead of the text")
	bench.Flags().StringVar(&flags.plot, "plot", "", "draw the report as SVG to this file")
	return bench
}

// terminal is what a command reads and writes.
type terminal struct {
	in          io.Reader
	out, errOut io.Writer
}

// check refuses what does not go together.
func (f benchFlags) check(cmd *cobra.Command, files []string) error {
	changed := func(name string) bool { return cmd.Flags().Changed(name) }
	var err error
	switch {
	case changed("rate") && changed("concurrency"):
		err = errors.New("--rate: is for callers who do not wait, and --concurrency for those who do; give one of them")
	case !changed("rate") && changed("arrivals"):
		err = errors.New("--arrivals: is for --rate")
	case !changed("rate") && changed("max-in-flight"):
		err = errors.New("--max-in-flight: is for --rate; callers who wait are as many as --concurrency")
	case changed("mesh") && changed("address"):
		err = errors.New("--address: is of a mesh that runs, and --mesh starts one; give one of them")
	case f.processes && !changed("mesh"):
		err = errors.New("--processes: is for a mesh that is started; name its file with --mesh")
	case f.baseline && !changed("mesh"):
		err = errors.New("--baseline: is for a mesh that is started, whose broker it shares; name its file with --mesh")
	case changed("pairs") && !f.baseline:
		err = errors.New("--pairs: is for --baseline")
	case f.pairs < 1 || f.pairs > maxPairs:
		err = fmt.Errorf("--pairs: %d is not between 1 and %d", f.pairs, maxPairs)
	case f.baseline:
		err = f.sends.checkBaseline()
	case f.deadline < 0:
		err = fmt.Errorf("--deadline: %s is negative", f.deadline)
	}
	if err == nil {
		err = f.sends.check(len(files))
	}
	if err != nil {
		return misused(cmd, err)
	}
	return nil
}

// errNoAnswer says that nothing was answered at all.
var errNoAnswer = errors.New("there was no answer at all; what failed is told above")

func runBench(ctx context.Context, flags benchFlags, name string, files []string, t terminal) error {
	loads, err := flags.loads.settings()
	if err != nil {
		return err
	}
	settings, err := flags.sends.settings(name, files, t.in)
	if err != nil {
		return err
	}
	out, err := flags.outputs(t.out)
	if err != nil {
		return err
	}
	defer out.close() //nolint:errcheck // it is closed below where that counts
	b := bench{flags: flags, loads: loads, target: settings, terminal: t}
	r, err := b.measure(ctx)
	if err != nil {
		return err
	}
	if err := errors.Join(out.write(r), out.close()); err != nil {
		return err
	}
	for _, run := range r.Runs {
		if run.Answered > 0 || run.Interrupted {
			return nil
		}
	}
	return errNoAnswer
}

// bench is one call of the command.
type bench struct {
	flags    benchFlags
	loads    []load.Settings
	target   target.Settings
	terminal terminal
}

// measure finds or starts the mesh, and makes the runs.
func (b *bench) measure(ctx context.Context) (report.Report, error) {
	r := report.Report{
		Version: report.Version, Product: process.Version(), Began: time.Now(), Machine: report.ThisMachine(),
		Subject: b.flags.sends.subject(b.target),
	}
	at, stop, err := b.mesh(ctx, &r.Subject)
	if err != nil {
		return r, err
	}
	err = b.ask(ctx, at, &r)
	return r, errors.Join(err, stop())
}

// ask makes the runs, one after the other, until the context ends.
func (b *bench) ask(ctx context.Context, at places, r *report.Report) error {
	t, err := b.reach(at.mesh)
	if err != nil {
		return err
	}
	defer t.Close()
	if err := b.try(ctx, t); err != nil {
		return b.flags.address.advise(at.mesh, err)
	}
	if at.baseline != "" {
		return b.compare(ctx, t, at.baseline, r)
	}
	for i, settings := range b.loads {
		run, err := b.run(ctx, t, settings, fmt.Sprintf("%d of %d", i+1, len(b.loads)), r.Subject.Place == report.InProcess)
		if err != nil {
			return err
		}
		r.Runs = append(r.Runs, run)
		if ctx.Err() != nil {
			return nil // what was measured until then is told
		}
	}
	return nil
}

// try makes one request, so that what would fail every time is told at once.
func (b *bench) try(ctx context.Context, t load.Target) error {
	err := t.Do(ctx, &load.Answer{})
	if failed, ok := errors.AsType[*load.Failure](err); ok && failed.Retryable {
		return nil
	}
	if err != nil {
		return fmt.Errorf("the first request failed: %w", err)
	}
	return nil
}

// run makes one run.
func (b *bench) run(ctx context.Context, t load.Target, s load.Settings, which string, shared bool) (report.Run, error) {
	recorder := report.NewRecorder(b.flags.deadline)
	meter := report.StartMeter(shared)
	defer meter.Stop()
	stop := showProgress(b.terminal.errOut, s, which, recorder)
	outcome, err := load.Run(ctx, s, t, recorder)
	stop()
	if err != nil {
		return report.Run{}, err
	}
	out := recorder.Run(s, outcome)
	meter.Into(&out)
	return out, nil
}
