// Package cpuset says on which CPUs of a machine threads and processes run.
package cpuset

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// maxCPU is the highest number of a CPU that Parse takes.
const maxCPU = 1023

// Set are numbers of CPUs, sorted, each once.
type Set []int

// Parse reads a set like "0-3,6".
func Parse(text string) (Set, error) {
	var out Set
	for _, piece := range strings.Split(text, ",") {
		first, last, isRange := strings.Cut(strings.TrimSpace(piece), "-")
		if !isRange {
			last = first
		}
		from, err := parseOne(first)
		if err != nil {
			return nil, err
		}
		to, err := parseOne(last)
		if err != nil {
			return nil, err
		}
		if from > to {
			return nil, fmt.Errorf("%d-%d goes backwards", from, to)
		}
		for cpu := from; cpu <= to; cpu++ {
			out = append(out, cpu)
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

func parseOne(text string) (int, error) {
	n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 16)
	if err != nil || n > maxCPU {
		return 0, fmt.Errorf("%q is not a CPU number; write sets like 0-3,6", text)
	}
	return int(n), nil
}

// String writes the set as Parse reads it.
func (c Set) String() string {
	var out []string
	for i := 0; i < len(c); {
		last := i
		for last+1 < len(c) && c[last+1] == c[last]+1 {
			last++
		}
		if last == i {
			out = append(out, strconv.Itoa(c[i]))
		} else {
			out = append(out, fmt.Sprintf("%d-%d", c[i], c[last]))
		}
		i = last + 1
	}
	return strings.Join(out, ",")
}

// Missing returns the CPUs that are not among the others.
func (c Set) Missing(among Set) Set {
	var out Set
	for _, cpu := range c {
		if !slices.Contains(among, cpu) {
			out = append(out, cpu)
		}
	}
	return out
}

// CheckOnline returns an error that names CPUs which the machine does not have.
func (c Set) CheckOnline() error {
	online, err := Online()
	if err != nil {
		return err
	}
	if missing := c.Missing(online); len(missing) > 0 {
		return fmt.Errorf("there is no CPU %s; this machine has %s", missing, online)
	}
	return nil
}
