package cli_test

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/google/uuid"
	"google.golang.org/protobuf/encoding/protojson"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/adminapi"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

const (
	doomed   pipeline.MeshName  = "doomed"
	poisoned pipeline.StageName = "poisoned"
)

// doomedMesh is a mesh of one stage with dead letters.
type doomedMesh struct {
	t      *testing.T
	broker *testbed.Broker
	bus    *bus.Bus
	// address and admin are the ports of its gateway, once it is open.
	address, admin string
}

func newDoomed(t *testing.T) *doomedMesh {
	t.Helper()
	broker := testbed.StartBroker(t)
	return &doomedMesh{t: t, broker: broker, bus: broker.Connect(doomed)}
}

// doom puts items into the stage's queue that look as if they had ended the
// processes that ran them: they were delivered, and their runs are on record.
func (g *doomedMesh) doom(texts ...string) []*envelope.Envelope {
	g.t.Helper()
	book := store.NewRuns(g.bus, store.Settings{})
	if err := book.Ensure(g.t.Context()); err != nil {
		g.t.Fatal(err)
	}
	items := make([]*envelope.Envelope, len(texts))
	for i, text := range texts {
		items[i] = &envelope.Envelope{
			Mesh: doomed, Gateway: "gone", Pipeline: "stage:poisoned", Metadata: map[string]string{"user": "u\x1b[31m"},
			RequestID: pipeline.RequestID(uuid.NewString()), ExecutionID: pipeline.ExecutionID(uuid.NewString()),
			Route:      []pipeline.Hop{{Step: "poisoned", Stage: poisoned}},
			Durability: pipeline.File, AdmittedAt: time.Now(), Deadline: time.Now().Add(10 * time.Minute),
			Parts: []payload.Part{payload.OfBlob("", "text/plain", []byte(text))},
		}
		for n := range stagehost.DefaultCrashLimit {
			if _, err := book.AddRun(g.t.Context(), items[i], envelope.RunRecord{Host: "crashed", At: time.Now(), Died: n > 0}); err != nil {
				g.t.Fatal(err)
			}
		}
	}
	g.deliver(items)
	return items
}

// deliver queues the items, takes them as a host does, and gives them back.
func (g *doomedMesh) deliver(items []*envelope.Envelope) {
	g.t.Helper()
	info, err := g.bus.EnsureQueue(g.t.Context(), bus.QueueSettings{
		Stage: poisoned, Durability: pipeline.File, MaxItems: 1000, MaxBytes: 64 << 20, AckWait: time.Minute, MaxDeliver: 20,
	})
	if err != nil {
		g.t.Fatal(err)
	}
	for _, e := range items {
		m, err := g.bus.Item(e)
		if err != nil {
			g.t.Fatal(err)
		}
		if _, err := g.bus.PublishAndWait(g.t.Context(), m); err != nil {
			g.t.Fatal(err)
		}
	}
	came := make(chan bus.Delivery, len(items))
	p, err := g.bus.Pull(bus.PullSettings{
		Stage: poisoned, Durabilities: []pipeline.Durability{pipeline.File}, Bound: 64, AckWait: time.Minute,
		Malformed: func(err error) { g.t.Error(err) }, QueueMissing: func() { g.t.Error("no queue") },
	}, func(d bus.Delivery) { came <- d })
	if err != nil {
		g.t.Fatal(err)
	}
	leave := sync.OnceFunc(p.Close)
	defer leave()
	p.Use(pipeline.File, info.Epoch)
	taken := make([]bus.Delivery, len(items))
	for i := range taken {
		taken[i] = testbed.Receive(g.t, "an item", came)
	}
	p.Use(pipeline.File, "")
	ctx, cancel := context.WithTimeout(g.t.Context(), testbed.Patience)
	defer cancel()
	if err := p.Drain(ctx); err != nil {
		g.t.Fatal(err)
	}
	// The broker learns of the end first: it would answer an open pull with the naked
	// items, which nobody would receive.
	leave()
	// A host that hears that they were given back does not suspect them.
	naks, client := make(chan *nats.Msg, len(items)), g.broker.Client()
	if _, err := client.ChanSubscribe("$JS.EVENT.ADVISORY.CONSUMER.MSG_NAKED.>", naks); err != nil {
		g.t.Fatal(err)
	}
	if err := client.Flush(); err != nil {
		g.t.Fatal(err)
	}
	for _, delivery := range taken {
		if err := delivery.Nak(0); err != nil {
			g.t.Fatal(err)
		}
	}
	for range taken {
		testbed.Receive(g.t, "an announced nak", naks)
	}
}

