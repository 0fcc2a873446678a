package adminapi_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/adminapi"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

func TestDeadLettersAreServedOnEveryProtocol(t *testing.T) {
	t.Parallel()
	d := newBed(t)
	d.queue(1000)
	url := serve(t, adminapi.Settings{DeadLetters: d})
	for _, p := range protocols() {
		client := p.client(t, url)
		first := item(t)
		seq := d.storeMessage(d.encode(first))
		response, err := client.ListDeadLetters(t.Context(), connect.NewRequest(&adminv1.ListDeadLettersRequest{}))
		if err != nil || len(response.Msg.GetDeadLetters()) != 1 {
			t.Fatalf("%s: lists %v, %v", p.name, response, err)
		}
		s := response.Msg.GetDeadLetters()[0]
		if s.GetSeq() != seq || s.GetStage() != string(stage) || s.GetPipeline() != "pipeline" || s.GetRequestId() != string(first.RequestID) ||
			s.GetExecutionId() != string(first.ExecutionID) || s.GetReason() != "RUNNER_CRASHED" || s.GetMessage() != "it ends every worker" ||
			s.GetDeliveries() != 5 || s.GetCrashCount() != 2 || s.GetSize() != uint64(len(d.encode(first))) || !s.GetReplayable() ||
			time.Since(s.GetDeadLetteredAt().AsTime()) > time.Minute {
			t.Errorf("%s: lists %v", p.name, s)
		}
		dead, err := get(t, client, seq)
		if err != nil || !proto.Equal(dead.GetSummary(), s) {
			t.Errorf("%s: shows %v, %v", p.name, dead, err)
		}
		again, err := replay(t, client, seq)
		if err != nil || again.GetRequestId() == "" || again.GetRequestId() == string(first.RequestID) || time.Until(again.GetDeadline().AsTime()) < 30*time.Second || again.GetDeadLetterRemains() {
			t.Errorf("%s: replays as %v, %v", p.name, again, err)
		}
		_, err = replay(t, client, seq)
		expect(t, p.name+": a second replay", err, fault.NotFound)
		seq = d.storeMessage(nil)
		if err := deleteLetter(t, client, seq); err != nil {
			t.Errorf("%s: %v", p.name, err)
		}
		expect(t, p.name+": a second discard", deleteLetter(t, client, seq), fault.NotFound)
		_, err = get(t, client, seq)
		expect(t, p.name+": a deleted dead letter", err, fault.NotFound)
	}
}

func TestDeadLetterShowsAllFields(t *testing.T) {
	t.Parallel()
	d := newBed(t)
	client := open(t, d)
	e := item(t)
	dead, err := get(t, client, d.storeMessage(d.encode(e)))
	if err != nil {
		t.Fatal(err)
	}
	if f := dead.GetFault(); f.GetReason() != "RUNNER_CRASHED" || f.GetStage() != string(stage) || f.GetHost() != "host" || f.GetMetadata()["k"] != "v" {
		t.Errorf("fault %v", f)
	}
	if dead.GetHost() != "host" || dead.GetPriority() != 3 || len(dead.GetRuns()) != 2 || dead.GetRuns()[0].GetHost() != "crashed" ||
		dead.GetNotReplayable() != "" || dead.GetRawMessage() != nil {
		t.Errorf("dead letter %v", dead)
	}
	i := dead.GetItem()
	if i.GetTenant() != "tenant" || i.GetGateway() != "gateway" || i.GetPosition() != 1 || i.GetIdempotencyKey() != "key" ||
		i.GetMetadata()["user"] != "u" || i.GetTraceContext()["traceparent"] == "" || !i.GetDeadline().AsTime().Equal(e.Deadline) ||
		!i.GetAdmittedAt().AsTime().Equal(e.AdmittedAt) || len(i.GetTimings()) != 1 {
		t.Errorf("item %v", i)
	}
	if r := i.GetRoute(); len(r) != 2 || r[1].GetName() != "two" || r[1].GetStage() != string(stage) || r[1].GetModel().GetAlias() != "best" || r[1].GetParameters()["t"].GetDoubleValue() != 0.5 {
		t.Errorf("route %v", r)
	}
	p := i.GetParts()
	if len(p) != 2 || p[0].GetName() != "image" || p[0].GetBlob().GetContentType() != "image/png" || p[0].GetSize() != 5 ||
		p[1].GetTensor().GetDatatype() != "FP32" || len(p[1].GetTensor().GetShape()) != 2 || p[1].GetSize() != 8 || len(i.GetKept()) != 1 {
		t.Errorf("parts %v, kept %v", p, i.GetKept())
	}
}

