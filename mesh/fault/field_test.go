package fault_test

import (
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

func TestFieldPathsAreReadable(t *testing.T) {
	t.Parallel()
	for want, got := range map[string]string{
		"inputs.order":                         fault.Member("inputs", "order"),
		"order":                                fault.Member("", "order"),
		"inputs.order[3]":                      fault.Element("inputs.order", 3),
		"[0].7":                                fault.Member(fault.Element("", 0), "7"),
		`x["a b"]`:                             fault.Member("x", "a b"),
		`x[""]`:                                fault.Member("x", ""),
		`x["\n\""]`:                            fault.Member("x", "\n\""),
		`x["\xff"]`:                            fault.Member("x", "\xff"),
		"x." + strings.Repeat("k", 40) + "...": fault.Member("x", strings.Repeat("k", 1000)),
	} {
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}
