package meshtest_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/scale"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/proto/gen/go/externalscaler"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// scaling is an edit that configures the scaler, with a port.
func scaling(edits ...func(*gateway.Scaler)) func(*gateway.Settings) {
	return func(s *gateway.Settings) {
		unhurried(s)
		s.Scaler = &gateway.Scaler{Listen: "127.0.0.1:0"}
		for _, edit := range edits {
			edit(s.Scaler)
		}
	}
}

// keda returns a client of the scaler's port.
func keda(t *testing.T, g meshtest.Gateway, security credentials.TransportCredentials) externalscaler.ExternalScalerClient {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+g.ScalerAddr().String(), grpc.WithTransportCredentials(security))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return externalscaler.NewExternalScalerClient(conn)
}

func trigger(metadata ...string) *externalscaler.ScaledObjectRef {
	out := &externalscaler.ScaledObjectRef{Name: "scaled", Namespace: "default", ScalerMetadata: map[string]string{"scalerAddress": "here"}}
	for _, one := range metadata {
		key, value, _ := strings.Cut(one, ":")
		out.ScalerMetadata[key] = value
	}
	return out
}

func wanted(t *testing.T, client externalscaler.ExternalScalerClient, ref *externalscaler.ScaledObjectRef) int64 {
	t.Helper()
	out, err := client.GetMetrics(t.Context(), &externalscaler.GetMetricsRequest{ScaledObjectRef: ref, MetricName: "hosts_wanted"})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(out.GetMetricValues()); n != 1 {
		t.Fatalf("%d metrics", n)
	}
	value := out.GetMetricValues()[0]
	if value.GetMetricName() != "hosts_wanted" || value.GetMetricValueFloat() != float64(value.GetMetricValue()) {
		t.Errorf("metric %v", value)
	}
	return value.GetMetricValue()
}

func TestEveryGatewayWantsTheSameHosts(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	slow := each(func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
		select {
		case <-time.After(50 * time.Millisecond): // the work
		case <-ctx.Done():
		}
		return item.Inputs, nil
	})
	bed.Host("slow", slow, meshtest.Batch(batch.Settings{Mode: batch.Eager, MaxSize: 1}), func(s *stagehost.Settings) { s.DrainTimeout = time.Nanosecond })
	first, second := bed.Gateway(nil, scaling()), bed.Gateway(nil, scaling())
	of, other := keda(t, first, insecure.NewCredentials()), keda(t, second, insecure.NewCredentials())
	ref := trigger("stage:slow", "target:busy=70%")
	ctx, cancel := context.WithCancel(t.Context())
	var calls []<-chan answer
	for range 1500 {
		calls = append(calls, send(ctx, first, requestFor("stage:slow", "x")))
	}
	testbed.Eventually(t, "both gateways want the same hosts for 1500 items", func() bool {
		a, b := wanted(t, of, ref), wanted(t, other, ref)
		return a > 1 && a == b
	})
	spec, err := of.GetMetricSpec(t.Context(), ref)
	if err != nil || len(spec.GetMetricSpecs()) != 1 || spec.GetMetricSpecs()[0].GetTargetSize() != 1 {
		t.Errorf("the metric is %v, %v", spec, err)
	}
	cancel()
	for _, call := range calls {
		await(t, call)
	}
}