// open starts the mesh and waits for that many dead letters.
func (g *doomedMesh) open(dead int, edits ...func(*gateway.Settings)) {
	g.t.Helper()
	s := stagemesh.Settings{Mesh: doomed, NATS: meshfile.NATS{URL: g.broker.URL()}, Gateway: gateway.Settings{
		Config: gateway.Config{Listen: "127.0.0.1:0", Admin: gateway.Admin{Listen: "127.0.0.1:0"}},
	}}
	for _, edit := range edits {
		edit(&s.Gateway)
	}
	m, err := stagemesh.New(s)
	if err != nil {
		g.t.Fatal(err)
	}
	if err := m.AddStage(stagemesh.Stage{Name: poisoned, Runner: inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
		return item.Inputs, nil
	})}); err != nil {
		g.t.Fatal(err)
	}
	g.address = meshtest.Start(g.t, m).URL()
	g.admin = m.AdminURL()
	letters := store.NewDeadLetters(g.bus, store.Settings{})
	testbed.Eventually(g.t, "the mesh gives up", func() bool {
		page, err := letters.List(g.t.Context(), store.DeadLetterQuery{})
		return err == nil && len(page.DeadLetters) == dead
	})
}

// bytes puts bytes that are no item into the stage's queue.
func (g *doomedMesh) bytes(text string) {
	g.t.Helper()
	if _, err := g.broker.Client().Request(g.bus.Stage(poisoned, pipeline.File, pipeline.Normal), []byte(text), testbed.Patience); err != nil {
		g.t.Fatal(err)
	}
}

// garbage stores a message that is not a dead letter among them.
func (g *doomedMesh) garbage() {
	g.t.Helper()
	if _, err := g.bus.JetStream().Publish(g.t.Context(), g.bus.DeadLetterSubject(poisoned), []byte("\xff")); err != nil {
		g.t.Fatal(err)
	}
}

// run returns what the verb prints, its hints, and how it fails.
func (g *doomedMesh) run(args ...string) (out, hints string, err error) {
	g.t.Helper()
	var stdout, stderr testbed.Log
	err = command(g.t.Context(), strings.NewReader(""), &stdout, &stderr, append([]string{"dead-letters"}, append(args, "-a", g.admin)...)...)
	return stdout.String(), stderr.String(), err
}

func (g *doomedMesh) must(args ...string) (out, hints string) {
	g.t.Helper()
	out, hints, err := g.run(args...)
	if err != nil {
		g.t.Fatalf("%v: %v", args, err)
	}
	return out, hints
}

const anyID = `[0-9a-f]{8}-[0-9a-f]{4}-\d[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}`

func TestDeadLettersAreListedShownAndReplayed(t *testing.T) {
	t.Parallel()
	g := newDoomed(t)
	e := g.doom("poison")[0]
	g.open(1)
	out, hints := g.must("list")
	if hints != "" {
		t.Errorf("it hints %s", hints)
	}
	match(t, out, `NUMBER +AGE +STAGE +PIPELINE +REASON +DELIVERIES +REQUEST`, `1 +\d+s +poisoned +stage:poisoned +RUNNER_CRASHED +2 +`+string(e.RequestID))
	out, _ = g.must("show", "1")
	match(t, out, `dead letter 1`,
		`  failed +\d{4}-.* UTC, \d+s ago, at stage poisoned; host `+anyID+` gave up`,
		`  reason +RUNNER_CRASHED: the process that ran the item alone ended 2 times, .*`,
		`  queued +.*, file, priority 0; delivered 2 times`,
		`  runs +began .* on host crashed and did not end`, ` +began .* on host crashed and ended with its worker`,
		`  message +\d+ bytes`,
		`  request +`+string(e.RequestID)+`, execution `+string(e.ExecutionID),
		`  pipeline +stage:poisoned: \[poisoned\]`,
		`  deadline +.*, 10m0s after it was admitted by gateway gone`,
		`  metadata +user=u \[31m`,
		`  inputs +\(no name\): text/plain, 6 bytes`,
		`  replay +stagemesh dead-letters replay 1`)
	out, _ = g.must("replay", "1")
	words := regexp.MustCompile(`^dead letter 1 runs again as request (` + anyID + `): stagemesh (get result (\S+) --wait \S+)\n$`).FindStringSubmatch(out)
	if words == nil || words[1] != words[3] || words[1] == string(e.RequestID) {
		t.Fatalf("replay prints %q", out)
	}
	answer, err := run(t, append(strings.Fields(words[2]), "-a", g.address)...)
	if err != nil {
		t.Fatal(err)
	}
	match(t, answer, `REQUEST +TIME +ANSWER`, words[1]+` +.* +poison`)
	if out, hints = g.must("list"); out != "" || hints != "there are no dead letters\n" {
		t.Errorf("lists %q, %q", out, hints)
	}
	for _, verb := range []string{"replay", "show", "delete"} {
		if out, _, err := g.run(verb, "1"); err == nil || !strings.HasPrefix(err.Error(), "NOT_FOUND: there is no dead letter 1: ") || out != "" {
			t.Errorf("%s again: %q, %v", verb, out, err)
		}
	}
}

