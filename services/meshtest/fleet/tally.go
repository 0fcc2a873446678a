package fleet

import (
	"fmt"
	"slices"
	"time"
)

// Tally is what became of a load's requests.
type Tally struct {
	// Right and Wrong answers came.
	Right, Wrong int
	// Refused were answered with a fault, by reason.
	Refused map[string]int
	// Twice were answered more than once.
	Twice int
	// Left were given up by their caller.
	Left int
	// Broken got no answer: the connection to the gateway ended.
	Broken []string
	// Heard are all answers, right ones and refusals.
	Heard []Answer
	// Stall is the longest time without any answer.
	Stall time.Duration
	// Elapsed is how long all of it took.
	Elapsed time.Duration
}

// Answer is one caller's.
type Answer struct {
	// Text is what was asked, Request the id that the gateway gave it.
	Text, Request string
	// Body is the answer, or Reason that of its fault.
	Body, Reason string
	// Took is how long the caller waited, until At.
	Took time.Duration
	At   time.Time
}

// book enters what one caller heard.
func (t *Tally) book(a Answer, h heard) {
	switch {
	case h.left:
		t.Left++
		return
	case h.err != nil:
		t.Broken = append(t.Broken, fmt.Sprintf("%s: %v", a.Text, h.err))
		return
	case h.terminals > 1:
		t.Twice++
	}
	switch {
	case h.reason != "":
		t.Refused[h.reason]++
	case h.wrong(a.Text):
		t.Wrong++
	default:
		t.Right++
	}
	t.Heard = append(t.Heard, a)
}

func (t *Tally) ended() int { return len(t.Heard) + t.Left + len(t.Broken) }

// Times returns how long those answers took that have the reason, the shortest
// first; "" is for the right ones.
func (t *Tally) Times(reason string) []time.Duration {
	var out []time.Duration
	for _, a := range t.Heard {
		if a.Reason == reason {
			out = append(out, a.Took)
		}
	}
	slices.Sort(out)
	return out
}

// Over returns the times of the right answers that took longer, the shortest
// first.
func (t *Tally) Over(d time.Duration) []time.Duration {
	times := t.Times("")
	at, _ := slices.BinarySearch(times, d)
	return times[at:]
}

// shown is how many of what broke are said.
const shown = 3

// String says it in a line.
func (t *Tally) String() string {
	return fmt.Sprintf("%d right, %d wrong, %d answered twice, %v refused, %d left, %d broken %q, longest stall %s, in %s",
		t.Right, t.Wrong, t.Twice, t.Refused, t.Left, len(t.Broken), t.Broken[:min(len(t.Broken), shown)],
		t.Stall.Round(time.Millisecond), t.Elapsed.Round(time.Millisecond))
}
