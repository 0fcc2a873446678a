package fleet_test

import (
	"slices"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/meshtest"
)

func TestAGatewayServesWhatItWasToldWhenItAnswers(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	echo(f)
	g := gateway(f)
	for turn := range 20 {
		must(t, g.Apply(meshtest.Pipeline(applied, "echo")))
		if got := g.Pipelines(); !slices.Equal(got, []pipeline.Name{applied, "echo"}) {
			t.Fatalf("turn %d: after a pipeline was applied there are %v", turn, got)
		}
		must(t, g.Delete(applied))
		if got := g.Pipelines(); !slices.Equal(got, []pipeline.Name{"echo"}) {
			t.Fatalf("turn %d: after it was deleted there are %v", turn, got)
		}
	}
}
