package suite

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/bench/compare"
)

// Command is one command line of `bench run`, `bench models` or `bench jobs`.
type Command struct {
	// Name is unique in its item.
	Name string
	// Measure is models or jobs for a measurement of that name of `bench models` or `bench jobs`,
	// which has no more than Pairs and Duration.
	Measure string
	// Pipeline of the mesh in the file Mesh of the suite's folder.
	Pipeline, Mesh string
	// Processes runs the parts of the mesh as processes.
	Processes bool
	// Payload, Tensor or Input, a file of the suite's folder, is the input.
	Payload, Tensor, Input string
	// Protocol of the requests; gRPC if empty.
	Protocol string
	// Concurrency lists the closed loops to run. Without any it is an open loop of
	// Poisson arrivals at Rate.
	Concurrency []int
	Rate        float64
	// Share, if above 0, sets Rate to that share of the peak: the highest throughput of
	// the command named Peak in an earlier round.
	Share float64
	Peak  string
	// Timeout of each request, and Deadline of goodput; 0 is none.
	Timeout, Deadline time.Duration
	Durability        string
	// Traced gives each request a trace context.
	Traced bool
	// Spans is the share of requests that are traced, and whose spans are exported; empty for a
	// mesh without tracing.
	Spans string
	// Pairs, if above 0, is the number of pairs of mesh and baseline for each load. Peer, if
	// not empty, names the server in the baseline's place: a folder of bin/peers, which
	// make bench-peers fills.
	Pairs int
	Peer  string
	// Handler measures a bare handler in the baseline's place.
	Handler bool
	// Watched keeps the samples of the process.
	Watched          bool
	Warmup, Duration time.Duration
}

// Arguments returns the arguments of the program, with mesh files in that folder.
func (c Command) Arguments(in string) []string {
	if c.Measure != "" {
		return []string{c.Measure, c.Name, "--pairs", strconv.Itoa(c.Pairs), "--duration", c.Duration.String()}
	}
	out := []string{"run", c.Pipeline}
	add := func(given bool, words ...string) {
		if given {
			out = append(out, words...)
		}
	}
	add(c.Input != "", path.Join(in, c.Input))
	add(true, "--mesh", path.Join(in, c.Mesh))
	add(c.Protocol != "", "--protocol", c.Protocol)
	add(c.Processes, "--processes")
	add(c.Payload != "", "--payload", c.Payload)
	add(c.Tensor != "", "--tensor", c.Tensor)
	add(len(c.Concurrency) > 0, "--concurrency", join(c.Concurrency))
	add(len(c.Concurrency) == 0, "--rate", strconv.FormatFloat(c.Rate, 'f', -1, 64), "--arrivals", "poisson")
	add(c.Timeout > 0, "--timeout", c.Timeout.String())
	add(c.Deadline > 0, "--deadline", c.Deadline.String())
	add(c.Durability != "", "--durability", c.Durability)
	add(c.Traced, "--traced")
	add(c.Spans != "", "--trace", c.Spans)
	add(c.Peer != "", "--peer", fmt.Sprintf("bin/peers/%[1]s/bin/python %[2]s/peers/run.py %[1]s %[3]s", c.Peer, in, c.Pipeline))
	add(c.Handler, "--handler")
	add(c.Pairs > 0 && c.Peer == "" && !c.Handler, "--baseline")
	add(c.Pairs > 0, "--pairs", strconv.Itoa(c.Pairs))
	return append(out, "--warmup", c.Warmup.String(), "--duration", c.Duration.String())
}

func join(numbers []int) string {
	words := make([]string, len(numbers))
	for i, n := range numbers {
		words[i] = strconv.Itoa(n)
	}
	return strings.Join(words, ",")
}

// Paths from the root of the repository: the program that make builds, and the folder
// of the mesh files.
const (
	program = "bin/bench"
	folder  = "bench"
)

// Line returns the command for a shell at the root of the repository.
func (c Command) Line() string {
	words := []string{program}
	for _, word := range c.Arguments(folder) {
		words = append(words, quote(word))
	}
	return strings.Join(words, " ")
}

// safe matches words that a shell does not change.
var safe = regexp.MustCompile(`^[A-Za-z0-9_./:,=-]+$`)

func quote(word string) string {
	if safe.MatchString(word) {
		return word
	}
	return "'" + word + "'"
}

// startTime is the approximate time that a mesh takes to start and stop.
const startTime = 3 * time.Second

// Takes is the approximate duration of the command.
func (c Command) Takes() time.Duration {
	runs := max(1, len(c.Concurrency)) * max(1, 2*c.Pairs)
	return startTime + time.Duration(runs)*(c.Warmup+c.Duration)
}

// slack is for disturbances of a command.
const slack = time.Minute

// limit bounds the duration of the command.
func (c Command) limit() time.Duration { return 2*c.Takes() + slack }

// Bounds on the output of a child, in bytes.
const (
	maxReport = 32 << 20
	maxStderr = 64 << 10
)

// stopTime is how long an interrupted child may take before it is killed.
const stopTime = 10 * time.Second

// measure runs a command of the program and reads its report, within the command's limit.
func measure(ctx context.Context, program, folder string, c Command) (compare.Report, error) {
	text, err := output(ctx, c.limit(), program, append(c.Arguments(folder), "--json", "-")...)
	if err != nil {
		return compare.Report{}, fmt.Errorf("%s: %w", c.Line(), err)
	}
	out, err := parseReport(text)
	if err != nil {
		return compare.Report{}, fmt.Errorf("%s: %w", c.Line(), err)
	}
	return out, nil
}

// parseReport parses a report and checks that all of its runs are complete.
func parseReport(text []byte) (compare.Report, error) {
	out, err := compare.ReadJSON(bytes.NewReader(text))
	if err != nil {
		return out, err
	}
	if len(out.Runs)+len(out.Values) == 0 {
		return out, errors.New("the report has no run")
	}
	for _, run := range out.Runs {
		if run.Interrupted || run.Answered == 0 {
			return out, fmt.Errorf("the run of %s was interrupted, or had no answer", run.Load.Name())
		}
	}
	return out, nil
}

// output runs a program and returns its output. An error includes its standard error.
func output(ctx context.Context, limit time.Duration, program string, arguments ...string) ([]byte, error) {
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(bounded, program, arguments...)
	printed, stderr := &compare.BoundedBuffer{Most: maxReport}, &compare.BoundedBuffer{Most: maxStderr}
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = printed, stderr, stopTime
	// An interrupt lets it stop its mesh, which else ends with it.
	cmd.Cancel = func() error {
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			return cmd.Process.Kill()
		}
		return nil
	}
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case bounded.Err() != nil:
		return nil, fmt.Errorf("it did not end within %s%s", limit, stderr.Suffix())
	case err != nil:
		return nil, fmt.Errorf("%w%s", err, stderr.Suffix())
	case printed.Dropped > 0:
		return nil, fmt.Errorf("it printed more than %d bytes", maxReport)
	}
	return printed.Bytes(), nil
}
