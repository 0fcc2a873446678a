package store_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const stage pipeline.StageName = "classify"

// letterBed is a stage's queue, a host that pulls from it, and its dead letters.
type letterBed struct {
	*store.DeadLetters
	bus        *bus.Bus
	host       *bus.Puller
	deliveries chan bus.Delivery
}

func newLetterBed(t *testing.T, edits ...func(*bus.Settings)) *letterBed {
	t.Helper()
	b := testbed.StartBroker(t).Connect(mesh, edits...)
	d := &letterBed{DeadLetters: store.NewDeadLetters(b, settings), bus: b, deliveries: make(chan bus.Delivery, 64)}
	if err := d.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	info, err := b.EnsureQueue(t.Context(), bus.QueueSettings{
		Stage: stage, Durability: pipeline.File, MaxItems: 1000, MaxBytes: 64 << 20, AckWait: time.Minute,
	})
	if err != nil {
		t.Fatal(err)
	}
	d.host, err = b.Pull(bus.PullSettings{
		Stage: stage, Durabilities: []pipeline.Durability{pipeline.File}, Bound: 64, AckWait: time.Minute,
		Malformed:    func(err error) { t.Error(err) },
		QueueMissing: func() { t.Error("the queue is missing") },
	}, func(delivery bus.Delivery) { d.deliveries <- delivery })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.host.Close)
	d.host.Use(pipeline.File, info.Epoch)
	return d
}

func item(text string) *envelope.Envelope {
	now := time.Now()
	return &envelope.Envelope{
		Mesh: mesh, Tenant: "tenant", Gateway: "gateway", Pipeline: "pipeline", IdempotencyKey: "key",
		RequestID: pipeline.RequestID(uuid.NewString()), ExecutionID: pipeline.ExecutionID(uuid.NewString()),
		Route:      []pipeline.Hop{{Step: "one", Stage: "decode"}, {Step: "two", Stage: stage}},
		Position:   1,
		Durability: pipeline.File, Priority: 3, AdmittedAt: now.Add(-time.Hour), Deadline: now.Add(-time.Hour + time.Minute),
		Parts: []payload.Part{payload.OfBlob("x", "text/plain", []byte(text))},
	}
}

func (d *letterBed) next(t *testing.T) (bus.Delivery, *envelope.Envelope) {
	t.Helper()
	delivery := testbed.Receive(t, "delivery", d.deliveries)
	e, err := envelope.Decode(delivery.Data)
	if err != nil {
		t.Fatal(err)
	}
	return delivery, e
}

func (d *letterBed) store(t *testing.T, letter *envelope.DeadLetter, of bus.Delivery) {
	t.Helper()
	m, err := store.NewDeadLetters(d.bus, store.Settings{}).DeadLetter(letter, of)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.bus.PublishAndWait(t.Context(), m); err != nil {
		t.Fatal(err)
	}
}