func TestDeadLettersArePrintedAsJSON(t *testing.T) {
	t.Parallel()
	g := newDoomed(t)
	e := g.doom("poison")[0]
	g.open(1)
	out, _ := g.must("list", "--json")
	var summary adminv1.DeadLetterSummary
	if err := protojson.Unmarshal([]byte(out), &summary); err != nil || summary.GetRequestId() != string(e.RequestID) || strings.Count(out, "\n") != 1 {
		t.Errorf("list: %s, %v", out, err)
	}
	raw, body := filepath.Join(t.TempDir(), "raw"), filepath.Join(t.TempDir(), "body")
	out, _ = g.must("show", "1", "--json", "--raw", raw, "--body", body)
	var letter adminv1.DeadLetter
	if err := protojson.Unmarshal([]byte(out), &letter); err != nil || letter.GetItem().GetMetadata()["user"] != "u\x1b[31m" || letter.Body != nil {
		t.Errorf("show: %s, %v", out, err)
	}
	if data := testbed.ReadFile(t, body); string(data) != "poison" {
		t.Errorf("the payload is %q", data)
	}
	if data, err := os.ReadFile(raw); err != nil || uint64(len(data)) != letter.GetSummary().GetSize() {
		t.Errorf("the message: %d bytes, %v", len(data), err)
	} else if again, err := envelope.Decode(data); err != nil || again.RequestID != e.RequestID {
		t.Errorf("the message: %v, %v", again, err)
	}
	out, _, err := g.run("replay", "1", "2", "--json")
	var done [2]struct{ Seq, RequestID, Deadline, Error string }
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != len(done) || !errors.Is(err, cli.ErrDeadLetters) || err.Error() != "some dead letters are unchanged: 1 of 2" {
		t.Fatalf("replay: %s, %v", out, err)
	}
	for i, line := range lines {
		if err := json.Unmarshal([]byte(line), &done[i]); err != nil {
			t.Error(err)
		}
	}
	if done[0].Seq != "1" || done[0].RequestID == "" || done[0].Deadline == "" || done[1].Seq != "2" || !strings.HasPrefix(done[1].Error, "NOT_FOUND: ") {
		t.Errorf("replay: %+v", done)
	}
}

func TestAllDeadLettersOfAStageAreReplayedOrDeleted(t *testing.T) {
	t.Parallel()
	g := newDoomed(t)
	g.doom("one", "two", "three")
	g.open(3)
	g.bytes("no item")
	letters := store.NewDeadLetters(g.bus, store.Settings{})
	testbed.Eventually(t, "the bytes are a dead letter", func() bool {
		_, err := letters.Get(t.Context(), 4)
		return err == nil
	})
	g.garbage()
	_, hints := g.must("list", "--stage", string(poisoned), "--limit", "2")
	if hints != "there are more: --from 3 goes on, --all lists all\n" {
		t.Errorf("it hints %s", hints)
	}
	out, hints := g.must("list", "--from", "2", "--all")
	match(t, out, `NUMBER .*`, `2 .*`, `3 .*`, `4 +\d+s +poisoned +- +INVALID_REQUEST +1 +-`)
	if hints != "1 message in the list cannot be read; stagemesh dead-letters delete 5 removes them\n" {
		t.Errorf("it hints %s", hints)
	}
	out, _ = g.must("show", "4")
	if !strings.Contains(out, "replay   not possible: the dead letter holds no item to run again: ") {
		t.Errorf("shows %s", out)
	}
	out, hints = g.must("replay", "--all", "--stage", string(poisoned), "--limit", "2")
	match(t, out, `dead letter 1 runs again .*`, `dead letter 2 runs again .*`)
	if hints != "stage poisoned has more than the 2 of --limit\n" {
		t.Errorf("it hints %s", hints)
	}
	out, hints = g.must("replay", "--all", "--stage", string(poisoned))
	match(t, out, `dead letter 3 runs again .*`)
	if hints != "1 dead letter of stage poisoned cannot be replayed; stagemesh dead-letters show says why: 4\n" {
		t.Errorf("it hints %s", hints)
	}
	if out, hints = g.must("delete", "--all", "--stage", "other"); out != "" || hints != "stage other has no dead letters to delete\n" {
		t.Errorf("of another: %q, %q", out, hints)
	}
	out, _ = g.must("delete", "--all", "--stage", string(poisoned))
	match(t, out, `dead letter 4 is deleted`, `dead letter 5 is deleted`)
	if _, hints = g.must("list", "--all"); hints != "there are no dead letters\n" {
		t.Errorf("it hints %s", hints)
	}
}

