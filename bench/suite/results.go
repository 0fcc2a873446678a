package suite

import (
	"bufio"
	"context"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/internal/load"

	"github.com/stagemesh/stagemesh/bench/compare"
)

// Version is the version of the JSON form of Results. Added members do not change it.
const Version = 1

// Results are the figures of the suite, from which its page is made.
type Results struct {
	Version  int      `json:"version"`
	Machine  Machine  `json:"machine"`
	Versions Versions `json:"versions"`
	// Items are those that were measured, ordered by number.
	Items []Measured `json:"items"`
}

// Measured is the result of an item.
type Measured struct {
	Number Number    `json:"number"`
	Began  time.Time `json:"began"`
	// Commit is the version of the program, or the commit that recorded the figures.
	Commit string `json:"commit,omitempty"`
	// Quick marks a trial.
	Quick    bool     `json:"quick,omitempty"`
	Commands []Answer `json:"commands"`
}

// Answer is the result of a command, in all its repetitions.
type Answer struct {
	Name string `json:"name"`
	// Line is the command line.
	Line  string   `json:"line"`
	Loads []Series `json:"loads"`
	// Values has the values of a measurement without loads, by name.
	Values map[string][]float64 `json:"values,omitempty"`
}

// Series is the repetitions of one load.
type Series struct {
	Load load.Load `json:"load"`
	// Trials are the repetitions. With a baseline there is one, the mesh's run of the
	// median pair, and Comparison has all pairs.
	Trials     []Trial             `json:"trials"`
	Comparison *compare.Comparison `json:"comparison,omitempty"`
}

// Trial has the figures of one run that the page shows.
type Trial struct {
	compare.Figures
	NotSent int64 `json:"not_sent,omitempty"`
	// Goodput is the answers per second within the deadline, if there is one.
	Goodput float64 `json:"goodput_per_s,omitempty"`
	// Refused requests, which are among the failed ones, and their latency.
	Refused      int64   `json:"refused,omitempty"`
	RefusalP50MS float64 `json:"refusal_p50_ms,omitempty"`
	RefusalP99MS float64 `json:"refusal_p99_ms,omitempty"`
	// BatchSize is the mean number of items in a batch of the first step.
	BatchSize float64 `json:"batch_size,omitempty"`
	// Samples are of the generator's process since the warm-up.
	Samples []load.ProcessSample `json:"samples,omitempty"`
}

// Read reads results that Write wrote.
func Read(file string) (Results, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return Results{}, err
	}
	var out Results
	if err := json.Unmarshal(text, &out); err != nil {
		return Results{}, fmt.Errorf("%s: not results of the suite: %w", file, err)
	}
	if out.Version != Version {
		return Results{}, fmt.Errorf("%s: the results have version %d, and this program reads %d; measure again", file, out.Version, Version)
	}
	return out, nil
}

// Write writes the results to a file, for Read.
func (r Results) Write(file string) error {
	text, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}

// ErrMachine means that results of two machines cannot be combined.
var ErrMachine = errors.New("the existing results are from another machine; measure the whole suite, or name another file with --results")

// With returns later results together with the items that they lack.
func (r Results) With(later Results) (Results, error) {
	if len(r.Items) > 0 && r.Machine != later.Machine {
		return Results{}, ErrMachine
	}
	out := later
	for _, item := range r.Items {
		if _, again := later.Item(item.Number); !again {
			out.Items = append(out.Items, item)
		}
	}
	slices.SortFunc(out.Items, func(a, b Measured) int { return int(a.Number - b.Number) })
	return out, nil
}

// Item returns the result of an item, if it was measured.
func (r Results) Item(n Number) (Measured, bool) {
	for _, item := range r.Items {
		if item.Number == n {
			return item, true
		}
	}
	return Measured{}, false
}

// answer returns the result of a command; an empty one if there is none.
func (m Measured) answer(name string) Answer {
	for _, a := range m.Commands {
		if a.Name == name {
			return a
		}
	}
	return Answer{}
}

// at returns the series with that number of callers.
func (a Answer) at(callers int) (Series, bool) {
	for _, s := range a.Loads {
		if s.Load.Concurrency == callers {
			return s, true
		}
	}
	return Series{}, false
}

// Machine is where the suite ran.
type Machine struct {
	Cores int `json:"cores"`
	// CPU is the processor's model, if the system reports it.
	CPU  string `json:"cpu,omitempty"`
	OS   string `json:"os"`
	Arch string `json:"arch"`
}

// Versions of the programs and libraries.
type Versions struct {
	Stagemesh string `json:"stagemesh"`
	// Go is the version that built the program.
	Go         string `json:"go"`
	NATSServer string `json:"nats_server"`
	NATSClient string `json:"nats_client"`
	Python     string `json:"python,omitempty"`
}

// cpuInfo describes the processors on Linux.
const cpuInfo = "/proc/cpuinfo"