// deadLetter puts an item into the queue and dead-letters it.
func (d *letterBed) deadLetter(t *testing.T, e *envelope.Envelope) {
	t.Helper()
	m, err := d.bus.Item(e)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.bus.PublishAndWait(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	delivery, _ := d.next(t)
	letter := letterOf(stage, delivery.Data)
	letter.Deliveries, letter.QueuedAt = delivery.Deliveries, delivery.QueuedAt
	d.store(t, letter, delivery)
	// The acknowledgement is lost, and the host sends the dead letter again.
	d.store(t, letter, delivery)
	if err := delivery.Term("dead"); err != nil {
		t.Fatal(err)
	}
	delivery.Release()
}

func letterOf(stage pipeline.StageName, data []byte) *envelope.DeadLetter {
	now := time.Now()
	return &envelope.DeadLetter{
		Mesh: mesh, Stage: stage, Host: "host", Durability: pipeline.File, Priority: 3,
		Fault: fault.New(fault.RunnerCrashed, "it ends every worker"), Item: data,
		Runs:     []envelope.RunRecord{{Host: "host", At: now}},
		QueuedAt: now, DeadLetteredAt: now,
	}
}

func numbers(p store.DeadLetterPage) string {
	out := ""
	for _, l := range p.DeadLetters {
		out += fmt.Sprint(l.Seq, " ")
	}
	return out
}

func (d *letterBed) list(t *testing.T, q store.DeadLetterQuery) store.DeadLetterPage {
	t.Helper()
	page, err := d.List(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	return page
}

func TestDeadLettersAreListedAndRead(t *testing.T) {
	t.Parallel()
	d := newLetterBed(t)
	if page := d.list(t, store.DeadLetterQuery{}); len(page.DeadLetters) != 0 || page.Next != 0 {
		t.Errorf("an empty store lists %+v", page)
	}
	for i := range 5 {
		d.deadLetter(t, item(fmt.Sprint(i)))
	}
	other := bus.Delivery{Seq: 1, Epoch: "other"}
	d.store(t, letterOf("other", []byte("garbage")), other)
	for name, test := range map[string]struct {
		query store.DeadLetterQuery
		want  string
		next  uint64
	}{
		"all":            {store.DeadLetterQuery{}, "1 2 3 4 5 6 ", 0},
		"of one stage":   {store.DeadLetterQuery{Stage: stage}, "1 2 3 4 5 ", 0},
		"of another":     {store.DeadLetterQuery{Stage: "other"}, "6 ", 0},
		"first page":     {store.DeadLetterQuery{Limit: 2}, "1 2 ", 3},
		"second page":    {store.DeadLetterQuery{Limit: 2, From: 3}, "3 4 ", 5},
		"a page and end": {store.DeadLetterQuery{Stage: stage, Limit: 5}, "1 2 3 4 5 ", 0},
	} {
		if page := d.list(t, test.query); numbers(page) != test.want || page.Next != test.next {
			t.Errorf("%s: lists %sand goes on at %d, want %sand %d", name, numbers(page), page.Next, test.want, test.next)
		}
	}
	letter, err := d.Get(t.Context(), 2)
	if err != nil {
		t.Fatal(err)
	}
	if letter.Stage != stage || letter.Host != "host" || letter.Fault.Reason != fault.RunnerCrashed || len(letter.Runs) != 1 || letter.Deliveries != 1 {
		t.Errorf("shows %+v", letter.DeadLetter)
	}
	e, err := envelope.Decode(letter.Item)
	if err != nil || string(e.Parts[0].Blob.Data) != "1" {
		t.Errorf("its item is %+v, %v", e, err)
	}
}

func TestReplayIsANewExecutionOfANewRequest(t *testing.T) {
	t.Parallel()
	d := newLetterBed(t)
	first := item("again")
	d.deadLetter(t, first)
	replayed, err := d.Replay(t.Context(), 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	delivery, e := d.next(t)
	switch {
	case e.RequestID != replayed.RequestID || e.ExecutionID != replayed.ExecutionID:
		t.Errorf("came as request %s, execution %s; said %+v", e.RequestID, e.ExecutionID, replayed)
	case e.RequestID == first.RequestID || e.ExecutionID == first.ExecutionID:
		t.Error("an id is the first execution's")
	case e.Position != 1 || string(e.Parts[0].Blob.Data) != "again" || e.Tenant != "tenant" || e.Priority != 3:
		t.Errorf("came as %+v", e)
	case e.IdempotencyKey != "":
		t.Error("it goes by the first request's idempotency key")
	}
	if timeout := e.Deadline.Sub(e.AdmittedAt); timeout != time.Minute || time.Until(e.Deadline) < 30*time.Second {
		t.Errorf("has until %s, %s after its admission", e.Deadline, timeout)
	}
	if err := delivery.Ack(); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Get(t.Context(), 1); !errors.Is(err, store.ErrNoDeadLetter) {
		t.Errorf("the dead letter after its replay: %v, want %v", err, store.ErrNoDeadLetter)
	}
}

func TestReplayedJobHasTheTokensOfItsBody(t *testing.T) {
	t.Parallel()
	d := newLetterBed(t)
	jobs := newJobs(t, d.bus, store.JobQueueSettings{})
	id, deadline := pipeline.NewJobID(queue), time.Now().Add(time.Hour)
	seq, _, err := jobs.Submit(t.Context(), id, "a", store.JobHeader{Deadline: deadline, Tokens: 5}, &meshv1.QueuedJob{
		Job:     &inferencev1.Job{Id: id.String(), AcceptedAt: timestamppb.Now(), Deadline: timestamppb.New(deadline)},
		Payload: &meshv1.QueuedJob_Http{Http: &inferencev1.HttpCall{Path: "/", Body: []byte(`{"max_tokens": 5000}`)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range []struct {
		body   []byte
		tokens int64
	}{{nil, 5005}, {[]byte(`{"max_tokens": 900}`), 905}} {
		if err := d.PutJob(t.Context(), seq, envelope.DeadLetter{Mesh: mesh, Queue: queue, Deliveries: i + 1, Fault: fault.New(fault.TargetFailed, "no")}); err != nil {
			t.Fatal(err)
		}
		replayed, err := d.Replay(t.Context(), uint64(i)+1, c.body)
		if err != nil {
			t.Fatal(err)
		}
		again, err := pipeline.ParseJobID(replayed.JobID)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := jobs.Queued(t.Context(), again, "a"); err != nil || got.Tokens != c.tokens {
			t.Errorf("body %q: %d tokens, %v, want %d", c.body, got.Tokens, err, c.tokens)
		}
	}
}

func TestLargeJobTakesNoPlaceOfOtherDeadLetters(t *testing.T) {
	t.Parallel()
	d := newLetterBed(t)
	small := store.NewDeadLetters(d.bus, store.Settings{MaxBytes: 64 << 10})
	jobs := newJobs(t, d.bus, store.JobQueueSettings{})
	for i, size := range []int{10, 80 << 10} {
		id, deadline := pipeline.NewJobID(queue), time.Now().Add(time.Hour)
		seq, _, err := jobs.Submit(t.Context(), id, "a", store.JobHeader{Deadline: deadline}, &meshv1.QueuedJob{
			Job:     &inferencev1.Job{Id: id.String(), AcceptedAt: timestamppb.Now(), Deadline: timestamppb.New(deadline)},
			Payload: &meshv1.QueuedJob_Http{Http: &inferencev1.HttpCall{Path: "/", Body: make([]byte, size)}},
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := small.PutJob(t.Context(), seq, envelope.DeadLetter{Mesh: mesh, Queue: queue, Deliveries: i + 1, Fault: fault.New(fault.TargetFailed, "no")}); err != nil {
			t.Fatal(err)
		}
	}
	for seq, hasItem := range map[uint64]bool{1: true, 2: false} {
		if got, err := small.Get(t.Context(), seq); err != nil || (len(got.Item) > 0) != hasItem {
			t.Errorf("dead letter %d has %d bytes, %v", seq, len(got.Item), err)
		}
	}
}

func TestItemsThatHostsRefuseAreNotReplayed(t *testing.T) {
	t.Parallel()
	d := newLetterBed(t)
	seq := uint64(0)
	for name, message := range map[string][]byte{
		"no item":             []byte("garbage"),
		"nothing":             nil,
		"of another mesh":     encoded(t, func(e *envelope.Envelope) { e.Mesh = "other" }),
		"of another stage":    encoded(t, func(e *envelope.Envelope) { e.Position = 0 }),
		"without any time":    encoded(t, func(e *envelope.Envelope) { e.Deadline = e.AdmittedAt }),
		"admitted afterwards": encoded(t, func(e *envelope.Envelope) { e.AdmittedAt = time.Now() }),
	} {
		seq++
		d.store(t, letterOf(stage, message), bus.Delivery{Seq: seq})
		if _, err := d.Replay(t.Context(), seq, nil); !errors.Is(err, store.ErrNotReplayable) {
			t.Errorf("%s: got %v, want %v", name, err, store.ErrNotReplayable)
		}
		if _, err := d.Get(t.Context(), seq); err != nil {
			t.Errorf("%s: the dead letter is gone: %v", name, err)
		}
	}
}

func encoded(t *testing.T, edit func(*envelope.Envelope)) []byte {
	t.Helper()
	e := item("")
	edit(e)
	data, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// Two callers replay at once, as one does who missed the first answer.
func TestReplayMayBeRepeated(t *testing.T) {
	t.Parallel()
	d := newLetterBed(t)
	d.deadLetter(t, item("again"))
	type answer struct {
		store.Replayed
		err error
	}
	answers := make(chan answer, 2)
	for range 2 {
		go func() {
			r, err := d.Replay(t.Context(), 1, nil)
			answers <- answer{r, err}
		}()
	}
	delivery, e := d.next(t)
	for range 2 {
		a := testbed.Receive(t, "replay", answers)
		if a.err == nil && a.RequestID != e.RequestID || a.err != nil && !errors.Is(a.err, store.ErrNoDeadLetter) {
			t.Errorf("said %+v, %v, came as request %s", a.Replayed, a.err, e.RequestID)
		}
	}
	if err := delivery.Ack(); err != nil {
		t.Fatal(err)
	}
	delivery.Release()
	if _, err := d.Replay(t.Context(), 1, nil); !errors.Is(err, store.ErrNoDeadLetter) {
		t.Errorf("a deleted dead letter: %v", err)
	}
	// It is still there after a replay whose delete failed. With another payload it is another request.
	d.deadLetter(t, item("again"))
	edited, err := d.Replay(t.Context(), 2, []byte("edited"))
	if err != nil || edited.RequestID == e.RequestID {
		t.Errorf("with another payload: %+v, %v", edited, err)
	}
	delivery, e = d.next(t)
	if e.RequestID != edited.RequestID || string(e.Parts[0].Blob.Data) != "edited" {
		t.Errorf("with another payload it came as %+v", e)
	}
	if err := delivery.Ack(); err != nil {
		t.Fatal(err)
	}
	delivery.Release()
	select {
	case again := <-d.deliveries:
		t.Errorf("it came twice: %+v", again)
	default:
	}
}

// A replay mints a deadline, which hosts go by.
func TestReplayNeedsTheBrokersTime(t *testing.T) {
	t.Parallel()
	d := newLetterBed(t, func(s *bus.Settings) { s.Now = func() time.Time { return time.Now().Add(time.Second) } })
	e := item("")
	data, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	d.store(t, letterOf(stage, data), bus.Delivery{Seq: 1})
	if _, err := d.Replay(t.Context(), 1, nil); fault.From(err).Reason != fault.NoCapacity || !strings.Contains(err.Error(), "clock") {
		t.Errorf("got %v", err)
	}
}

func TestReplayReturnsTheFaultOfTheQueue(t *testing.T) {
	t.Parallel()
	d := newLetterBed(t)
	e := item("")
	e.Route[1].Stage = "nowhere"
	data, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	d.store(t, letterOf("nowhere", data), bus.Delivery{Seq: 1})
	if _, err := d.Replay(t.Context(), 1, nil); fault.From(err).Reason != fault.NoCapacity || !errors.Is(err, bus.ErrNoQueue) {
		t.Errorf("without a queue: %v", err)
	}
	if _, err := d.bus.EnsureQueue(t.Context(), bus.QueueSettings{
		Stage: "nowhere", Durability: pipeline.File, MaxItems: 1, MaxBytes: 1 << 20, AckWait: time.Minute,
	}); err != nil {
		t.Fatal(err)
	}
	e.ExecutionID = pipeline.ExecutionID(uuid.NewString())
	m, err := d.bus.Item(e)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.bus.PublishAndWait(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Replay(t.Context(), 1, nil); fault.From(err).Reason != fault.QueueFull {
		t.Errorf("with a full queue: %v", err)
	}
	if _, err := d.Get(t.Context(), 1); err != nil {
		t.Errorf("the dead letter is gone: %v", err)
	}
}

func TestDeletedDeadLetterIsGone(t *testing.T) {
	t.Parallel()
	d := newLetterBed(t)
	d.deadLetter(t, item(""))
	if err := d.Delete(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{"again": d.Delete(t.Context(), 1), "never there": d.Delete(t.Context(), 99)} {
		if !errors.Is(err, store.ErrNoDeadLetter) {
			t.Errorf("%s: %v, want %v", what, err, store.ErrNoDeadLetter)
		}
	}
	if page := d.list(t, store.DeadLetterQuery{}); len(page.DeadLetters) != 0 {
		t.Errorf("lists %+v", page)
	}
}

func TestGarbageAmongDeadLettersIsListedByNumber(t *testing.T) {
	t.Parallel()
	d := newLetterBed(t)
	d.deadLetter(t, item(""))
	if _, err := d.bus.JetStream().Publish(t.Context(), d.bus.DeadLetterSubject(stage), []byte("\xff")); err != nil {
		t.Fatal(err)
	}
	if page := d.list(t, store.DeadLetterQuery{}); len(page.DeadLetters) != 1 || !slices.Equal(page.Unreadable, []uint64{2}) {
		t.Errorf("lists %+v", page)
	}
	if _, err := d.Get(t.Context(), 2); !errors.Is(err, store.ErrUnreadable) {
		t.Errorf("shows garbage: %v", err)
	}
	if _, err := d.Replay(t.Context(), 2, nil); !errors.Is(err, store.ErrNotReplayable) {
		t.Errorf("replays garbage: %v", err)
	}
	if err := d.Delete(t.Context(), 2); err != nil {
		t.Error(err)
	}
	if page := d.list(t, store.DeadLetterQuery{}); len(page.DeadLetters) != 1 || len(page.Unreadable) != 0 {
		t.Errorf("lists %+v", page)
	}
}

func TestDeadLettersWithoutAStream(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	letters := store.NewDeadLetters(b, settings)
	if page, err := letters.List(t.Context(), store.DeadLetterQuery{}); err != nil || len(page.DeadLetters) != 0 {
		t.Errorf("lists %+v, %v", page, err)
	}
	if _, err := letters.Get(t.Context(), 1); !errors.Is(err, store.ErrNoDeadLetter) {
		t.Errorf("shows %v, want %v", err, store.ErrNoDeadLetter)
	}
	m, err := letters.DeadLetter(letterOf(stage, nil), bus.Delivery{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.PublishAndWait(t.Context(), m); !errors.Is(err, bus.ErrNoDeadLetters) {
		t.Errorf("send: %v, want %v", err, bus.ErrNoDeadLetters)
	}
}

func TestPagesAreBounded(t *testing.T) {
	t.Parallel()
	d := newLetterBed(t)
	const more = store.MaxPageSize + 5
	for i := range uint64(more) {
		d.store(t, letterOf(stage, nil), bus.Delivery{Seq: i})
	}
	page := d.list(t, store.DeadLetterQuery{Limit: 10 * more})
	if len(page.DeadLetters) != store.MaxPageSize || page.Next != store.MaxPageSize+1 {
		t.Errorf("lists %d, then %d", len(page.DeadLetters), page.Next)
	}
	if page = d.list(t, store.DeadLetterQuery{From: page.Next}); len(page.DeadLetters) != 5 || page.Next != 0 {
		t.Errorf("then lists %d, then %d", len(page.DeadLetters), page.Next)
	}
	// Beyond its bytes a page ends too, and never without a dead letter.
	const large = 6 << 20
	for i := range uint64(7) {
		d.store(t, letterOf("other", make([]byte, large)), bus.Delivery{Seq: i, Epoch: "other"})
	}
	page = d.list(t, store.DeadLetterQuery{Stage: "other"})
	if n := len(page.DeadLetters); n != store.MaxPageBytes/large+1 || page.Next == 0 {
		t.Errorf("lists %d of %d bytes, then %d", n, large, page.Next)
	}
	if page = d.list(t, store.DeadLetterQuery{Stage: "other", From: page.Next}); len(page.DeadLetters) != 1 || page.Next != 0 {
		t.Errorf("then lists %d, then %d", len(page.DeadLetters), page.Next)
	}
}

func TestGarbageCountsTowardsThePage(t *testing.T) {
	t.Parallel()
	d := newLetterBed(t)
	for range store.MaxPageSize + 1 {
		if _, err := d.bus.JetStream().PublishAsync(d.bus.DeadLetterSubject(stage), []byte("\xff")); err != nil {
			t.Fatal(err)
		}
	}
	testbed.Receive(t, "the garbage is stored", d.bus.JetStream().PublishAsyncComplete())
	page := d.list(t, store.DeadLetterQuery{Limit: 1})
	if len(page.Unreadable) != store.MaxPageSize || page.Next != store.MaxPageSize+1 {
		t.Errorf("lists %d, then %d", len(page.Unreadable), page.Next)
	}
}

func TestDeadLettersFailAtOnceWithoutTheBroker(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	letters := store.NewDeadLetters(b, settings)
	if err := letters.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	broker.Stop()
	testbed.Eventually(t, "the connection is lost", func() bool { return !b.Connected() })
	begin := time.Now()
	_, list := letters.List(t.Context(), store.DeadLetterQuery{})
	_, get := letters.Get(t.Context(), 1)
	_, replay := letters.Replay(t.Context(), 1, nil)
	for what, err := range map[string]error{"list": list, "get": get, "replay": replay, "delete": letters.Delete(t.Context(), 1)} {
		if f := fault.From(err); f.Reason != fault.BrokerUnavailable || f.RetryAfter <= 0 {
			t.Errorf("%s: got %v", what, err)
		}
	}
	if took := time.Since(begin); took > 4*time.Second { // the timeout of a request is 5 s
		t.Errorf("that took %s", took)
	}
}
