package librarytest

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// accountsInDocs returns the options of a broker with the accounts of docs/operations.md.
func accountsInDocs(t *testing.T) *server.Options {
	t.Helper()
	page := testbed.ReadFile(t, filepath.Join(repository, "docs/operations.md"))
	_, text, _ := strings.Cut(string(page), "```text\naccounts {")
	text, _, _ = strings.Cut(text, "```")
	file := testbed.WriteFile(t, "nats.conf", "accounts {"+text)
	out, err := server.ProcessConfigFile(file)
	if err != nil || len(out.Accounts) != 3 {
		t.Fatal(err)
	}
	return out
}

// account is a tenant's connection to the broker, in an account of its own.
type account struct {
	*nats.Conn
	t *testing.T
	// heard are all messages that it can subscribe to, but answers.
	heard *nats.Subscription
}

func joinAs(t *testing.T, url, user string) account {
	t.Helper()
	nc, err := nats.Connect(url, nats.UserInfo(user, user+"-secret"), nats.CustomInboxPrefix("answers"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	heard, err := nc.SubscribeSync("jobends.>")
	if err == nil {
		_, err = nc.Subscribe("m.jobends.>", func(m *nats.Msg) { t.Errorf("%s gets %s", user, m.Subject) })
	}
	if err = errors.Join(err, nc.Flush()); err != nil {
		t.Fatal(err)
	}
	return account{nc, t, heard}
}

// ask sends a request in JSON, reads the answer and returns the failure.
func (a account) ask(subject, question string, answer proto.Message) (failure string) {
	a.t.Helper()
	msg, err := a.Request(subject, []byte(question), testbed.Patience)
	if err != nil {
		a.t.Fatalf("%s: %v", subject, err)
	}
	if failure = msg.Header.Get("Nats-Service-Error"); failure != "" {
		return msg.Header.Get("Nats-Service-Error-Code") + " " + failure
	}
	if err := protojson.Unmarshal(msg.Data, answer); err != nil {
		a.t.Fatalf("%s: %v: %s", subject, err, msg.Data)
	}
	return ""
}

const textJob = `{"infer": {"inputs": [{"blob": {"contentType": "text/plain", "data": "aGk="}}]}}`

func (a account) submit(queue string) (id string) {
	a.t.Helper()
	var out inferencev1.SubmitJobResponse
	if failure := a.ask("jobs.submit."+queue, textJob, &out); failure != "" {
		a.t.Fatal(failure)
	}
	return out.GetJob().GetId()
}

// expectEnd expects the next message about an end to be that one.
func (a account) expectEnd(queue, id, state string) {
	a.t.Helper()
	msg, err := a.heard.NextMsg(testbed.Patience)
	if err != nil {
		a.t.Fatal(err)
	}
	if msg.Subject != "jobends."+queue || !strings.Contains(string(msg.Data), `"id":"`+id+`"`) || !strings.Contains(string(msg.Data), `"state":"`+state+`"`) {
		a.t.Errorf("%s: %s, want the end of %s", msg.Subject, msg.Data, id)
	}
}

func TestAccountsOfTheBrokerSeeTheirJobsOnly(t *testing.T) {
	t.Parallel()
	accounts := accountsInDocs(t)
	broker := testbed.StartBroker(t, func(o *server.Options) {
		o.Accounts, o.Users, o.NoAuthUser = accounts.Accounts, accounts.Users, "stagemesh"
	})
	mesh := func(name, jobs string) {
		m := meshtest.FromFile(t, meshtest.Parse(t, `
mesh: `+name+`
nats: {url: "`+strings.Replace(broker.URL(), "//", "//stagemesh:mesh-secret@", 1)+`"}
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}]}}
jobs:
  `+jobs+`
  max_bytes: 64MiB
  pools: {main: {target: {pipelines: [p]}}, shut: {target: {pipelines: [p]}, gate: {constant: {value: 0}}}}
  queues: {nightly: {pool: main, max_bytes: 64MiB}, held: {pool: shut, max_bytes: 64MiB}}
`), stagemesh.FileSettings{Dispatcher: true})
		meshtest.Start(t, m)
	}
	mesh("m", "nats: true")
	acme, globex := joinAs(t, broker.URL(), "acme"), joinAs(t, broker.URL(), "globex")

	done, held := acme.submit("nightly"), acme.submit("held")
	acme.expectEnd("nightly", done, "succeeded")
	for _, id := range []string{done, held} {
		for _, method := range []string{"get", "cancel"} {
			if failure := globex.ask("jobs."+method, `{"id": "`+id+`"}`, nil); !strings.HasPrefix(failure, "404 NOT_FOUND: ") {
				t.Errorf("%s by another tenant: %s", method, failure)
			}
		}
	}
	if _, err := globex.Request("m.jobs.acme.get", []byte(`{"id": "`+done+`"}`), testbed.Patience); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("another tenant's subject: %v", err)
	}
	var got inferencev1.GetJobResponse
	if failure := acme.ask("jobs.get", `{"id": "`+done+`", "wait": "10s"}`, &got); failure != "" || string(got.GetInfer().GetOutputs()[0].GetBlob().GetData()) != "hi" {
		t.Errorf("%s %v", failure, &got)
	}
	var cancelled inferencev1.CancelJobResponse
	if failure := acme.ask("jobs.cancel", `{"id": "`+held+`"}`, &cancelled); failure != "" || cancelled.GetJob().GetUsage().GetQueuedSeconds() <= 0 {
		t.Errorf("%s %v", failure, &cancelled)
	}
	acme.expectEnd("held", held, "cancelled")
	// The first end that globex gets is its own, although acme's came before.
	globex.expectEnd("nightly", globex.submit("nightly"), "succeeded")

	binary, err := proto.Marshal(&inferencev1.GetJobRequest{Id: done})
	if err != nil {
		t.Fatal(err)
	}
	msg, err := acme.Request("jobs.get", binary, testbed.Patience)
	if err != nil || proto.Unmarshal(msg.Data, &got) != nil || got.GetJob().GetId() != done {
		t.Errorf("in protobuf: %v, %v", err, msg)
	}
	for subject, want := range map[string]string{
		"jobs.submit.weekly":  "404 UNKNOWN_QUEUE: ",
		"jobs.submit.nightly": "400 INVALID_REQUEST: payload: ",
		"jobs.submit":         "400 INVALID_REQUEST: the subject ends with no method",
		"jobs.get":            "400 INVALID_REQUEST: id: ",
	} {
		if failure := acme.ask(subject, `{}`, nil); !strings.HasPrefix(failure, want) {
			t.Errorf("%s: %s", subject, failure)
		}
	}
	if failure := acme.ask("jobs.submit.nightly", `{"queue": "held"}`, nil); !strings.HasPrefix(failure, "400 INVALID_REQUEST: queue: ") {
		t.Errorf("two queues: %s", failure)
	}
	operator := account{broker.Client(), t, nil}
	if failure := operator.ask("m.jobs._.get", `{"id": "`+done+`"}`, nil); !strings.HasPrefix(failure, "400 INVALID_REQUEST: the subject names no tenant") {
		t.Errorf("no tenant: %s", failure)
	}
	mesh("other", "nats: false")
	if _, err := operator.Request("other.jobs.acme.get", nil, time.Minute); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("a mesh that does not serve tenants: %v", err)
	}
}
