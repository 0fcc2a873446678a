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

// Command is one command line of `stagemesh bench`.
type Command struct {
	// Name tells it from the others of its item.
	Name string
	// Pipeline of the mesh in the file Mesh, which is in the suite's folder.
	Pipeline, Mesh string
	// Processes has the parts of the mesh be processes.
	Processes bool
	// Payload or Tensor is what is sent.
	Payload, Tensor string
	// Concurrency are the closed loops to run. Without any it is an open loop by chance,
	// of Rate a second.
	Concurrency []int
	Rate        float64
	// Share, above 0, makes Rate that share of the peak, which is the most that the
	// command named Peak in a round before came to.
	Share float64
	Peak  string
	// Timeout of each request, and Deadline of what counts as goodput; 0 is none.
	Timeout, Deadline time.Duration
	Durability        string
	// Traced has each request carry a trace context.
	Traced bool
	// Pairs, above 0, has each load be asked of the mesh and of the baseline in turns.
	Pairs int
	// Watched keeps what the process had while it ran.
	Watched          bool
	Warmup, Duration time.Duration
}

// Arguments returns the command line behind the program's name. Mesh files are in
// that folder.
func (c Command) Arguments(in string) []string {
	out := []string{"run", c.Pipeline, "--mesh", path.Join(in, c.Mesh)}
	add := func(given bool, words ...string) {
		if given {
			out = append(out, words...)
		}
	}
	add(c.Processes, "--processes")
	add(c.Payload != "", "--payload", c.Payload)
	add(c.Tensor != "", "--tensor", c.Tensor)
	add(len(c.Concurrency) > 0, "--concurrency", joined(c.Concurrency))
	add(len(c.Concurrency) == 0, "--rate", strconv.FormatFloat(c.Rate, 'f', -1, 64), "--arrivals", "poisson")
	add(c.Timeout > 0, "--timeout", c.Timeout.String())
	add(c.Deadline > 0, "--deadline", c.Deadline.String())
	add(c.Durability != "", "--durability", c.Durability)
	add(c.Traced, "--traced")
	add(c.Pairs > 0, "--baseline", "--pairs", strconv.Itoa(c.Pairs))
	return append(out, "--warmup", c.Warmup.String(), "--duration", c.Duration.String())
}

func joined(numbers []int) string {
	words := make([]string, len(numbers))
	for i, n := range numbers {
		words[i] = strconv.Itoa(n)
	}
	return strings.Join(words, ",")
}

// Places from the root of the repository: the program that make builds, and the folder
// with the meshes.
const (
	program = "bin/bench"
	folder  = "bench"
)

// Line returns the command as one types it at the root of the repository.
func (c Command) Line() string {
	words := []string{program}
	for _, word := range c.Arguments(folder) {
		words = append(words, quoted(word))
	}
	return strings.Join(words, " ")
}

// safe are words that no shell makes others of.
var safe = regexp.MustCompile(`^[A-Za-z0-9_./:,=-]+$`)

func quoted(word string) string {
	if safe.MatchString(word) {
		return word
	}
	return "'" + word + "'"
}

// startTime is about what a mesh takes to start and to stop.
const startTime = 3 * time.Second

// Takes is about how long the command takes.
func (c Command) Takes() time.Duration {
	runs := max(1, len(c.Concurrency)) * max(1, 2*c.Pairs)
	return startTime + time.Duration(runs)*(c.Warmup+c.Duration)
}

// slack is what a command may take beside its runs, whatever disturbs it.
const slack = time.Minute

// limit is how long it may take at most.
func (c Command) limit() time.Duration { return 2*c.Takes() + slack }

// Bounds on what a child prints, in bytes.
const (
	maxReport = 32 << 20
	maxWords  = 64 << 10
)

// stopTime is how long a child that is told to end may take before it is killed.
const stopTime = 10 * time.Second

// measure runs a command of the program, and reads its report. It ends with the
// context, or at the command's limit.
func measure(ctx context.Context, program, folder string, c Command) (compare.Report, error) {
	text, err := output(ctx, c.limit(), program, append(c.Arguments(folder), "--json", "-")...)
	if err != nil {
		return compare.Report{}, fmt.Errorf("%s: %w", c.Line(), err)
	}
	out, err := reported(text)
	if err != nil {
		return compare.Report{}, fmt.Errorf("%s: %w", c.Line(), err)
	}
	return out, nil
}

// reported reads a report, and holds it to be whole.
func reported(text []byte) (compare.Report, error) {
	out, err := compare.ReadJSON(bytes.NewReader(text))
	if err != nil {
		return out, err
	}
	if len(out.Runs) == 0 {
		return out, errors.New("the report has no run")
	}
	for _, run := range out.Runs {
		if run.Interrupted || run.Answered == 0 {
			return out, fmt.Errorf("the run of %s was interrupted, or had no answer", run.Load.Name())
		}
	}
	return out, nil
}

// output runs a program, and returns what it printed. The error has what it complained
// of.
func output(ctx context.Context, limit time.Duration, program string, arguments ...string) ([]byte, error) {
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(bounded, program, arguments...)
	printed, words := &keeper{most: maxReport}, &keeper{most: maxWords}
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = printed, words, stopTime
	// It stops the mesh that it has started; where it cannot be told, that ends with it.
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
		return nil, fmt.Errorf("it did not end within %s%s", limit, words.told())
	case err != nil:
		return nil, fmt.Errorf("%w%s", err, words.told())
	case printed.left > 0:
		return nil, fmt.Errorf("it printed more than %d bytes", maxReport)
	}
	return printed.text.Bytes(), nil
}

// keeper keeps the first of what is written, and counts what is left out.
type keeper struct {
	text bytes.Buffer
	most int
	left int64
}

// Write implements io.Writer.
func (k *keeper) Write(p []byte) (int, error) {
	kept := min(len(p), k.most-k.text.Len())
	k.text.Write(p[:kept])
	k.left += int64(len(p) - kept)
	return len(p), nil
}

// told is what was written, as the end of a message.
func (k *keeper) told() string {
	text := strings.TrimSpace(k.text.String())
	if text == "" {
		return ""
	}
	return ": " + text
}