func TestDeadLetterMessageIsLimitedToRequestedBytes(t *testing.T) {
	t.Parallel()
	d := newBed(t)
	client := open(t, d)
	seq := d.storeMessage([]byte("garbage"))
	for ask, want := range map[uint32]string{0: "", 3: "gar", 7: "garbage", 64 << 20: "garbage"} {
		response, err := client.GetDeadLetter(t.Context(), connect.NewRequest(&adminv1.GetDeadLetterRequest{Seq: seq, MessageBytes: ask}))
		if err != nil || string(response.Msg.GetDeadLetter().GetRawMessage()) != want {
			t.Errorf("%d bytes: got %v, %v", ask, response, err)
		}
	}
	_, err := client.GetDeadLetter(t.Context(), connect.NewRequest(&adminv1.GetDeadLetterRequest{Seq: seq, MessageBytes: 64<<20 + 1}))
	expect(t, "too many bytes", err, fault.InvalidRequest)
}

func TestDeadLetterGivesTheBodyThatAReplayReplaces(t *testing.T) {
	t.Parallel()
	d := newBed(t)
	client := open(t, d)
	one := func(blob string) []byte {
		e := item(t)
		e.Parts = []payload.Part{payload.OfBlob("text", "text/plain", []byte(blob))}
		return d.encode(e)
	}
	for name, test := range map[string]struct {
		message []byte
		most    uint32
		want    string
	}{
		"one blob":       {one("12345"), 5, "12345"},
		"an empty one":   {one(""), 1, ""},
		"not asked for":  {one("12345"), 0, "none"},
		"a larger one":   {one("12345"), 4, "none"},
		"several inputs": {d.encode(item(t)), 100, "none"},
		"no item":        {[]byte("garbage"), 100, "none"},
	} {
		response, err := client.GetDeadLetter(t.Context(), connect.NewRequest(&adminv1.GetDeadLetterRequest{Seq: d.storeMessage(test.message), BodyBytes: test.most}))
		if err != nil {
			t.Fatal(err)
		}
		got := "none"
		if body := response.Msg.GetDeadLetter().Body; body != nil {
			got = string(body)
		}
		if got != test.want {
			t.Errorf("%s: the body is %q, want %q", name, got, test.want)
		}
	}
	_, err := client.GetDeadLetter(t.Context(), connect.NewRequest(&adminv1.GetDeadLetterRequest{Seq: 1, BodyBytes: 64<<20 + 1}))
	expect(t, "too many bytes", err, fault.InvalidRequest)
}

func TestUndecodableItemIsShownButNotReplayed(t *testing.T) {
	t.Parallel()
	d := newBed(t)
	client := open(t, d)
	other := item(t)
	other.Mesh = "other"
	for name, test := range map[string]struct {
		message []byte
		item    bool
	}{"garbage": {[]byte("garbage"), false}, "nothing": {nil, false}, "an item of another mesh": {d.encode(other), true}} {
		seq := d.storeMessage(test.message)
		dead, err := get(t, client, seq)
		if err != nil || dead.GetNotReplayable() == "" || dead.GetSummary().GetReplayable() || (dead.GetItem() != nil) != test.item {
			t.Errorf("%s: shows %v, %v", name, dead, err)
		}
		_, err = replay(t, client, seq)
		expect(t, name, err, fault.NotReplayable)
		if _, err := get(t, client, seq); err != nil {
			t.Errorf("%s: the dead letter is deleted: %v", name, err)
		}
	}
}

