package fleet

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// blocks are steps of the stages one, two and three, in blocks that nest; the answer begins with the
// request's text whatever ran.
const blocks = `[
  {"name": "one", "stage": "one"},
  {"name": "both", "parallel": {"branches": {
    "l": {"steps": [{"name": "two", "stage": "two"}], "give": {"l": ""}},
    "r": {"steps": [
      {"name": "safe", "try": {"steps": [{"name": "three", "stage": "three"}], "else": [{"name": "spare", "stage": "two"}]}}
    ], "give": {"r": ""}}
  }}},
  {"name": "which", "switch": [
    {"when": {"part": "l", "matches": ".*[02468] .*"}, "steps": [{"name": "even", "stage": "three"}]},
    {"else": [{"name": "share", "split": {"branches": {
      "a": {"weight": 50, "steps": [{"name": "odd", "stage": "one"}]},
      "b": {"weight": 50, "steps": [{"name": "odder", "stage": "two"}]}
    }}}]}
  ]}
]`

// Hosts are killed, drained and started again while requests pass blocks, and gateways restarted: each
// request has its answer, once.
func TestBlocksSurviveTheirHosts(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	var hosts []*member
	for range 2 {
		for _, stage := range []string{"one", "two", "three"} {
			hosts = append(hosts, f.host(hostSpec{stage: stage, run: time.Millisecond}))
		}
	}
	spec := gatewaySpec{pipelines: map[string][]string{"chain": {"one", "two", "three"}}, drainDelay: time.Second}
	if err := json.Unmarshal([]byte(blocks), &spec.blocks); err != nil {
		t.Fatal(err)
	}
	m := &mesh{t: t, fleet: f, hosts: hosts, gateways: []*member{f.gatewayOf(spec), f.gatewayOf(spec)}}
	testbed.Eventually(t, "every gateway shows all hosts", m.isInView)
	l := f.load(loadSpec{pipeline: "graph", inFlight: 32, every: 4 * time.Millisecond, through: perRequest})
	for turn := range pick(6, 120) {
		l.flow(250)
		switch host := hosts[turn%len(hosts)]; turn % 3 {
		case 0:
			host.Kill()
			host.start()
		case 1:
			restart(host)
		case 2:
			restart(m.gateways[turn/3%2])
			testbed.Eventually(t, "the balancer uses both gateways", func() bool { return l.ready.knows(len(m.gateways)) })
		}
	}
	l.flow(250)
	l.finish().checkAllRight(t)
}
