package suite

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/internal/load"

	"github.com/stagemesh/stagemesh/bench/compare"
)

// Settings of a run of the suite.
type Settings struct {
	// Program is the path of bench, and Folder the folder of the mesh files.
	Program, Folder string
	Items           []Item
	// Quick marks the items as a trial.
	Quick bool
	// Log gets a line per command; it may be nil.
	Log io.Writer
}

// Run measures the items in order until one fails or the context ends. It returns the
// items before that with the error.
func Run(ctx context.Context, s Settings) (Results, error) {
	if s.Log == nil {
		s.Log = io.Discard
	}
	out := Results{Version: Version, Machine: thisMachine(), Versions: versionsOf(ctx, s.Program)}
	for _, item := range s.Items {
		m := measurement{settings: s, item: item, out: Measured{Number: item.Number, Began: time.Now().UTC().Truncate(time.Second), Quick: s.Quick}}
		fmt.Fprintf(s.Log, "item %d: %s (some %s)\n", item.Number, item.Title, item.Takes().Round(time.Second))
		if err := m.run(ctx); err != nil {
			return out, fmt.Errorf("item %d: %w", item.Number, err)
		}
		out.Versions.Stagemesh, m.out.Commit = m.product, m.product
		out.Items = append(out.Items, m.out)
	}
	return out, nil
}

// measurement is the measurement of one item.
type measurement struct {
	settings Settings
	item     Item
	out      Measured
	// product is the version of the program in its reports.
	product string
}

func (m *measurement) run(ctx context.Context) error {
	for _, round := range m.item.Rounds {
		commands, err := m.prepare(round.Commands)
		if err != nil {
			return err
		}
		for turn := range round.Times {
			if err := m.turn(ctx, commands, turn); err != nil {
				return err
			}
		}
	}
	return nil
}

// prepare returns the commands of a round with their rates, and adds their empty results.
func (m *measurement) prepare(commands []Command) ([]Command, error) {
	out := slices.Clone(commands)
	for i := range out {
		c := &out[i]
		if c.Share > 0 {
			most := m.out.answer(c.Peak).best()
			if most <= 0 {
				return nil, fmt.Errorf("%s: there is no peak %q", c.Name, c.Peak)
			}
			c.Rate = max(1, math.Round(most*c.Share))
		}
		m.out.Commands = append(m.out.Commands, Answer{Name: c.Name, Line: c.Line()})
	}
	return out, nil
}

// turn runs each command once, in reverse order every second time.
func (m *measurement) turn(ctx context.Context, commands []Command, turn int) error {
	order := slices.Clone(commands)
	if turn%2 == 1 {
		slices.Reverse(order)
	}
	for _, c := range order {
		fmt.Fprintf(m.settings.Log, "  %s\n", c.Line())
		got, err := measure(ctx, m.settings.Program, m.settings.Folder, c)
		if err != nil {
			return err
		}
		m.product = got.Product
		if err := m.add(c, got); err != nil {
			return fmt.Errorf("%s: %w", c.Line(), err)
		}
	}
	return nil
}

// add adds the report of a command.
func (m *measurement) add(c Command, got compare.Report) error {
	answer := &m.out.Commands[slices.IndexFunc(m.out.Commands, func(a Answer) bool { return a.Name == c.Name })]
	if c.Measure != "" {
		answer.Values = got.Values
		return nil
	}
	runs, comparisons := got.Runs, got.Comparisons
	if want := max(1, len(c.Concurrency)); len(runs) != want || c.Pairs > 0 && len(comparisons) != want {
		return fmt.Errorf("the report has %d runs and %d comparisons for %d loads", len(runs), len(comparisons), want)
	}
	for i, run := range runs {
		if i == len(answer.Loads) {
			answer.Loads = append(answer.Loads, Series{Load: run.Load})
		}
		series := &answer.Loads[i]
		series.Trials = append(series.Trials, trial(run))
		if c.Watched {
			series.Trials[len(series.Trials)-1].Samples = run.Measured()
		}
		if c.Pairs > 0 {
			series.Comparison = &comparisons[i]
		}
	}
	return nil
}

// trial returns the figures of a run that the page shows.
func trial(r load.Run) Trial {
	out := Trial{Figures: compare.FiguresOf(r), NotSent: r.NotSent}
	if r.Goodput != nil {
		out.Goodput = r.Goodput.PerS
	}
	if r.Refusals.Count > 0 {
		out.Refused, out.RefusalP50MS, out.RefusalP99MS = r.Refusals.Count, r.Refusals.P50MS, r.Refusals.P99MS
	}
	if len(r.Steps) > 0 {
		out.BatchSize = r.Steps[0].MeanBatch()
	}
	return out
}

// minRatio is the ratio of throughput below which something is broken. It is not a goal:
// it is below the ratios of busy machines (1.6x), which must not fail a build.
const minRatio = 1.0

// ErrSlow means that the mesh is far too slow.
var ErrSlow = errors.New("this is a regression, unless the machine was busy: run it again, and then make bench")

// Short measures one ratio in half a minute and prints it. It fails if the ratio is far
// too low.
func Short(ctx context.Context, program, folder string, out io.Writer) error {
	return short(ctx, shortCommand(), program, folder, out)
}

func shortCommand() Command {
	p := Full()
	p.Pairs = 3
	return p.comparePairs(p.echo("echo3.yaml", only, false, 64))[0].Commands[0]
}

// shortLimit bounds its duration, even on a very busy machine.
const shortLimit = 2 * time.Minute

func short(ctx context.Context, c Command, program, folder string, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, shortLimit)
	defer cancel()
	got, err := measure(ctx, program, folder, c)
	if err != nil {
		return err
	}
	if len(got.Comparisons) != 1 {
		return fmt.Errorf("%s: the report has no comparison", c.Line())
	}
	ratio := got.Comparisons[0].Throughput
	fmt.Fprintf(out, "three stages in one process, 64 in flight: %s of the baseline's answers per second, at least %s is required\n", formatSpread(ratio, times), times(minRatio))
	if ratio.Median < minRatio {
		return fmt.Errorf("%s: the mesh has %s of the baseline's throughput, and at least %s is required: %w", c.Line(), formatSpread(ratio, times), times(minRatio), ErrSlow)
	}
	return nil
}
