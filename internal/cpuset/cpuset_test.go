package cpuset

import (
	"slices"
	"strings"
	"testing"
)

func TestCPUSetsAreParsed(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Set{
		"0": {0}, "0-3,6": {0, 1, 2, 3, 6}, " 2 , 1 ": {1, 2}, "4-4": {4}, "1-2,2-3,0": {0, 1, 2, 3}, "1023": {1023},
		"": nil, "a": nil, "3-1": nil, "-1": nil, "1-": nil, "1,,2": nil, "1024": nil, "0-99999": nil, "1.5": nil,
	} {
		got, err := Parse(text)
		if !slices.Equal(got, want) || (err == nil) != (want != nil) {
			t.Errorf("%q is %v, %v; want %v", text, got, err, want)
		}
	}
	if _, err := Parse("one"); err == nil || !strings.Contains(err.Error(), `"one"`) || !strings.Contains(err.Error(), "0-3,6") {
		t.Errorf("the message does not help: %v", err)
	}
}

func FuzzCPUSetsRoundTrip(f *testing.F) {
	for _, text := range []string{"0-3,6", "7", "1,2,3", "0-1023", "5-6,8,10-11", ""} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		cpus, err := Parse(text)
		if err != nil {
			return
		}
		again, err := Parse(cpus.String())
		if err != nil || !slices.Equal(cpus, again) {
			t.Errorf("%q is %v, written %s, read %v, %v", text, cpus, cpus, again, err)
		}
	})
}

func TestMissingCPUsAreNamed(t *testing.T) {
	t.Parallel()
	if got := (Set{0, 1, 5}).Missing(Set{0, 2, 5}); !slices.Equal(got, Set{1}) {
		t.Errorf("got %v", got)
	}
}