func TestQueueThatDoesNotAnswerHasNoEffectOnOtherStages(t *testing.T) {
	t.Parallel()
	silent := "$JS.API.STREAM.INFO." + bus.SubjectsOf(meshtest.Mesh).Stream("silent", pipeline.Memory)
	bed := meshtest.New(t, func(o *server.Options) {
		o.NoAuthUser = "parts"
		o.Users = []*server.User{{Username: "all"}, {Username: o.NoAuthUser, Permissions: &server.Permissions{Publish: &server.SubjectPermission{Allow: []string{">"}, Deny: []string{silent}}}}}
	})
	bed.Host("echo", each(func(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil }))
	g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("p", "echo", "silent")}, scaling(), withAdmin, func(s *gateway.Settings) { s.Bounds = map[pipeline.StageName]scale.Bounds{"silent": {Min: 2}} })
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	admin := adminv1connect.NewMeshServiceClient(&http.Client{Transport: transport}, g.AdminURL())
	decided := func() map[string]time.Time {
		out := map[string]time.Time{}
		stages, err := admin.ListStages(t.Context(), connect.NewRequest(&adminv1.ListStagesRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range stages.Msg.GetStages() {
			if isSilent := s.GetStage() == "silent"; isSilent != (s.GetQueuesCause() != "") {
				t.Errorf("stage %s: cause %q", s.GetStage(), s.GetQueuesCause())
			}
			if h := s.GetHostsWanted(); h != nil {
				out[s.GetStage()] = h.GetDecidedAt().AsTime()
			}
		}
		return out
	}
	var first time.Time
	testbed.Eventually(t, "hosts of the other stage are decided on twice", func() bool {
		at := decided()["echo"]
		if first.IsZero() {
			first = at
		}
		return at.After(first)
	})
	if at, ok := decided()["silent"]; ok {
		t.Errorf("at %s hosts were decided on of a stage whose queue is not known", at)
	}
}

func TestScalerNamesWhatIsWrong(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	bed.Host("here", each(unchanged))
	g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("p", "here", "there")}, scaling())
	client := keda(t, g, insecure.NewCredentials())
	testbed.Eventually(t, "the scaler knows the stages", func() bool {
		_, err := client.IsActive(t.Context(), trigger("stage:here"))
		return err == nil
	})
	for want, ref := range map[string]*externalscaler.ScaledObjectRef{
		`stage: there is no stage "nowhere"; there is here, there`:                   trigger("stage:nowhere"),
		"stage: is required in the trigger's metadata":                               trigger(),
		`target: "wait=200": 200 has no unit; add ms or s, as in wait=200ms`:         trigger("stage:here", "target:wait=200"),
		`target: "depth=5s": there is no "depth"; want wait=200ms, busy=70% or olde`: trigger("stage:here", "target:depth=5s"),
	} {
		_, active := client.IsActive(t.Context(), ref)
		_, spec := client.GetMetricSpec(t.Context(), ref)
		_, metrics := client.GetMetrics(t.Context(), &externalscaler.GetMetricsRequest{ScaledObjectRef: ref})
		stream, err := client.StreamIsActive(t.Context(), ref)
		if err == nil {
			_, err = stream.Recv()
		}
		for name, err := range map[string]error{"IsActive": active, "GetMetricSpec": spec, "GetMetrics": metrics, "StreamIsActive": err} {
			if s := status.Convert(err); s.Code() != codes.InvalidArgument || !strings.HasPrefix(s.Message(), want) {
				t.Errorf("%s: %v, want %s", name, err, want)
			}
		}
	}
}

func TestScalerDemandsACertificate(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	authority, other := testbed.NewAuthority(t), testbed.NewAuthority(t)
	certFile, keyFile := authority.Certificate("127.0.0.1")
	g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("p", "stage")}, scaling(func(s *gateway.Scaler) {
		s.CertFile, s.KeyFile, s.ClientCAFile = certFile, keyFile, authority.File
	}))
	ask := func(certificates ...tls.Certificate) error {
		client := keda(t, g, credentials.NewTLS(&tls.Config{RootCAs: authority.Roots, ServerName: "127.0.0.1", Certificates: certificates}))
		_, err := client.IsActive(t.Context(), trigger("stage:stage"))
		return err
	}
	load := func(a *testbed.Authority) tls.Certificate {
		pair, err := tls.LoadX509KeyPair(a.Certificate("keda"))
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	if err := ask(load(authority)); err != nil {
		t.Errorf("with a certificate: %v", err)
	}
	for name, err := range map[string]error{"none": ask(), "another authority's": ask(load(other))} {
		if status.Code(err) != codes.Unavailable {
			t.Errorf("with the certificate %s: %v", name, err)
		}
	}
}

// KEDA asks again two seconds after a stream that ends, and each time later after one that fails.
func TestStoppingGatewayEndsScalerStreams(t *testing.T) {
	t.Parallel()
	g := meshtest.New(t).Gateway([]pipeline.Pipeline{testbed.Pipeline("p", "stage")}, scaling())
	states, err := keda(t, g, insecure.NewCredentials()).StreamIsActive(t.Context(), trigger("stage:stage"))
	if err == nil {
		_, err = states.Recv()
	}
	if err != nil {
		t.Fatal(err)
	}
	g.Stop()
	if _, err := states.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("the stream ends by %v", err)
	}
}

