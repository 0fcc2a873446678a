package stagemesh

import (
	"context"
	"fmt"

	"github.com/stagemesh/stagemesh/services/bench/load"
	"github.com/stagemesh/stagemesh/services/bench/report"
	"github.com/stagemesh/stagemesh/services/bench/target"
)

// How many pairs are measured of a load.
const (
	defaultPairs = 5
	maxPairs     = 1000
)

// compare asks mesh and baseline in turns, for each load, until the context ends.
func (b *bench) compare(ctx context.Context, mesh *target.Target, address string, r *report.Report) error {
	bare, err := b.reach(address)
	if err != nil {
		return err
	}
	defer bare.Close()
	if err := b.try(ctx, bare); err != nil {
		return fmt.Errorf("the baseline: %w", err)
	}
	for i, settings := range b.loads {
		p := pairing{bench: b, mesh: mesh, baseline: bare, settings: settings, shared: r.Subject.Place == report.InProcess}
		err := p.measure(ctx, fmt.Sprintf("%d of %d", i+1, len(b.loads)))
		p.into(r)
		if err != nil || ctx.Err() != nil {
			return err // what was measured until then is told
		}
	}
	return nil
}

// pairing measures one load in pairs.
type pairing struct {
	bench          *bench
	mesh, baseline load.Target
	settings       load.Settings
	shared         bool

	ofMesh, ofBaseline []report.Run
}

// measure makes the pairs. Which of the two goes first changes from pair to pair, so that
// neither has the better place.
func (p *pairing) measure(ctx context.Context, which string) error {
	for pair := range p.bench.flags.pairs {
		for turn := range 2 {
			target, into, name := p.mesh, &p.ofMesh, "mesh"
			if turn != pair%2 {
				target, into, name = p.baseline, &p.ofBaseline, "baseline"
			}
			run, err := p.bench.run(ctx, target, p.settings, fmt.Sprintf("%s, pair %d of %d, %s", which, pair+1, p.bench.flags.pairs, name), p.shared)
			if err != nil || run.Interrupted {
				return err // half a run is not compared
			}
			*into = append(*into, run)
		}
	}
	return nil
}

// into adds what was measured to the report.
func (p *pairing) into(r *report.Report) {
	comparison, median := report.Compare(p.ofMesh, p.ofBaseline)
	if median < 0 {
		return
	}
	r.Comparisons = append(r.Comparisons, comparison)
	r.Runs, r.Baseline = append(r.Runs, p.ofMesh[median]), append(r.Baseline, p.ofBaseline[median])
}