// An invalid field of an item must not hide its dead letter.
func TestItemWithInvalidTimeIsShown(t *testing.T) {
	t.Parallel()
	d := newBed(t)
	var wire meshv1.Envelope
	if err := proto.Unmarshal(d.encode(item(t)), &wire); err != nil {
		t.Fatal(err)
	}
	wire.AdmittedAt = &timestamppb.Timestamp{Seconds: 1 << 60}
	data, err := proto.Marshal(&wire)
	if err != nil {
		t.Fatal(err)
	}
	url, seq := serve(t, adminapi.Settings{DeadLetters: d}), d.storeMessage(data)
	for _, p := range protocols() {
		if dead, err := get(t, p.client(t, url), seq); err != nil || dead.GetItem() == nil || dead.GetItem().GetAdmittedAt() != nil {
			t.Errorf("%s: shows %v, %v", p.name, dead, err)
		}
	}
}

func TestDeadLetterListsArePaged(t *testing.T) {
	t.Parallel()
	d := newBed(t)
	client := open(t, d)
	if got := list(t, client, &adminv1.ListDeadLettersRequest{}); got != "[] 0" {
		t.Errorf("an empty store lists %s", got)
	}
	const more = store.MaxPageSize + 3
	for range more {
		d.storeMessage(nil)
	}
	seen, next := 0, uint64(1)
	for next != 0 {
		response, err := client.ListDeadLetters(t.Context(), connect.NewRequest(&adminv1.ListDeadLettersRequest{From: next, Limit: 10 * more}))
		if err != nil || len(response.Msg.GetDeadLetters()) > store.MaxPageSize {
			t.Fatalf("lists %d, %v", len(response.Msg.GetDeadLetters()), err)
		}
		seen, next = seen+len(response.Msg.GetDeadLetters()), response.Msg.GetNext()
	}
	if seen != more {
		t.Errorf("lists %d dead letters, want %d", seen, more)
	}
	response, err := client.ListDeadLetters(t.Context(), connect.NewRequest(&adminv1.ListDeadLettersRequest{}))
	if err != nil || len(response.Msg.GetDeadLetters()) != store.DefaultPageSize || response.Msg.GetNext() != store.DefaultPageSize+1 {
		t.Errorf("without a limit it lists %d, then %d, %v", len(response.Msg.GetDeadLetters()), response.Msg.GetNext(), err)
	}
}

func TestListsFilterByStageAndSkipUnreadableRecords(t *testing.T) {
	t.Parallel()
	d := newBed(t)
	client := open(t, d)
	d.storeMessage(nil)
	d.garbage()
	d.storeMessage(nil, func(l *envelope.DeadLetter) { l.Stage = "other" })
	d.storeMessage(nil)
	for name, test := range map[string]struct {
		ask  *adminv1.ListDeadLettersRequest
		want string
	}{
		"all":           {&adminv1.ListDeadLettersRequest{}, "1 3 4 [2] 0"},
		"of a stage":    {&adminv1.ListDeadLettersRequest{Stage: string(stage)}, "1 4 [2] 0"},
		"of another":    {&adminv1.ListDeadLettersRequest{Stage: "other"}, "3 [] 0"},
		"of none":       {&adminv1.ListDeadLettersRequest{Stage: "none"}, "[] 0"},
		"the first":     {&adminv1.ListDeadLettersRequest{Limit: 1}, "1 [] 2"},
		"what comes on": {&adminv1.ListDeadLettersRequest{From: 2, Limit: 1}, "3 [2] 4"},
	} {
		if got := list(t, client, test.ask); got != test.want {
			t.Errorf("%s: lists %s, want %s", name, got, test.want)
		}
	}
	_, err := client.ListDeadLetters(t.Context(), connect.NewRequest(&adminv1.ListDeadLettersRequest{Stage: "No Stage"}))
	expect(t, "a stage that is none", err, fault.InvalidRequest)
	_, err = get(t, client, 2)
	if info := expect(t, "unreadable dead letter", err, fault.NotFound); info == nil || !strings.Contains(err.Error(), "deleting it removes it") {
		t.Errorf("the error is %v", err)
	}
	_, err = replay(t, client, 2)
	expect(t, "a replay of it", err, fault.NotReplayable)
	if err := deleteLetter(t, client, 2); err != nil {
		t.Error(err)
	}
	if got := list(t, client, &adminv1.ListDeadLettersRequest{}); got != "1 3 4 [] 0" {
		t.Errorf("lists %s", got)
	}
	for _, seq := range []uint64{0, 99, 1<<64 - 1} {
		_, err := get(t, client, seq)
		expect(t, "a number of nothing", err, fault.NotFound)
	}
}

