package stagemesh

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/services/bench/load"
)

// loadFlags say how often is asked.
type loadFlags struct {
	concurrency []int
	rates       []float64
	arrivals    string
	maxInFlight int
	warmup      time.Duration
	duration    time.Duration
	requests    int64
	seed        uint64
}

// defaultDuration is that of a run without a number of requests.
const defaultDuration = 10 * time.Second

func (l *loadFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.IntSliceVar(&l.concurrency, "concurrency", []int{8}, "how many callers wait for their answers, and ask again; several for several runs")
	flags.Float64SliceVar(&l.rates, "rate", nil, "how many requests arrive a second, whoever waits; several for several runs")
	flags.StringVar(&l.arrivals, "arrivals", string(load.Constant), "how they arrive: constant, evenly spaced, or poisson, by chance")
	flags.IntVar(&l.maxInFlight, "max-in-flight", load.DefaultMaxInFlight, "how many of them may wait for their answers; those beyond are not sent, and counted")
	flags.DurationVar(&l.warmup, "warmup", 2*time.Second, "how long to ask before measuring begins")
	flags.DurationVar(&l.duration, "duration", 0, "how long to measure; 10s where there are no --requests")
	flags.Int64Var(&l.requests, "requests", 0, "how many requests to measure; as many as the duration has if 0")
	flags.Uint64Var(&l.seed, "seed", 1, "of arrivals by chance: the same number gives the same arrivals")
}

// settings returns a load for each run. Messages name the flags.
func (l loadFlags) settings() ([]load.Settings, error) {
	base := load.Settings{Warmup: l.warmup, Duration: l.duration, Requests: l.requests, Seed: l.seed, Fine: true}
	if base.Duration == 0 && base.Requests == 0 {
		base.Duration = defaultDuration
	}
	var out []load.Settings
	for _, rate := range l.rates {
		s := base
		s.Rate, s.Arrivals, s.MaxInFlight = rate, load.Arrivals(l.arrivals), l.maxInFlight
		out = append(out, s)
	}
	if len(l.rates) == 0 {
		for _, callers := range l.concurrency {
			s := base
			s.Concurrency = callers
			if callers < 1 {
				return nil, fmt.Errorf("--concurrency: %d is not between 1 and %d", callers, load.MaxConcurrency)
			}
			out = append(out, s)
		}
	}
	for _, s := range out {
		if err := s.Validate(); err != nil {
			return nil, flagged(err)
		}
	}
	return out, nil
}
