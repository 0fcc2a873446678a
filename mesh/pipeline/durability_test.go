package pipeline_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestDurabilitiesRoundTrip(t *testing.T) {
	t.Parallel()
	for _, want := range []pipeline.Durability{pipeline.DurabilityUnset, pipeline.Memory, pipeline.File} {
		if got, err := pipeline.DurabilityFromProto(want.ToProto()); err != nil || got != want {
			t.Errorf("%q came back as %q, %v", want, got, err)
		}
		if got, err := pipeline.ParseDurability(string(want)); err != nil || got != want {
			t.Errorf("%q is read as %q, %v", want, got, err)
		}
	}
}

func TestUnknownDurabilitiesAreRejected(t *testing.T) {
	t.Parallel()
	for _, n := range []inferencev1.Durability{-1, 3, math.MaxInt32} {
		if got, err := pipeline.DurabilityFromProto(n); err == nil {
			t.Errorf("%d is %q", n, got)
		}
	}
	for _, s := range []string{"disk", "Memory", "memory ", "unset"} {
		if got, err := pipeline.ParseDurability(s); err == nil || !strings.Contains(err.Error(), "use memory or file") {
			t.Errorf("%q is %q, %v", s, got, err)
		}
	}
	if got := pipeline.Durability("disk").ToProto(); got != inferencev1.Durability_DURABILITY_UNSPECIFIED {
		t.Errorf("disk is %v on the wire", got)
	}
}

func TestPrioritiesFallIntoThreeClasses(t *testing.T) {
	t.Parallel()
	for priority, want := range map[int32]pipeline.Class{
		math.MaxInt32: pipeline.High, 1: pipeline.High, 0: pipeline.Normal, -1: pipeline.Low, math.MinInt32: pipeline.Low,
	} {
		if got := pipeline.ClassOf(priority); got != want {
			t.Errorf("priority %d is %s, want %s", priority, got, want)
		}
	}
}

func TestHighIsServedFirst(t *testing.T) {
	t.Parallel()
	if got := pipeline.Classes(); !slices.Equal(got, []pipeline.Class{pipeline.High, pipeline.Normal, pipeline.Low}) {
		t.Errorf("got %v", got)
	}
}
