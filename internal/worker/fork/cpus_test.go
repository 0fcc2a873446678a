package fork

import (
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/cpuset"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

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
	online, err := cpuset.Online()
	if err != nil {
		t.Skipf("this system cannot pin processes: %v", err)
	}
	own := testbed.ReadFile(t, "/proc/self/status")
	mine := allowedCPUs(t, strings.Split(string(own), "\n"))
	usable, err := cpuset.Parse(mine)
	if err != nil {
		t.Fatal(err)
	}
	s := open(t)
	// The last one without a set is where the host is, for the thread is restored.
	for _, cpus := range []cpuset.Set{usable[:1], usable[len(usable)-1:], usable, nil} {
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
	c.CPUs = cpuset.Set{online[len(online)-1] + 1}
	if _, err := s.Start(c); err == nil || !strings.Contains(err.Error(), "CPU set "+c.CPUs.String()) {
		t.Errorf("a CPU that is not there: %v", err)
	}
	c.CPUs = append(cpuset.Set{online[0]}, c.CPUs...)
	if _, err := s.Start(c); err == nil || !strings.Contains(err.Error(), "not all") {
		t.Errorf("a CPU that is not there beside one that is: %v", err)
	}
}
