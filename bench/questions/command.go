// Package questions measures a mesh of models, or of jobs, in processes that it starts. Its commands are
// `bench models` and `bench jobs`: each of their measurements is a question, and has named values,
// as many as it was repeated.
//
// The models are of the runner echo_models, so the time of a load is known, and all other
// time is the mesh's.
package questions

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
	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/internal/process"
)

// warmup precedes each load.
const warmup = time.Second

// measurement is one call of bench models or bench jobs.
type measurement struct {
	times    int
	duration time.Duration
	json     string
	// folder has the files of meshes.
	folder string
	report compare.Report
}

// ofModels are the measurements of bench models, by name.
var ofModels = map[string]func(*measurement, context.Context) error{
	"registered": (*measurement).registration, "loaded": (*measurement).throughput, "cold": (*measurement).cold,
	"hits": (*measurement).hits, "loads": (*measurement).loads, "unload": (*measurement).unload,
	"burst": (*measurement).burst, "drain": (*measurement).drain, "kill": (*measurement).kill,
}

// Goal is a bound of a value: the least, or else the most.
type Goal struct {
	Measurement, Value string
	AtLeast            bool
	Want               float64
	What               string
}

// ModelGoals are the goals of bench models.
func ModelGoals() []Goal {
	return []Goal{
		{"registered", "register", false, 20, "seconds to register 20,000 models from one file"},
		{"registered", "gateway", false, 1024, "bytes of a gateway's heap per registered model"},
		{"registered", "host", false, 1024, "bytes of a host's heap per registered model"},
		{"loaded", "few", true, 0.97, "answers per second of 20 loaded models with 20,000 registered over those with 20, 64 in flight"},
		{"loaded", "plain", true, 0.95, "answers per second of a loaded model over those of a plain stage, 64 in flight"},
		{"loaded", "plain P50", false, 1.1, "P50 of a loaded model over that of a plain stage, 1 in flight"},
		{"cold", "P50", false, 10, "ms until the first answer of a cold model less its load, P50"},
		{"cold", "P99", false, 50, "ms until the first answer of a cold model less its load, P99"},
		{"hits", "below LRU", false, 2, "percent points of the hit ratio below one LRU's: 20,000 models by Zipf 1.1, room for 1,000 on 3 hosts"},
		{"loads", "loads", false, 1.5, "P99 of loaded models during 20 loads per second over that without"},
		{"unload", "unload", false, 50, "ms until a load starts while the model that it evicted unloads for 2 s"},
		{"burst", "queue", false, 1.5, "longest load queue over the mean: 100 cold models at once, 3 hosts"},
		{"drain", "drain", false, 1.2, "P99 while 1 of 3 hosts with 300 models leaves over that without, 200 requests per second"},
		{"kill", "elsewhere", false, 1, "seconds until no new request goes to a killed host, 1 of 3"},
		{"kill", "last answer", false, 8, "seconds until the last answer to a request that went there"},
	}
}

// NewModels returns the command models. It starts this program's command part.
func NewModels() *cobra.Command { return newCommand("models", "a mesh of many models", ofModels) }

func newCommand(name, what string, all map[string]func(*measurement, context.Context) error) *cobra.Command {
	var m measurement
	names := strings.Join(slices.Sorted(maps.Keys(all)), ", ")
	cmd := &cobra.Command{
		Use:     name + " MEASUREMENT",
		Short:   "Measure " + what,
		Long:    "Measure " + what + ", in processes that it starts. A MEASUREMENT is one of " + names + ".",
		Example: "  bench " + name + " " + slices.Min(slices.Collect(maps.Keys(all))),
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
			if m.json != "" && m.json != "-" {
				return errors.New("--json: only - is supported; redirect the output to a file")
			}
			if m.folder, err = os.MkdirTemp("", "bench-"+name+"-"); err != nil {
				return err
			}
			defer func() { err = errors.Join(err, os.RemoveAll(m.folder)) }()
			m.report = compare.Report{Report: load.Report{Version: load.ReportVersion, Product: process.Version()}, Values: map[string][]float64{}}
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

// pairs makes runs in pairs, of which the first alternates, and adds the ratios of a figure.
func (m *measurement) pairs(value string, figure func(load.Run) float64, sides ...func() (load.Run, error)) error {
	for i := range m.times {
		var figures [2]float64
		for turn := range figures {
			side := (i + turn) % len(figures)
			run, err := sides[side]()
			if err != nil {
				return err
			}
			figures[side] = figure(run)
		}
		m.add(value, figures[0]/figures[1])
	}
	return nil
}

func throughput(r load.Run) float64 { return r.ThroughputPerS }
func p50(r load.Run) float64        { return r.Latency.P50MS }
func p99(r load.Run) float64        { return r.Latency.P99MS }
func inMS(d time.Duration) float64  { return float64(d) / float64(time.Millisecond) }