func TestLongListsAreComplete(t *testing.T) {
	t.Parallel()
	g := newDoomed(t)
	letters := store.NewDeadLetters(g.bus, store.Settings{})
	if err := letters.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	const many = store.MaxPageSize + 2
	for i := range uint64(many) {
		m, err := letters.DeadLetter(&envelope.DeadLetter{
			Mesh: doomed, Stage: poisoned, Fault: fault.New(fault.RunnerCrashed, ""), QueuedAt: time.Now(), DeadLetteredAt: time.Now(),
		}, bus.Delivery{Seq: i})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := g.bus.PublishAndWait(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	g.open(store.DefaultPageSize)
	for name, test := range map[string]struct {
		args  []string
		lines int
	}{
		"unasked":         {nil, 50},
		"more than pages": {[]string{"--limit", "1001"}, 1001},
		"all":             {[]string{"--all"}, many},
		"the last":        {[]string{"--from", "1002"}, 1},
	} {
		if out, _ := g.must(append([]string{"list"}, test.args...)...); strings.Count(out, "\n") != test.lines+1 || strings.Count(out, "NUMBER") != 1 {
			t.Errorf("%s: lists %d lines", name, strings.Count(out, "\n"))
		}
	}
}

func TestDeadLetterVerbsCheckTheirArguments(t *testing.T) {
	t.Parallel()
	empty := testbed.WriteFile(t, "empty", "\n")
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"a verb that is none":      {[]string{"nope"}, `unknown command "nope" for "stagemesh dead-letters"`},
		"show of none":             {[]string{"show"}, "give one NUMBER of a dead letter; see stagemesh dead-letters show --help"},
		"show of two":              {[]string{"show", "1", "2"}, "give one NUMBER of a dead letter; see "},
		"show of no number":        {[]string{"show", "x"}, `NUMBER: "x" is not the number of a dead letter, such as 7; see stagemesh dead-letters show --help`},
		"show of zero":             {[]string{"show", "0"}, `NUMBER: "0" is not the number`},
		"replay of none":           {[]string{"replay"}, "give the NUMBER of a dead letter or more, or --all with --stage or --queue; see stagemesh dead-letters replay --help"},
		"replay of no number":      {[]string{"replay", "1", "-1x"}, "unknown shorthand flag: '1' in -1x; see "},
		"delete of none":           {[]string{"delete"}, "give the NUMBER of a dead letter or more, or --all with --stage or --queue; see stagemesh dead-letters delete --help"},
		"delete of all":            {[]string{"delete", "--all"}, "--all: needs a --stage or a --queue; see "},
		"delete of a stage":        {[]string{"delete", "--stage", "a"}, "--stage and --queue: go with --all; see "},
		"delete of both":           {[]string{"delete", "1", "--all", "--stage", "a"}, "give NUMBERs or --all, not both; see "},
		"delete of no stage":       {[]string{"delete", "--all", "--stage", "A"}, `--stage: stage name "A": use `},
		"delete within no limit":   {[]string{"delete", "--all", "--stage", "a", "--limit", "0"}, "--limit: 0 is not at least 1; see "},
		"list within no limit":     {[]string{"list", "--limit", "0"}, "--limit: 0 is not at least 1; see "},
		"list of no stage":         {[]string{"list", "--stage", "A"}, `--stage: stage name "A": use `},
		"list nowhere":             {[]string{"list", "-a", "ftp://x"}, `--admin: "ftp://x" is not an address such as http://127.0.0.1:9080`},
		"list at no port":          {[]string{"list", "-a", "mesh:99999"}, `--admin: "http://mesh:99999" is not an address such as `},
		"list with a query":        {[]string{"list", "-a", "http://mesh:80?x=1"}, `--admin: "http://mesh:80?x=1" is not an address such as `},
		"list of no mesh":          {[]string{"list", "-a", "127.0.0.1:1"}, "cannot connect to http://127.0.0.1:1: "},
		"a token that is missing":  {[]string{"list", "--token-file", empty + "2"}, "--token-file: open " + empty + "2: no such file"},
		"a token that is none":     {[]string{"list", "--token-file", empty}, "--token-file: " + empty + ": there is no token in it"},
		"a certificate that isn't": {[]string{"list", "--ca-file", empty}, "--ca-file: " + empty + ": there is no certificate in it"},
	} {
		out, err := run(t, append([]string{"dead-letters"}, test.args...)...)
		if err == nil || !strings.HasPrefix(err.Error(), test.want) || out != "" {
			t.Errorf("%s: got %q, %v, want %s", name, out, err, test.want)
		}
	}
}

func TestDeadLettersNeedTheToken(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	for name, text := range map[string]string{"token": "open-sesame", "wrong": "sesame"} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	g := newDoomed(t)
	g.open(0, func(s *gateway.Settings) { s.Admin.TokenFile = filepath.Join(folder, "token") })
	if _, hints := g.must("list", "--token-file", filepath.Join(folder, "token")); hints != "there are no dead letters\n" {
		t.Errorf("it hints %s", hints)
	}
	if _, _, err := g.run("list", "--token-file", filepath.Join(folder, "wrong")); err == nil || !strings.HasPrefix(err.Error(), "UNAUTHENTICATED: this is not a token in the gateway's gateway.admin.token_file; the one in --token-file ") {
		t.Errorf("with another: %v", err)
	}
	if _, _, err := g.run("list"); err == nil || !strings.HasPrefix(err.Error(), "UNAUTHENTICATED: ") || !strings.HasSuffix(err.Error(), "; give it with --token-file") {
		t.Errorf("without one: %v", err)
	}
}

func TestCommandTrustsTheCAFile(t *testing.T) {
	t.Parallel()
	g := newDoomed(t)
	none, err := pipelines.New(pipelines.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(adminapi.Handler(adminapi.Settings{DeadLetters: store.NewDeadLetters(g.bus, store.Settings{}), Pipelines: none}))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.StartTLS()
	t.Cleanup(server.Close)
	g.admin = server.URL
	if _, _, err := g.run("list"); err == nil || !strings.HasSuffix(err.Error(), "; --ca-file names a file with the certificate of who vouches for it") {
		t.Errorf("a stranger: %v", err)
	}
	ca := testbed.WriteFile(t, "ca.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	if _, hints := g.must("list", "--ca-file", ca); hints != "there are no dead letters\n" {
		t.Errorf("it hints %s", hints)
	}
}

func TestPublicPortIsNotAnAdminPort(t *testing.T) {
	t.Parallel()
	g := newDoomed(t)
	g.open(0)
	if _, err := run(t, "dead-letters", "list", "-a", g.address); err == nil || !strings.Contains(err.Error(), "is "+g.address+" an admin port?") {
		t.Errorf("got %v", err)
	}
}

func TestVerbsReportAMissingBroker(t *testing.T) {
	t.Parallel()
	g := newDoomed(t)
	g.open(0)
	g.broker.Stop()
	testbed.Eventually(t, "the gateway knows", func() bool {
		_, _, err := g.run("list")
		return err != nil
	})
	for _, args := range [][]string{{"list"}, {"show", "1"}, {"replay", "1"}, {"delete", "1"}, {"replay", "--all", "--stage", "a"}} {
		if _, _, err := g.run(args...); err == nil || !strings.HasPrefix(err.Error(), "BROKER_UNAVAILABLE: ") {
			t.Errorf("%v: got %v", args, err)
		}
	}
	if _, _, err := g.run("delete", "1", "2"); err == nil || !strings.HasPrefix(err.Error(), "dead letter 1: BROKER_UNAVAILABLE: ") || !strings.HasSuffix(err.Error(), "; stopped after 0 of 2") {
		t.Errorf("got %v", err)
	}
	g.broker.Restore()
}
