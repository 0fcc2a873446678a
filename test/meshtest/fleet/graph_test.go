package fleet

import (
	"encoding/json"
	"testing"
	"time"
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
// request has its answer, once. Durable ones have it too when gateways and the broker are killed.
func TestBlocksSurviveTheirHosts(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	var spec gatewaySpec
	if err := json.Unmarshal([]byte(blocks), &spec.blocks); err != nil {
		t.Fatal(err)
	}
	m := f.withGatewaysAndHosts(t, spec)
	l := f.load(loadSpec{pipeline: "graph", inFlight: 32, every: pick(8*time.Millisecond, 4*time.Millisecond), through: perRequest})
	m.failInTurn(l, pick(125, 250))
	l.finish().checkAllRight(t)

	d := f.load(loadSpec{pipeline: "graph", durable: true, keyed: true, prefix: "durable-", inFlight: 16, every: 10 * time.Millisecond, through: perRequest})
	for turn := range pick(3, 60) {
		d.flow(50)
		killed := []*member{m.gateways[turn/3%2], f.broker, m.hosts[turn/3%len(m.hosts)]}[turn%3]
		killed.Kill()
		killed.start()
	}
	d.flow(50)
	d.finish().checkAllRight(t)
}
