package store_test

import (
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func runItem() *envelope.Envelope {
	return &envelope.Envelope{ExecutionID: pipeline.ExecutionID(uuid.NewString()), Position: 1}
}

func begin(t *testing.T, runs *store.Runs, e *envelope.Envelope, host pipeline.HostID) []envelope.RunRecord {
	t.Helper()
	before, err := runs.AddRun(t.Context(), e, envelope.RunRecord{Host: host, At: time.Unix(1000, 0)})
	if err != nil {
		t.Fatal(err)
	}
	return before
}

func TestRunRecordsAddUpUntilARunEnds(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	one, two := newRuns(t, broker), newRuns(t, broker)
	e := runItem()
	if before := begin(t, one, e, "a"); len(before) != 0 {
		t.Errorf("before the first start: %v", before)
	}
	if before := begin(t, two, e, "b"); len(before) != 1 || before[0].Host != "a" || !before[0].At.Equal(time.Unix(1000, 0)) {
		t.Errorf("before the second start: %v", before)
	}
	if before := begin(t, one, runItem(), "a"); len(before) != 0 {
		t.Errorf("before the first start of another item: %v", before)
	}
	later := *e
	later.Position++
	if before := begin(t, one, &later, "a"); len(before) != 0 {
		t.Errorf("before the first start of the next step: %v", before)
	}
	if before := begin(t, one, e, "c"); len(before) != 2 || before[1].Host != "b" {
		t.Errorf("before the third start: %v", before)
	}
	crashed := []envelope.RunRecord{{Host: "b", At: time.Unix(1000, 0), Died: true}}
	if err := two.EndRun(t.Context(), e, crashed); err != nil {
		t.Fatal(err)
	}
	if left, err := one.RunsOf(t.Context(), e); err != nil || len(left) != 1 || !left[0].Died {
		t.Errorf("after a run that found no model: %v, %v", left, err)
	}
	if err := two.EndRun(t.Context(), e, nil); err != nil {
		t.Fatal(err)
	}
	if before := begin(t, one, e, "d"); len(before) != 0 {
		t.Errorf("after a run that ended: %v", before)
	}
}

func TestRunRecordsSurviveTheBroker(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	runs := newRuns(t, broker)
	e := runItem()
	begin(t, runs, e, "a")
	broker.Stop()
	broker.Restore()
	testbed.Eventually(t, "the record is there again", func() bool {
		before, err := runs.AddRun(t.Context(), e, envelope.RunRecord{Host: "b", At: time.Now()})
		return err == nil && len(before) >= 1 && before[0].Host == "a"
	})
}

func TestRunsWithoutAStream(t *testing.T) {
	t.Parallel()
	runs := store.NewRuns(testbed.StartBroker(t).Connect(mesh), store.Settings{})
	if _, err := runs.AddRun(t.Context(), runItem(), envelope.RunRecord{At: time.Now()}); err == nil {
		t.Error("a run was recorded without a stream")
	}
}
