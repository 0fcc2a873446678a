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
// request has its answer, once.
func TestBlocksSurviveTheirHosts(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	var spec gatewaySpec
	if err := json.Unmarshal([]byte(blocks), &spec.blocks); err != nil {
		t.Fatal(err)
	}
	m := f.withGatewaysAndHosts(t, spec)
	l := f.load(loadSpec{pipeline: "graph", inFlight: 32, every: 4 * time.Millisecond, through: perRequest})
	m.failInTurn(l, 250)
	l.finish().checkAllRight(t)
}
