package pipeline_test

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestJobIDIsReadAsWritten(t *testing.T) {
	t.Parallel()
	id := pipeline.NewJobID("nightly")
	if got, err := pipeline.ParseJobID(id.String()); err != nil || got != id {
		t.Errorf("%v, %v", got, err)
	}
	if at, ok := id.MintedAt(); !ok || time.Since(at).Abs() > time.Minute {
		t.Errorf("minted at %s, %t", at, ok)
	}
	keyed := pipeline.KeyedJobID("nightly", "a", "key")
	if _, ok := keyed.MintedAt(); ok || keyed != pipeline.KeyedJobID("nightly", "a", "key") || keyed == pipeline.KeyedJobID("nightly", "b", "key") || keyed == pipeline.KeyedJobID("daily", "a", "key") {
		t.Errorf("%v", keyed)
	}
}

func TestOtherTextIsNoJobID(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "nightly", "nightly.", ".0192d3f4-1c2a-7000-8000-000000000000", "nightly.0192D3F4-1c2a-7000-8000-000000000000", "a.b.0192d3f4-1c2a-7000-8000-000000000000", "UP.0192d3f4-1c2a-7000-8000-000000000000", "nightly.urn:uuid:0192d3f4-1c2a-7000-8000-000000000000"} {
		if got, err := pipeline.ParseJobID(text); err == nil {
			t.Errorf("%q: %v", text, got)
		}
	}
}