func thisMachine() Machine {
	return Machine{Cores: runtime.GOMAXPROCS(0), CPU: cpuModel(cpuInfo), OS: runtime.GOOS, Arch: runtime.GOARCH}
}

// cpuModel returns the first model in the file.
func cpuModel(file string) string {
	f, err := os.Open(file)
	if err != nil {
		return "" // other systems have none
	}
	defer f.Close() //nolint:errcheck // it was only read
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if key, model, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(model)
		}
	}
	return ""
}

// versionsOf returns the versions in the program, if it is a Go program.
func versionsOf(ctx context.Context, program string) Versions {
	out := Versions{Python: python(ctx)}
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return out
	}
	out.Go = info.GoVersion
	for _, dependency := range info.Deps {
		switch dependency.Path {
		case "github.com/nats-io/nats-server/v2":
			out.NATSServer = dependency.Version
		case "github.com/nats-io/nats.go":
			out.NATSClient = dependency.Version
		}
	}
	return out
}

// python returns the version of the Python that runs workers, if there is one.
func python(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	text, err := exec.CommandContext(ctx, "python3", "--version").Output()
	if err != nil {
		return ""
	}
	return strings.TrimPrefix(strings.TrimSpace(string(text)), "Python ")
}

// spread is a median with the least and the greatest value.
type spread = compare.Ratio

// spreadOf returns the spread of a figure over runs.
func spreadOf(runs []Trial, figure func(Trial) float64) spread {
	all := make([]float64, len(runs))
	for i, run := range runs {
		all[i] = figure(run)
	}
	return compare.RatioOf(all)
}

func throughput(r Trial) float64 { return r.ThroughputPerS }
func goodput(r Trial) float64    { return r.Goodput }
func p50(r Trial) float64        { return r.P50MS }
func p99(r Trial) float64        { return r.P99MS }

// side returns one side of the pairs as runs.
func side(c *compare.Comparison, of func(compare.Pair) compare.Figures) []Trial {
	out := make([]Trial, len(c.Pairs))
	for i, pair := range c.Pairs {
		out[i] = Trial{Figures: of(pair)}
	}
	return out
}

func mesh(p compare.Pair) compare.Figures     { return p.Mesh }
func baseline(p compare.Pair) compare.Figures { return p.Baseline }

// best returns the highest median throughput of the loads.
func (a Answer) best() (best float64) {
	for _, s := range a.Loads {
		best = max(best, spreadOf(s.Trials, throughput).Median)
	}
	return best
}

// slope returns the slope of the line through points by least squares; 0 if there is none.
func slope(xs, ys []float64) float64 {
	n := float64(len(xs))
	var sumX, sumY, sumXY, sumXX float64
	for i, x := range xs {
		sumX, sumY, sumXY, sumXX = sumX+x, sumY+ys[i], sumXY+x*ys[i], sumXX+x*x
	}
	below := n*sumXX - sumX*sumX
	if below == 0 {
		return 0
	}
	return (n*sumXY - sumX*sumY) / below
}

// Hop is the cost of one more stage for a request, in milliseconds.
type Hop struct {
	// Latency is the increase of P50 with one request in flight. Work is the increase of
	// the time between two answers with 64, which is time of the whole machine.
	Latency, Work float64
}

// hops returns the hops of mesh and baseline, by the commands with the suffix; false if they were
// not measured.
func (r Results) hops(suffix string) (ours, bare Hop, known bool) {
	item, _ := r.Item(Stages)
	one, onePoints := item.lines(suffix, 1, p50)
	many, manyPoints := item.lines(suffix, 64, func(t Trial) float64 { return timePerAnswer(t.ThroughputPerS) })
	if len(manyPoints) < 2 {
		return ours, bare, false
	}
	ours = Hop{Latency: slope(onePoints, one.ours), Work: slope(manyPoints, many.ours)}
	bare = Hop{Latency: slope(onePoints, one.bare), Work: slope(manyPoints, many.bare)}
	return ours, bare, true
}

// timePerAnswer is the time between two answers, in milliseconds.
func timePerAnswer(perS float64) float64 {
	if perS == 0 {
		return 0
	}
	return 1000 / perS
}

// both has medians of mesh and baseline.
type both struct{ ours, bare []float64 }

// lines returns a figure by the number of stages, which is the name of a command before the suffix.
func (m Measured) lines(suffix string, callers int, figure func(Trial) float64) (out both, stages []float64) {
	for _, a := range m.Commands {
		name, named := strings.CutSuffix(a.Name, suffix)
		n, err := strconv.Atoi(name)
		s, ok := a.at(callers)
		if !named || err != nil || !ok || s.Comparison == nil {
			continue
		}
		stages = append(stages, float64(n))
		out.ours = append(out.ours, spreadOf(side(s.Comparison, mesh), figure).Median)
		out.bare = append(out.bare, spreadOf(side(s.Comparison, baseline), figure).Median)
	}
	return out, stages
}