// A request for a stage without a host wakes it, and is answered by the first host.
func TestRequestsWakeAStage(t *testing.T) {
	t.Parallel()
	const hostsUnknown = "hosts unknown"
	for name, edit := range map[string]func(*request.Request){
		"memory": func(*request.Request) {}, "file": func(r *request.Request) { r.Durability = pipeline.File },
		"with a key": func(r *request.Request) { r.IdempotencyKey = "k" }, hostsUnknown: func(*request.Request) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bed := meshtest.New(t)
			if name == hostsUnknown {
				hideHosts(t, bed, "stage")
			}
			// Another gateway than the one that the request waits at.
			g, other := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("p", "stage")}, scaling()), bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("p", "stage")}, scaling())
			states, err := keda(t, other, insecure.NewCredentials()).StreamIsActive(t.Context(), trigger("stage:stage"))
			if err != nil {
				t.Fatal(err)
			}
			isActive := func() bool {
				t.Helper()
				state, err := states.Recv()
				if err != nil {
					t.Fatal(err)
				}
				return state.GetResult()
			}
			if isActive() {
				t.Error("the stage is active before there is a request")
			}
			r := requestFor("p", "x")
			edit(r)
			call := send(t.Context(), g, r)
			active := make(chan bool, 1)
			go func() {
				state, _ := states.Recv()
				active <- state.GetResult()
			}()
			select {
			case got := <-active:
				if !got {
					t.Error("the request does not wake the stage")
				}
			case a := <-call:
				t.Fatalf("the request does not wait: %+v", a)
			}
			bed.Host("stage", each(unchanged))
			got := await(t, call).checkOK(t)
			if got.text() != "x" || got.response.Metadata[request.Activated] != "stage" {
				t.Errorf("answer %q, metadata %v", got.text(), got.response.Metadata)
			}
			again := requestFor("p", "y")
			if got := infer(t.Context(), g, again).checkOK(t); got.response.Metadata[request.Activated] != "" {
				t.Errorf("metadata %v of a request that did not wait", got.response.Metadata)
			}
		})
	}
}

func TestRequestThatWaitsForAHostIsCancelled(t *testing.T) {
	t.Parallel()
	const id = "0190b0c0-0000-7000-8000-00000000000b"
	for name, isKnown := range map[string]bool{"no host": true, "hosts unknown": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bed := meshtest.New(t)
			if !isKnown {
				hideHosts(t, bed, "stage")
			}
			g := bed.Gateway(nil, scaling())
			r := requestFor("stage:stage", "x")
			r.ID = id
			call := send(t.Context(), g, r)
			testbed.Eventually(t, "the request is cancelled", func() bool { // it is not known before it waits
				if err := g.Service().Cancel(t.Context(), id); err != nil {
					t.Error(err)
				}
				select {
				case a := <-call:
					a.checkFault(t, fault.Cancelled)
					return true
				default:
					return false
				}
			})
		})
	}
}

// hideHosts hides whether a stage has a host: somebody hears the question, and never answers.
func hideHosts(t *testing.T, bed *meshtest.Bed, stage pipeline.StageName) {
	t.Helper()
	if _, err := bed.Broker.Client().Subscribe(bus.SubjectsOf(meshtest.Mesh).Alive(stage), func(*nats.Msg) {}); err != nil {
		t.Fatal(err)
	}
}

