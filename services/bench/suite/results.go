package suite

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/services/bench/report"
)

// Version of the form of Results as JSON. A member that is added does not change it.
const Version = 1

// Results are what the suite came to: all that its page is made of.
type Results struct {
	Version  int      `json:"version"`
	Machine  Machine  `json:"machine"`
	Versions Versions `json:"versions"`
	// Items are those that were measured, by their numbers.
	Items []Measured `json:"items"`
}

// Measured is what an item came to.
type Measured struct {
	Number Number `json:"number"`
	// Began is when it did.
	Began time.Time `json:"began"`
	// Quick says that it was only tried out.
	Quick    bool     `json:"quick,omitempty"`
	Commands []Answer `json:"commands"`
}

// Answer is what a command came to, in all its repetitions.
type Answer struct {
	Name string `json:"name"`
	// Line is the command as one types it.
	Line  string   `json:"line"`
	Loads []Series `json:"loads"`
}

// Series is one load, again and again.
type Series struct {
	Load report.Load `json:"load"`
	// Trials are the repetitions. With a baseline there is one, the mesh's of the median
	// pair, and Comparison has all.
	Trials     []Trial            `json:"trials"`
	Comparison *report.Comparison `json:"comparison,omitempty"`
}

// Trial is what the page tells of one run.
type Trial struct {
	report.Figures
	NotSent int64 `json:"not_sent,omitempty"`
	// Goodput is answers in time a second, where there was a deadline.
	Goodput float64 `json:"goodput_per_s,omitempty"`
	// Refused of those that have failed, and how long that took.
	Refused      int64   `json:"refused,omitempty"`
	RefusalP50MS float64 `json:"refusal_p50_ms,omitempty"`
	RefusalP99MS float64 `json:"refusal_p99_ms,omitempty"`
	// BatchSize is the mean number of items in a batch of the first step.
	BatchSize float64 `json:"batch_size,omitempty"`
	// Samples are of the generator's process since the warm-up, in the order of time.
	Samples []report.ProcessSample `json:"samples,omitempty"`
}

// Read reads what Write wrote.
func Read(file string) (Results, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return Results{}, err
	}
	var out Results
	if err := json.Unmarshal(text, &out); err != nil {
		return Results{}, fmt.Errorf("%s: these are no results: %w", file, err)
	}
	if out.Version != Version {
		return Results{}, fmt.Errorf("%s: the results are of version %d, and this program reads %d; measure again", file, out.Version, Version)
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

// ErrMachine says that results of two machines were to be put together.
var ErrMachine = errors.New("the results there are of another machine; measure the whole suite, or name another file with --results")

// With returns the results with items measured anew, whose versions it takes. Items that
// were measured before stay, but not those of another machine.
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

// Item returns what an item came to, where it was measured.
func (r Results) Item(n Number) (Measured, bool) {
	for _, item := range r.Items {
		if item.Number == n {
			return item, true
		}
	}
	return Measured{}, false
}

// answer returns that of a command; an empty one where there is none.
func (m Measured) answer(name string) Answer {
	for _, a := range m.Commands {
		if a.Name == name {
			return a
		}
	}
	return Answer{}
}

// at returns the series of so many callers.
func (a Answer) at(callers int) (Series, bool) {
	for _, s := range a.Loads {
		if s.Load.Concurrency == callers {
			return s, true
		}
	}
	return Series{}, false
}
