package suite

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/services/bench/report"
)

// Settings are those of a run of the suite.
type Settings struct {
	// Program is the path of stagemesh, and Folder has the mesh files.
	Program, Folder string
	Items           []Item
	// Quick says that the items are of that pace.
	Quick bool
	// Log gets a line for each command; nil is nobody.
	Log io.Writer
}

// Run measures the items, one after the other. It ends with the context, and with the
// first command that fails; what was measured before is returned with the error.
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
		out.Versions.Stagemesh = m.product
		out.Items = append(out.Items, m.out)
	}
	return out, nil
}

// measurement is an item that is measured.
type measurement struct {
	settings Settings
	item     Item
	out      Measured
	// product is the version of the program, as its reports say.
	product string
}

func (m *measurement) run(ctx context.Context) error {
	for _, round := range m.item.Rounds {
		commands, err := m.ready(round.Commands)
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

// ready returns the commands of a round with their rates, and makes room for what they
// come to.
func (m *measurement) ready(commands []Command) ([]Command, error) {
	out := slices.Clone(commands)
	for i := range out {
		c := &out[i]
		if c.Share > 0 {
			most := m.out.answer(c.Peak).most()
			if most <= 0 {
				return nil, fmt.Errorf("%s: there is no peak %q to take a share of", c.Name, c.Peak)
			}
			c.Rate = max(1, math.Round(most*c.Share))
		}
		m.out.Commands = append(m.out.Commands, Answer{Name: c.Name, Line: c.Line()})
	}
	return out, nil
}

// turn runs each command once, every second time from the last to the first.
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
		if err := m.keep(c, got); err != nil {
			return fmt.Errorf("%s: %w", c.Line(), err)
		}
	}
	return nil
}

// keep adds what a command came to.
func (m *measurement) keep(c Command, got report.Report) error {
	answer := &m.out.Commands[slices.IndexFunc(m.out.Commands, func(a Answer) bool { return a.Name == c.Name })]
	runs, comparisons := got.Runs, got.Comparisons
	if want := max(1, len(c.Concurrency)); len(runs) != want || c.Pairs > 0 && len(comparisons) != want {
		return fmt.Errorf("the report has %d runs and %d comparisons, and %d loads were asked for", len(runs), len(comparisons), want)
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

// trial returns what the page tells of a run.
func trial(r report.Run) Trial {
	out := Trial{Figures: r.Figures(), NotSent: r.NotSent}
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
