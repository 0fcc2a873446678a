package worker

import (
	"os"
	"slices"
	"strings"
	"testing"
)

func TestCPUSetsAreParsed(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]cpuSet{
		"0": {0}, "0-3,6": {0, 1, 2, 3, 6}, " 2 , 1 ": {1, 2}, "4-4": {4}, "1-2,2-3,0": {0, 1, 2, 3}, "1023": {1023},
		"": nil, "a": nil, "3-1": nil, "-1": nil, "1-": nil, "1,,2": nil, "1024": nil, "0-99999": nil, "1.5": nil,
	} {
		got, err := parseCPUs(text)
		if !slices.Equal(got, want) || (err == nil) != (want != nil) {
			t.Errorf("%q is %v, %v; want %v", text, got, err, want)
		}
	}
	if _, err := parseCPUs("one"); err == nil || !strings.Contains(err.Error(), `"one"`) || !strings.Contains(err.Error(), "0-3,6") {
		t.Errorf("the message does not help: %v", err)
	}
}

func FuzzCPUSetsRoundTrip(f *testing.F) {
	for _, text := range []string{"0-3,6", "7", "1,2,3", "0-1023", "5-6,8,10-11", ""} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		cpus, err := parseCPUs(text)
		if err != nil {
			return
		}
		again, err := parseCPUs(cpus.String())
		if err != nil || !slices.Equal(cpus, again) {
			t.Errorf("%q is %v, written %s, read %v, %v", text, cpus, cpus, again, err)
		}
	})
}

func TestMissingCPUsAreNamed(t *testing.T) {
	t.Parallel()
	if got := (cpuSet{0, 1, 5}).Missing(cpuSet{0, 2, 5}); !slices.Equal(got, cpuSet{1}) {
		t.Errorf("got %v", got)
	}
}

// allowed returns where the process of the text of a /proc/*/status may run.
func allowedCPUs(t *testing.T, status []string) string {
	t.Helper()
	for _, line := range status {
		if list, ok := strings.CutPrefix(line, "Cpus_allowed_list:\t"); ok {
			return list
		}
	}
	t.Fatal("no CPUs are in the status")
	return ""
}

func TestProcessesRunOnTheirCPUs(t *testing.T) {
	t.Parallel()
	online, err := onlineCPUs()
	if err != nil {
		t.Skipf("this system cannot pin processes: %v", err)
	}
	own, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	mine := allowedCPUs(t, strings.Split(string(own), "\n"))
	usable, err := parseCPUs(mine)
	if err != nil {
		t.Fatal(err)
	}
	s := open(t)
	// The last one without a set is where the host is, for the thread is restored.
	for _, cpus := range []cpuSet{usable[:1], usable[len(usable)-1:], usable, nil} {
		log := newLines()
		c := commandOf("status", log)
		c.CPUs = cpus
		if err := await(t, start(t, s, c)); err != nil {
			t.Fatal(err)
		}
		var lines []string
		for len(log.out) > 0 {
			lines = append(lines, log.first(t))
		}
		want := cpus.String()
		if cpus == nil {
			want = mine
		}
		if got := allowedCPUs(t, lines); got != want {
			t.Errorf("a process of CPUs %s runs on %s", want, got)
		}
	}
	c := commandOf("status", nil)
	c.CPUs = cpuSet{online[len(online)-1] + 1}
	if _, err := s.Start(c); err == nil || !strings.Contains(err.Error(), "CPU set "+c.CPUs.String()) {
		t.Errorf("a CPU that is not there: %v", err)
	}
	c.CPUs = append(cpuSet{online[0]}, c.CPUs...)
	if _, err := s.Start(c); err == nil || !strings.Contains(err.Error(), "not all") {
		t.Errorf("a CPU that is not there beside one that is: %v", err)
	}
}
