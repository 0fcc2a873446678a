package adminapi_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/uuid"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/adminapi"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	mesh  pipeline.MeshName  = "test"
	stage pipeline.StageName = "classify"
)

// bed is a mesh's dead letters on a real broker, and the queue of a stage.
type bed struct {
	*store.DeadLetters
	t      *testing.T
	broker *testbed.Broker
	bus    bus
	stored uint64
}

// bus is what a bed needs of its connection to the broker.
type bus interface {
	JetStream() jetstream.JetStream
	DeadLetterSubject(pipeline.StageName) string
	Stage(pipeline.StageName, pipeline.Durability, pipeline.Class) string
	Stream(pipeline.StageName, pipeline.Durability) string
	Connected() bool
}

func newBed(t *testing.T) *bed {
	t.Helper()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	d := &bed{DeadLetters: store.NewDeadLetters(b, store.Settings{MaxBytes: 64 << 20}), t: t, broker: broker, bus: b}
	if err := d.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	return d
}

// queue creates the stage's queue, with space for that many items.
func (d *bed) queue(space int64) {
	d.t.Helper()
	_, err := d.bus.JetStream().CreateStream(d.t.Context(), jetstream.StreamConfig{
		Name: d.bus.Stream(stage, pipeline.File), Subjects: []string{d.bus.Stage(stage, pipeline.File, "*")},
		Retention: jetstream.WorkQueuePolicy, Discard: jetstream.DiscardNew, MaxMsgs: space,
	})
	if err != nil {
		d.t.Fatal(err)
	}
}

