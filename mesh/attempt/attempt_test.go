package attempt_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/mesh/attempt"
	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const mesh pipeline.MeshName = "test"

func newBook(t *testing.T, broker *bustest.Broker) *attempt.Book {
	t.Helper()
	book := attempt.New(broker.Connect(mesh), attempt.Settings{})
	if err := book.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	return book
}

func item() *envelope.Envelope {
	return &envelope.Envelope{ExecutionID: pipeline.ExecutionID(uuid.NewString()), Position: 1}
}

func begin(t *testing.T, book *attempt.Book, e *envelope.Envelope, host pipeline.HostID) []envelope.RunRecord {
	t.Helper()
	before, err := book.Begin(t.Context(), e, envelope.RunRecord{Host: host, At: time.Unix(1000, 0)})
	if err != nil {
		t.Fatal(err)
	}
	return before
}

func TestStartsAddUpUntilARunEnds(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	one, two := newBook(t, broker), newBook(t, broker)
	e := item()
	if before := begin(t, one, e, "a"); len(before) != 0 {
		t.Errorf("before the first start: %v", before)
	}
	if before := begin(t, two, e, "b"); len(before) != 1 || before[0].Host != "a" || !before[0].At.Equal(time.Unix(1000, 0)) {
		t.Errorf("before the second start: %v", before)
	}
	if before := begin(t, one, item(), "a"); len(before) != 0 {
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
	if err := two.End(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	if before := begin(t, one, e, "d"); len(before) != 0 {
		t.Errorf("after a run that ended: %v", before)
	}
}

func TestStartsSurviveTheBroker(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	book := newBook(t, broker)
	e := item()
	begin(t, book, e, "a")
	broker.Stop()
	broker.Restore()
	bustest.Eventually(t, "the record is there again", func() bool {
		before, err := book.Begin(t.Context(), e, envelope.RunRecord{Host: "b", At: time.Now()})
		return err == nil && len(before) >= 1 && before[0].Host == "a"
	})
}

func TestWithoutAStreamThereIsNoRecord(t *testing.T) {
	t.Parallel()
	book := attempt.New(bustest.Start(t).Connect(mesh), attempt.Settings{})
	if _, err := book.Begin(t.Context(), item(), envelope.RunRecord{At: time.Now()}); err == nil {
		t.Error("a start is on record that nobody keeps")
	}
}