func TestCallersLearnThatAStageIsActivating(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("p", "stage")}, scaling(), func(s *gateway.Settings) { s.Listen = "127.0.0.1:0" })
	post := func(verb string) (*http.Response, error) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, g.URL()+"/v1/pipelines/p:"+verb, strings.NewReader("x"))
		if err != nil {
			return nil, err
		}
		r.Header.Set("Content-Type", "text/plain")
		return http.DefaultClient.Do(r)
	}
	stream, err := post("stream")
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Body.Close()
	if of := stream.Header.Get("Stagemesh-Activating"); of != "stage" {
		t.Errorf("the header of the stream is %q", of)
	}
	lines := bufio.NewScanner(stream.Body)
	next := func(prefix string) string {
		for lines.Scan() {
			if text, ok := strings.CutPrefix(lines.Text(), prefix); ok {
				return text
			}
		}
		return ""
	}
	if event, data := next("event: "), next("data: "); event != "activating" || !strings.Contains(data, `"stage":"stage"`) {
		t.Errorf("event %q, %s", event, data)
	}
	whole := make(chan string, 1)
	go func() {
		response, err := post("infer")
		if err != nil {
			whole <- err.Error()
			return
		}
		defer response.Body.Close()
		whole <- response.Status + ", activating " + response.Header.Get("Stagemesh-Activating")
	}()
	called, err := inferencev1.NewInferenceServiceClient(testbed.Dial(t, g.Addr().String())).InferStream(t.Context(), &inferencev1.InferRequest{
		Pipeline: "p", Inputs: []*inferencev1.Part{{Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: "text/plain", Data: []byte("x")}}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := called.Recv(); m.GetActivating().GetStage() != "stage" || m.GetSeq() != 0 {
		t.Errorf("the first message of gRPC is %v, %v", m, err)
	}
	testbed.Eventually(t, "all requests wait", func() bool { return g.Service().InFlight() == 3 })
	bed.Host("stage", each(unchanged))
	m, err := called.Recv()
	for err == nil && m.GetActivating() != nil {
		m, err = called.Recv()
	}
	if err != nil || m.GetFinal() == nil || m.GetSeq() != 1 {
		t.Errorf("gRPC ends with %v, %v", m, err)
	}
	if event := next("event: "); event != "done" {
		t.Errorf("event %q", event)
	}
	if got := testbed.Receive(t, "answer", whole); got != "200 OK, activating stage" {
		t.Errorf("the whole answer is %s", got)
	}
}

func TestWaitForAHostIsBounded(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		edit  func(*gateway.Scaler)
		calls int
		want  string
	}{
		"number": {func(s *gateway.Scaler) { s.MaxWaiting = 1 }, 2, "stage stage is activating, and 1 requests of 1 bytes wait for its first host already"},
		"bytes":  {func(s *gateway.Scaler) { s.MaxWaitingBytes = 1 }, 2, "1 requests of 1 bytes wait for its first host already: see gateway.scaler.max_waiting"},
		"time":   {func(s *gateway.Scaler) { s.MaxWait = time.Nanosecond }, 1, "the request waited "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bed := meshtest.New(t)
			g := bed.Gateway(nil, scaling(row.edit))
			ended := make(chan answer, row.calls)
			ctx, cancel := context.WithCancel(t.Context())
			for range row.calls {
				go func() { ended <- infer(ctx, g, requestFor("stage:stage", "x")) }()
			}
			f := testbed.Receive(t, "rejection", ended).want(t, fault.NoCapacity)
			if f.Stage != "stage" || f.RetryAfter <= 0 || !strings.Contains(f.Message, row.want) {
				t.Errorf("fault %+v", f)
			}
			cancel()
			for range row.calls - 1 {
				testbed.Receive(t, "cancelled call", ended).checkFault(t, fault.Cancelled)
			}
		})
	}
}

func TestMinHostsOfAStageHasOnlyItActivate(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	file := meshtest.Parse(t, fmt.Sprintf(`
mesh: bed
nats: {url: %q}
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages: {lazy: {runner: {echo: {}}, min_hosts: 0, max_hosts: 4}, eager: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: s, stage: lazy}]}}
jobs: {pools: {main: {target: {pipelines: [p]}}}, queues: {nightly: {max_bytes: 64MiB}}}
`, bed.Broker.URL()))
	m := meshtest.Start(t, meshtest.FromFile(t, file, stagemesh.FileSettings{Stages: []string{}, Dispatcher: true}))
	response, answer := testbed.Call(t, http.DefaultClient, http.MethodPost, m.URL()+"/v1/pipelines/stage:eager:infer", "x", "Content-Type", "text/plain")
	if response.StatusCode != http.StatusServiceUnavailable || !strings.Contains(answer, "NO_CAPACITY") {
		t.Errorf("%s: %s", response.Status, answer)
	}
	response, answer = testbed.Call(t, http.DefaultClient, http.MethodPost, m.URL()+"/v1/queues/nightly/jobs", `{"a": 1}`, "Content-Type", "application/json")
	if response.StatusCode != http.StatusAccepted {
		t.Fatalf("%s: %s", response.Status, answer)
	}
	stages := func() string {
		_, answer := testbed.Call(t, http.DefaultClient, http.MethodPost, m.AdminURL()+"/stagemesh.admin.v1.MeshService/ListStages", "{}", "Content-Type", "application/json")
		return answer
	}
	testbed.Eventually(t, "the job wakes its stage", func() bool {
		text := stages()
		return strings.Contains(text, `"activating":1`) && strings.Contains(text, `"hosts":1`) && strings.Contains(text, "wait for the first host")
	})
	meshtest.Start(t, meshtest.FromFile(t, file, stagemesh.FileSettings{Stages: []string{"lazy"}, NoGateway: true}))
	location := response.Header.Get("Location")
	if response, answer := testbed.Call(t, http.DefaultClient, http.MethodGet, m.URL()+location+"/result?wait=30s", ""); response.StatusCode != http.StatusOK || answer != `{"a": 1}` {
		t.Errorf("the job: %s %s", response.Status, answer)
	}
}