func item(t *testing.T) *envelope.Envelope {
	t.Helper()
	parts, err := payload.FromProto("parts", []*inferencev1.Part{
		{Name: "image", Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: "image/png", Data: []byte("12345")}}},
		{Name: "x", Body: &inferencev1.Part_Tensor{Tensor: &inferencev1.Tensor{Datatype: "FP32", Shape: []int64{1, 2}, Raw: make([]byte, 8)}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return &envelope.Envelope{
		Mesh: mesh, Tenant: "tenant", Gateway: "gateway", Pipeline: "pipeline", IdempotencyKey: "key",
		RequestID: pipeline.RequestID(uuid.NewString()), ExecutionID: pipeline.ExecutionID(uuid.NewString()),
		Route: []pipeline.Hop{
			{Step: "one", Stage: "decode"},
			{Step: "two", Stage: stage, Model: payload.ModelRef{Alias: "best"}, Parameters: payload.Parameters{"t": payload.Double(0.5)}},
		},
		Position:   1,
		Durability: pipeline.File, AdmittedAt: time.Now().Add(-time.Hour), Deadline: time.Now().Add(-time.Hour + time.Minute),
		Metadata: map[string]string{"user": "u"}, Trace: envelope.Trace{Parent: "00-1-2-01"},
		Parts:   parts,
		Kept:    []payload.Part{payload.OfBlob("note", "", []byte("1"))},
		Timings: []envelope.StepTiming{{Step: "one", Stage: "decode", Host: "h", Run: time.Second}},
	}
}

// storeMessage stores a dead letter of the message and returns its number.
func (d *bed) storeMessage(message []byte, edits ...func(*envelope.DeadLetter)) uint64 {
	d.t.Helper()
	now := time.Now()
	dead := &envelope.DeadLetter{
		Mesh: mesh, Stage: stage, Host: "host", Durability: pipeline.File, Priority: 3, Deliveries: 5,
		Fault: fault.New(fault.RunnerCrashed, "it ends every worker").At(string(stage), "two", "host").WithMetadata("k", "v"),
		Item:  message, Runs: []envelope.RunRecord{{Host: "crashed", At: now}, {Host: "crashed", At: now}},
		QueuedAt: now, DeadLetteredAt: now,
	}
	for _, edit := range edits {
		edit(dead)
	}
	data, err := dead.Encode()
	if err != nil {
		d.t.Fatal(err)
	}
	return d.store(dead.Stage, data)
}

func (d *bed) store(of pipeline.StageName, data []byte) uint64 {
	d.t.Helper()
	if _, err := d.bus.JetStream().Publish(d.t.Context(), d.bus.DeadLetterSubject(of), data); err != nil {
		d.t.Fatal(err)
	}
	d.stored++
	return d.stored
}

// garbage stores bytes that are not a dead letter and returns their number.
func (d *bed) garbage() uint64 {
	d.t.Helper()
	return d.store(stage, []byte("\xff"))
}

func (d *bed) encode(e *envelope.Envelope) []byte {
	d.t.Helper()
	data, err := e.Encode()
	if err != nil {
		d.t.Fatal(err)
	}
	return data
}

// protocol is a way to reach the port.
type protocol struct {
	name    string
	h2c     bool
	options []connect.ClientOption
}

func protocols() []protocol {
	return []protocol{
		{"Connect", false, nil},
		{"Connect JSON", false, []connect.ClientOption{connect.WithProtoJSON()}},
		{"gRPC", true, []connect.ClientOption{connect.WithGRPC()}},
		{"gRPC-Web", false, []connect.ClientOption{connect.WithGRPCWeb()}},
	}
}

func (p protocol) client(t *testing.T, url string, more ...connect.ClientOption) adminv1connect.DeadLetterServiceClient {
	t.Helper()
	return adminv1connect.NewDeadLetterServiceClient(fronttest.Client(t, p.h2c), url, append(p.options, more...)...)
}

func serve(t *testing.T, s adminapi.Settings) string {
	t.Helper()
	if s.Pipelines == nil {
		s.Pipelines = &fakePipelines{}
	}
	if s.Models == nil {
		s.Models = models.New(models.Settings{})
	}
	return fronttest.Serve(t, adminapi.Handler(s))
}

// open returns a client of a port that serves the dead letters.
func open(t *testing.T, letters adminapi.DeadLetters) adminv1connect.DeadLetterServiceClient {
	t.Helper()
	return protocols()[0].client(t, serve(t, adminapi.Settings{DeadLetters: letters}))
}

func get(t *testing.T, client adminv1connect.DeadLetterServiceClient, seq uint64) (*adminv1.DeadLetter, error) {
	t.Helper()
	response, err := client.GetDeadLetter(t.Context(), connect.NewRequest(&adminv1.GetDeadLetterRequest{Seq: seq}))
	if err != nil {
		return nil, err
	}
	return response.Msg.GetDeadLetter(), nil
}

func replay(t *testing.T, client adminv1connect.DeadLetterServiceClient, seq uint64) (*adminv1.ReplayDeadLetterResponse, error) {
	t.Helper()
	response, err := client.ReplayDeadLetter(t.Context(), connect.NewRequest(&adminv1.ReplayDeadLetterRequest{Seq: seq}))
	if err != nil {
		return nil, err
	}
	return response.Msg, nil
}

func deleteLetter(t *testing.T, client adminv1connect.DeadLetterServiceClient, seq uint64) error {
	t.Helper()
	_, err := client.DeleteDeadLetter(t.Context(), connect.NewRequest(&adminv1.DeleteDeadLetterRequest{Seq: seq}))
	return err
}

// list formats a page: the numbers of the dead letters, the unreadable ones, and the
// next.
func list(t *testing.T, client adminv1connect.DeadLetterServiceClient, r *adminv1.ListDeadLettersRequest) string {
	t.Helper()
	response, err := client.ListDeadLetters(t.Context(), connect.NewRequest(r))
	if err != nil {
		t.Fatal(err)
	}
	out := ""
	for _, dead := range response.Msg.GetDeadLetters() {
		out += fmt.Sprint(dead.GetSeq(), " ")
	}
	return out + fmt.Sprint(response.Msg.GetUnreadable(), " ", response.Msg.GetNext())
}

// expect checks that an RPC failed with the reason, its code and the details.
func expect(t *testing.T, what string, err error, want fault.Reason) *errdetails.ErrorInfo {
	t.Helper()
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok {
		t.Errorf("%s: got %v, want %s", what, err, want)
		return nil
	}
	if code := connect.Code(fault.Classify(want).Code); rpc.Code() != code {
		t.Errorf("%s: got code %s, want %s: %v", what, rpc.Code(), code, err)
	}
	for _, detail := range rpc.Details() {
		value, err := detail.Value()
		if info, is := value.(*errdetails.ErrorInfo); err == nil && is {
			if info.GetReason() != string(want) {
				t.Errorf("%s: got %s, want %s: %v", what, info.GetReason(), want, rpc)
			}
			return info
		}
	}
	t.Errorf("%s: %v has no reason", what, rpc)
	return nil
}

// fake is a store of dead letters with configured errors and blocking lists.
type fake struct {
	err      error
	replayed store.Replayed
	// inside gets a value from each List that has begun; leave ends one.
	inside, leave chan struct{}
}

func (f *fake) List(ctx context.Context, _ store.DeadLetterQuery) (store.DeadLetterPage, error) {
	if f.inside != nil {
		if _, bounded := ctx.Deadline(); !bounded {
			return store.DeadLetterPage{}, errors.New("no deadline")
		}
		f.inside <- struct{}{}
		<-f.leave
	}
	return store.DeadLetterPage{}, f.err
}

func (f *fake) Get(context.Context, uint64) (store.DeadLetter, error) {
	return store.DeadLetter{}, f.err
}

func (f *fake) Replay(context.Context, uint64, []byte) (store.Replayed, error) {
	return f.replayed, f.err
}

func (f *fake) Delete(context.Context, uint64) error { return f.err }