func TestReplayReportsWhyQueueRejectsItem(t *testing.T) {
	t.Parallel()
	d := newBed(t)
	client := open(t, d)
	first, second := d.storeMessage(d.encode(item(t))), d.storeMessage(d.encode(item(t)))
	_, err := replay(t, client, first)
	if info := expect(t, "without a queue", err, fault.NoCapacity); info.GetMetadata()["stage"] != string(stage) {
		t.Errorf("the error is %v", info)
	}
	d.queue(1)
	if _, err = replay(t, client, first); err != nil {
		t.Fatal(err)
	}
	_, err = replay(t, client, second)
	expect(t, "with a full one", err, fault.QueueFull)
	if _, err := get(t, client, second); err != nil {
		t.Errorf("the dead letter is deleted: %v", err)
	}
}

func TestBrokerOutageIsReportedAtOnce(t *testing.T) {
	t.Parallel()
	d := newBed(t)
	client := open(t, d)
	d.broker.Stop()
	testbed.Eventually(t, "the connection is lost", func() bool { return !d.bus.Connected() })
	begin := time.Now()
	_, listed := client.ListDeadLetters(t.Context(), connect.NewRequest(&adminv1.ListDeadLettersRequest{}))
	_, shown := get(t, client, 1)
	_, replayed := replay(t, client, 1)
	for what, err := range map[string]error{"list": listed, "get": shown, "replay": replayed, "discard": deleteLetter(t, client, 1)} {
		expect(t, what, err, fault.BrokerUnavailable)
	}
	if took := time.Since(begin); took > 4*time.Second { // the timeout of a request is 5 s
		t.Errorf("it took %s", took)
	}
}

func TestReplayReportsThatDeadLetterRemains(t *testing.T) {
	t.Parallel()
	letters := &fake{replayed: store.Replayed{RequestID: "id"}, err: errors.New("still there")}
	got, err := replay(t, open(t, letters), 1)
	if err != nil || got.GetRequestId() != "id" || !got.GetDeadLetterRemains() {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestInternalErrorsAreLoggedNotReturned(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	url := serve(t, adminapi.Settings{DeadLetters: &fake{err: errors.New("the password is 1234")}, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	_, err := replay(t, protocols()[0].client(t, url), 1)
	expect(t, "replay", err, fault.Internal)
	if strings.Contains(err.Error(), "1234") || !strings.Contains(log.String(), "1234") {
		t.Errorf("the error is %v and the log %s", err, log.String())
	}
}

func TestConcurrentCallsAreBounded(t *testing.T) {
	t.Parallel()
	const atOnce = 8
	letters := &fake{inside: make(chan struct{}, atOnce), leave: make(chan struct{})}
	client := open(t, letters)
	ended := make(chan error, atOnce)
	for range atOnce {
		go func() {
			_, err := client.ListDeadLetters(t.Context(), connect.NewRequest(&adminv1.ListDeadLettersRequest{}))
			ended <- err
		}()
	}
	for range atOnce {
		testbed.Receive(t, "a call", letters.inside)
	}
	_, err := client.ListDeadLetters(t.Context(), connect.NewRequest(&adminv1.ListDeadLettersRequest{}))
	expect(t, "one more", err, fault.Overloaded)
	close(letters.leave)
	for range atOnce {
		if err := testbed.Receive(t, "an answer", ended); err != nil {
			t.Error(err)
		}
	}
	if _, err := client.ListDeadLetters(t.Context(), connect.NewRequest(&adminv1.ListDeadLettersRequest{})); err != nil {
		t.Errorf("after the calls ended: %v", err)
	}
}
