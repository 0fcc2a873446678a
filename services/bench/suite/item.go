package suite

import (
	"fmt"
	"time"
)

// Number names an item.
type Number int

// Item is one question.
type Item struct {
	Number Number
	Title  string
	// Rounds are run one after the other.
	Rounds []Round
}

// Round is commands that are run in turns, so often.
type Round struct {
	Times    int
	Commands []Command
}

// Takes is about how long the item takes.
func (i Item) Takes() (out time.Duration) {
	for _, round := range i.Rounds {
		for _, c := range round.Commands {
			out += time.Duration(round.Times) * c.Takes()
		}
	}
	return out
}

// Only returns the items of those numbers, all where there is none.
func Only(items []Item, numbers []int) ([]Item, error) {
	if len(numbers) == 0 {
		return items, nil
	}
	var out []Item
	for _, n := range numbers {
		found := false
		for _, item := range items {
			if item.Number == Number(n) {
				out, found = append(out, item), true
			}
		}
		if !found {
			return nil, fmt.Errorf("--only: there is no item %d; there are 1 to %d", n, len(items))
		}
	}
	return out, nil
}
