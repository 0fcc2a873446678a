package pipeline_test

import (
	"testing"
	"time"

	"github.com/google/uuid"

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

func TestJobOfALineTellsItsLine(t *testing.T) {
	t.Parallel()
	batch, other := uuid.New(), uuid.New()
	first, _ := pipeline.LineJobID("nightly", batch, 0).Line()
	for _, line := range []int{0, 1, 49_999} {
		id := pipeline.LineJobID("nightly", batch, line)
		if prefix, got := id.Line(); prefix != first || got != line || id != pipeline.LineJobID("nightly", batch, line) {
			t.Errorf("%v: %x, %d", id, prefix, got)
		}
		if _, ok := id.MintedAt(); ok {
			t.Errorf("%v has a time", id)
		}
		if prefix, _ := pipeline.LineJobID("nightly", other, line).Line(); prefix == first {
			t.Errorf("%x is of two batches", prefix)
		}
	}
}
