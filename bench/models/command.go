// Package models measures a mesh of models, in processes that it starts. Its command is
// `bench models`: each of its measurements is a question about many registered models, and has
// named values, as many as it was repeated.
//
// Models are those of the runner echo_models, so the time of a load is known, and all other
// time is the mesh's.
package models

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/bench"
)

// measurement is one call of bench models.
type measurement struct {
	times    int
	duration time.Duration
	json     string
	// folder has the files of meshes.
	folder string
	report compare.Report
}

// Names of the measurements.
const (
	Registered = "registered"
	Loaded     = "loaded"
	Cold       = "cold"
	Hits       = "hits"
	Loads      = "loads"
	Unload     = "unload"
	Burst      = "burst"
	Drain      = "drain"
	Kill       = "kill"
)

// Names of their values.
const (
	RegisterTime  = "seconds to register 20,000 models from one file"
	GatewayMemory = "bytes of a gateway's heap per registered model"
	HostMemory    = "bytes of a host's heap per registered model"
	ToPlain       = "answers per second of a loaded model over those of a plain stage, 64 in flight"
	P50ToPlain    = "P50 of a loaded model over that of a plain stage, 1 in flight"
	ToFew         = "answers per second of 20 loaded models with 20,000 registered over those with 20, 64 in flight"
	ColdP50       = "ms until the first answer of a cold model less its load, P50"
	ColdP99       = "ms until the first answer of a cold model less its load, P99"
	HitRatio      = "hit ratio of three hosts, 20,000 models by Zipf 1.1, room for 1,000"
	BelowLRU      = "percent points of the hit ratio below one LRU's"
	P99WithLoads  = "P99 of loaded models during 20 loads per second over that without"
	LoadBeside    = "ms until a load starts while the model that it evicted unloads for 2 s"
	LongestQueue  = "longest load queue over the mean, 100 cold models at once, 3 hosts"
	P99WithDrain  = "P99 while 1 of 3 hosts with 300 models leaves over that without, 200 requests per second"
	Elsewhere     = "seconds until no request goes to a killed host, 1 of 3"
	LastAnswer    = "seconds until the last answer to a request that did"
	Failed        = "failed requests"
)

// all are the measurements, by name.
var all = map[string]func(*measurement, context.Context) error{
	Registered: (*measurement).registered,
	Loaded:     (*measurement).loaded,
	Cold:       (*measurement).cold,
	Hits:       (*measurement).hits,
	Loads:      (*measurement).loads,
	Unload:     (*measurement).unload,
	Burst:      (*measurement).burst,
	Drain:      (*measurement).drain,
	Kill:       (*measurement).kill,
}

// NewCommand returns the command models. It starts this program's command part.
func NewCommand() *cobra.Command {
	var m measurement
	names := strings.Join(slices.Sorted(maps.Keys(all)), ", ")
	cmd := &cobra.Command{
		Use:     "models MEASUREMENT",
		Short:   "Measure a mesh of many models",
		Long:    "Measure a mesh of many models, in processes that it starts. A MEASUREMENT is one of " + names + ".",
		Example: "  bench models registered",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 || all[args[0]] == nil {
				return fmt.Errorf("give one of %s", names)
			}
			if m.times < 1 || m.duration <= 0 {
				return errors.New("--pairs and --duration: are above 0")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			ctx, stop := process.SignalContext(cmd.Context())
			defer stop()
			if m.folder, err = os.MkdirTemp("", "bench-models-"); err != nil {
				return err
			}
			defer func() { err = errors.Join(err, os.RemoveAll(m.folder)) }()
			m.report = compare.Report{Report: bench.Report{Version: bench.ReportVersion, Product: process.Version()}, Values: map[string][]float64{}}
			if err := all[args[0]](&m, ctx); err != nil {
				return err
			}
			return m.write(cmd.OutOrStdout())
		},
		SilenceErrors: true, SilenceUsage: true,
	}
	cmd.Flags().IntVar(&m.times, "pairs", 5, "the number of repetitions or pairs")
	cmd.Flags().DurationVar(&m.duration, "duration", 3*time.Second, "the length of each load")
	cmd.Flags().StringVar(&m.json, "json", "", "write a report in JSON if it is -")
	return cmd
}

func (m *measurement) write(out io.Writer) error {
	if m.json == "-" {
		return json.NewEncoder(out).Encode(m.report)
	}
	for _, name := range slices.Sorted(maps.Keys(m.report.Values)) {
		if _, err := fmt.Fprintf(out, "%s: %.4g of %.4g\n", name, compare.RatioOf(m.report.Values[name]).Median, m.report.Values[name]); err != nil {
			return err
		}
	}
	return nil
}

func (m *measurement) add(name string, value float64) {
	m.report.Values[name] = append(m.report.Values[name], value)
}

// pair makes two runs, of which the first alternates with the number of the pair.
func pair(number int, a, b func() (bench.Run, error)) (ofA, ofB bench.Run, err error) {
	if number%2 == 1 {
		ofB, ofA, err = pair(0, b, a)
		return ofA, ofB, err
	}
	if ofA, err = a(); err == nil {
		ofB, err = b()
	}
	return ofA, ofB, err
}
