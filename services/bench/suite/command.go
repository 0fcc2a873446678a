package suite

import (
	"path"
	"regexp"
	"strconv"
	"strings"
	"time"
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
	out := []string{"bench", c.Pipeline, "--mesh", path.Join(in, c.Mesh)}
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
	program = "bin/stagemesh"
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
