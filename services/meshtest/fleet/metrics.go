package fleet

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// Count returns a metric of the member's, over all series that have the labels,
// each written as name="value". A counter that has not begun is 0.
func (m *Member) Count(metric string, labels ...string) int {
	t := m.fleet.t
	t.Helper()
	sum := 0.0
	for line := range strings.Lines(m.metrics()) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if series, _, _ := strings.Cut(name, "{"); series != metric || !hasAll(name, labels) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("%s: %s: %v", m.name, line, err)
		}
		sum += v
	}
	return int(sum)
}

func hasAll(name string, labels []string) bool {
	for _, label := range labels {
		if !strings.Contains(name, label) {
			return false
		}
	}
	return true
}

func (m *Member) metrics() string {
	m.fleet.t.Helper()
	status, body := m.operations("/metrics")
	if status != http.StatusOK {
		m.fleet.t.Fatalf("%s: metrics: %d: %s", m.name, status, body)
	}
	return body
}

// operations asks the member's operations port.
func (m *Member) operations(path string) (status int, body string) {
	m.fleet.t.Helper()
	m.mu.Lock()
	url := "http://" + m.hello.Ops + path
	m.mu.Unlock()
	return m.fleet.get(url)
}

// Unready returns why a member is not ready that has begun; "" says that it is.
func (m *Member) Unready() string {
	m.fleet.t.Helper()
	status, body := m.operations("/readyz")
	if status == http.StatusOK {
		return ""
	}
	return fmt.Sprintf("%d: %s", status, body)
}

// Sum returns a metric over several members.
func Sum(members []*Member, metric string, labels ...string) int {
	sum := 0
	for _, m := range members {
		sum += m.Count(metric, labels...)
	}
	return sum
}

// get asks once, over a connection of its own. No answer is status 0.
func (f *Fleet) get(url string) (status int, body string) {
	f.t.Helper()
	request, err := http.NewRequestWithContext(f.t.Context(), http.MethodGet, url, http.NoBody)
	if err != nil {
		f.t.Fatal(err)
	}
	return answerTo(&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, request)
}

// Ready reports whether a gateway's /readyz says that it is.
func (m *Member) Ready() bool {
	m.fleet.t.Helper()
	status, _ := m.fleet.get("http://" + m.Addr() + "/readyz")
	return status == http.StatusOK
}
