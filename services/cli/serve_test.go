package cli_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

var anyPorts = []string{"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--ops", "127.0.0.1:0"}

// serveWorker serves a worker, my_adder.py, without a broker, and returns where callers and operators ask.
func serveWorker(t *testing.T, text string, args ...string) (p *process, address, operations string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "my_adder.py")
	save(t, path, text)
	p = start(t, slices.Concat([]string{"serve", path}, anyPorts, args)...)
	operations, line := p.served(t, 1)
	return p, addressIn(t, line), operations
}

// addressIn returns the address of a gateway in a line with a call.
func addressIn(t *testing.T, line string) string {
	t.Helper()
	words := regexp.MustCompile(`(http://[\d.:]+)/v1`).FindStringSubmatch(line)
	if words == nil {
		t.Fatalf("%q has no address", line)
	}
	return words[1]
}

// serveFile serves a mesh file without a broker.
func serveFile(t *testing.T, text string) (p *process, address, operations string) {
	t.Helper()
	p = start(t, "serve", testbed.MeshFile(t, text))
	address, operations = p.ready(t)
	return p, address, operations
}

const three = `{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[3]}]}`

// ask sends a request, with headers as "Name: value", and returns the status and the body.
func ask(t *testing.T, method, url, body string, headers ...string) (code int, text string) {
	t.Helper()
	r, err := http.NewRequestWithContext(context.WithoutCancel(t.Context()), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	for _, header := range headers {
		if name, value, ok := strings.Cut(header, ": "); ok {
			r.Header.Set(name, value)
		}
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Do(r)
	if err != nil {
		t.Error(err)
		return 0, ""
	}
	defer func() { _ = answer.Body.Close() }() // it is read whole
	all, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Error(err)
	}
	return answer.StatusCode, string(all)
}

// addOne is a request with x = 1.
func addOne(pipeline string) *inferencev1.InferRequest {
	return &inferencev1.InferRequest{Pipeline: pipeline, Inputs: []*inferencev1.Part{{Name: "x", Body: &inferencev1.Part_Tensor{Tensor: &inferencev1.Tensor{
		Datatype: "FP32", Shape: []int64{1, 1}, Raw: []byte{0, 0, 0x80, 0x3f},
	}}}}}
}

func TestServeAnswersAsUpDoes(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "my_adder.py")
	save(t, path, addTo("x", 1))
	all := map[string]string{}
	families := map[string][]string{}
	for _, verb := range []string{"up", "serve"} {
		p := start(t, slices.Concat([]string{verb, path}, anyPorts)...)
		operations, line := p.served(t, 1)
		address := addressIn(t, line)
		testbed.Eventually(t, "the gateway has the inputs of the worker", func() bool {
			_, model := ask(t, http.MethodGet, address+"/v2/models/my-adder", "")
			return strings.Contains(model, "FP32")
		})
		out := &strings.Builder{}
		for _, get := range []string{"/v2", "/v2/models/my-adder", "/v2/models/my-adder/ready", "/v2/health/ready", "/v2/health/live", "/openapi.json", "/v1/pipelines", "/nothing"} {
			code, text := ask(t, http.MethodGet, address+get, "")
			fmt.Fprintln(out, get, code, text)
		}
		for _, post := range []string{"/v1/pipelines/my-adder:infer", "/v2/models/my-adder/infer", "/v1/pipelines/nothing:infer"} {
			code, text := ask(t, http.MethodPost, address+post, three)
			text, _, _ = strings.Cut(text, `,"timeline"`)
			fmt.Fprintln(out, post, code, text)
		}
		conn := testbed.Dial(t, address)
		answer, err := inferencev1.NewInferenceServiceClient(conn).Infer(t.Context(), addOne("my-adder"))
		fmt.Fprintln(out, "gRPC", answer.GetOutputs(), err)
		health, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{Service: "my-adder"})
		fmt.Fprintln(out, "health", health.GetStatus(), err)
		fmt.Fprintln(out, "services", services(t, conn))
		for _, probe := range []string{"/livez", "/readyz"} {
			code, text := ask(t, http.MethodGet, operations+probe, "")
			fmt.Fprintln(out, probe, code, text)
		}
		_, page := ask(t, http.MethodGet, operations+"/metrics", "")
		for _, family := range regexp.MustCompile(`(?m)^# TYPE (\S+)`).FindAllStringSubmatch(page, -1) {
			families[verb] = append(families[verb], family[1])
		}
		if err := p.end(t); err != nil {
			t.Error(err)
		}
		all[verb] = regexp.MustCompile(`127\.0\.0\.1:\d+|[\da-f]{8}-[\da-f-]{27}`).ReplaceAllString(out.String(), "-")
	}
	if all["serve"] != all["up"] {
		t.Errorf("serve answers\n%s\nand up\n%s", all["serve"], all["up"])
	}
	if !strings.Contains(all["serve"], `"data":[4]`) || !strings.Contains(all["serve"], "health SERVING <nil>") || strings.Count(all["serve"], " 200 ") != 10 {
		t.Errorf("serve answers\n%s", all["serve"])
	}
	for _, family := range families["up"] {
		isBrokers := strings.HasPrefix(family, "stagemesh_broker_") || strings.HasPrefix(family, "stagemesh_store_")
		if slices.Contains(families["serve"], family) == isBrokers {
			t.Errorf("metric %s: serve has it: %v", family, !isBrokers)
		}
	}
}

// services returns the services that reflection lists.
func services(t *testing.T, conn *grpc.ClientConn) (out []string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
	if err == nil {
		err = stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}})
	}
	if err != nil {
		t.Fatal(err)
	}
	answer, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	for _, service := range answer.GetListServicesResponse().GetService() {
		out = append(out, service.GetName())
	}
	return out
}

func TestServeHasNoBroker(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "my_adder.py")
	save(t, path, addTo("x", 1))
	for verb, want := range map[string]bool{"up": true, "serve": false} {
		p := startProgram(t, slices.Concat([]string{verb, path}, anyPorts)...)
		testbed.Eventually(t, verb+" is ready", func() bool { return strings.Count(p.Out.String(), "\n") == 2 })
		words := workerLine.FindStringSubmatch(p.Out.String())
		if words == nil {
			t.Fatalf("it printed %q", p.Out.String())
		}
		if got := shell(t, words[3]); !strings.Contains(got, `"data":[1]`) {
			t.Errorf("%s answers %s", verb, got)
		}
		_, goroutines := testbed.Get(t, words[2]+"/debug/pprof/goroutine?debug=2")
		for _, of := range []string{"nats-io/nats-server", "nats-io/nats.go"} {
			if strings.Contains(goroutines, of) != want {
				t.Errorf("goroutines of %s in %s: %v, want %v\n%s", of, verb, !want, want, goroutines)
			}
		}
		p.Signal(syscall.SIGTERM)
		if err := p.Wait(); err != nil {
			t.Error(err)
		}
	}
}

func TestServeNamesWhatNeedsABroker(t *testing.T) {
	t.Parallel()
	p, address, _ := serveFile(t, echoes+freePorts)
	const infer, blob = "/v1/pipelines/p:infer", `{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["a"]}]}`
	const id = "01890000-0000-7000-8000-000000000000"
	for _, row := range []struct {
		method, path, body, header string
	}{
		{http.MethodPost, infer, blob, "Stagemesh-Durability: file"},
		{http.MethodPost, infer, blob, "Idempotency-Key: a"},
		{http.MethodGet, "/v1/requests/" + id + "/result", "", ""},
		{http.MethodGet, "/v1/requests/" + id + "/result?wait=10s", "", ""},
		{http.MethodPost, "/v1/queues/q/jobs", blob, ""},
		{http.MethodGet, "/v1/queues/q/jobs", "", ""},
		{http.MethodGet, "/v1/jobs/q." + id, "", ""},
		{http.MethodGet, "/v1/files", "", ""},
		{http.MethodPost, "/v1/files", "", "Content-Type: multipart/form-data; boundary=b"},
		{http.MethodPost, "/v1/batches", `{"input_file_id":"f","endpoint":"/v1/infer","completion_window":"24h"}`, ""},
		{http.MethodGet, "/v1/batches/" + id, "", ""},
	} {
		code, text := ask(t, row.method, address+row.path, row.body, row.header)
		if code != http.StatusNotImplemented || !strings.Contains(text, "stagemesh serve has no broker") || !strings.Contains(text, "stagemesh up has one") {
			t.Errorf("%s %s %s: %d %s", row.method, row.path, row.header, code, text)
		}
	}
	admin := p.admin(t)
	for _, verb := range []string{"dead-letters list", "dead-letters show 1", "dead-letters replay 1", "queues", "queues pause q", "models list", "aliases list", "pipelines delete p"} {
		_, err := run(t, append(strings.Fields(verb), "--admin", admin)...)
		if status.Code(err) != codes.Unimplemented && (err == nil || !strings.Contains(err.Error(), "stagemesh serve")) {
			t.Errorf("%s: %v", verb, err)
		}
	}
	if out, err := run(t, "status", "--admin", admin); err != nil || !strings.Contains(out, "1/1") {
		t.Errorf("status: %s, %v", out, err)
	}
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

func TestServeRejectsFilesThatNeedABroker(t *testing.T) {
	t.Parallel()
	worker := filepath.Join(t.TempDir(), "my_adder.py")
	save(t, worker, addTo("x", 1))
	const stage = "mesh: m\nstages:\n  a: {runner: {echo: {}}%s}\n%s"
	for name, row := range map[string]struct {
		stage, rest, want string
	}{
		"a broker":              {"", "nats: {url: \"nats://127.0.0.1:4222\"}", "nats: needs a broker"},
		"a port of the broker":  {"", "nats: {listen: \"127.0.0.1:0\"}", "nats: needs a broker"},
		"results":               {"", "results: {retention: 2h}", "results: needs a broker"},
		"jobs":                  {"", "pipelines: {p: {steps: [{name: s, stage: a}]}}\njobs: {pools: {q: {target: {pipelines: [p]}}}, queues: {q: {}}}", "jobs: needs a broker"},
		"a registry":            {"", "registry: {consul: {}}", "registry: needs a broker"},
		"no local hops":         {"", "local_hops: false", "local_hops: needs a broker"},
		"a durable pipeline":    {"", "pipelines: {p: {durability: file, steps: [{name: s, stage: a}]}}", "pipelines.p.durability: needs a broker"},
		"only a queue on file":  {", queue: {durabilities: [file]}", "", "stages.a.queue.durabilities: needs a broker"},
		"two stages":            {"}\n  b: {runner: {echo: {}}", "", "stages: stagemesh serve runs one stage, and these are 2"},
		"options of a worker":   {"", "flag", "--workers and --options are for a worker"},
		"an error of all files": {", hosts: x", "", "hosts"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := []string{"serve", testbed.MeshFile(t, fmt.Sprintf(stage, row.stage, row.rest))}
			if row.rest == "flag" {
				args = []string{"serve", testbed.MeshFile(t, echoes), "--workers", "2"}
			}
			_, err := run(t, args...)
			if err == nil || !strings.Contains(err.Error(), row.want) {
				t.Errorf("it ended with %v, want %q", err, row.want)
			}
		})
	}
	for name, row := range map[string]struct {
		args []string
		want string
	}{
		"nothing":   {nil, "give one FILE"},
		"two":       {[]string{worker, worker}, "give one FILE"},
		"not there": {[]string{worker + "x.py"}, "no such file"},
		"address":   {[]string{worker, "--listen", "here"}, "--listen"},
	} {
		if _, err := run(t, append([]string{"serve"}, row.args...)...); err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: it ended with %v, want %q", name, err, row.want)
		}
	}
}

func TestServeEndsWithTheWorkersMistake(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "my_adder.py")
	save(t, path, "import nothing_of_that_name\n")
	if _, err := run(t, slices.Concat([]string{"serve", path}, anyPorts)...); err == nil || !strings.Contains(err.Error(), "nothing_of_that_name") {
		t.Errorf("it ended with %v", err)
	}
}

// gated is a worker that starts, and runs batches, while a file is not there. A negative number ends it,
// and the first time it takes longer to start again than a host of a mesh keeps its items.
const gated = `import os, time

from stagemesh import Tensor, Worker, serve


class Gated(Worker):
    inputs = {"x": Tensor("FP32", [-1, 1])}
    outputs = {"x": Tensor("FP32", [-1, 1])}

    def setup(self, ctx):
        self.gate = ctx.options["closed"]
        self.wait()
        if os.path.exists(self.gate + ".ended"):
            os.rename(self.gate + ".ended", self.gate + ".late")
            time.sleep(4)

    def wait(self):
        while os.path.exists(self.gate):
            time.sleep(0.01)

    def predict(self, batch):
        self.wait()
        x = batch["x"]
        if any(x[i, 0] < 0 for i in range(batch.rows)):
            if not os.path.exists(self.gate + ".late"):
                open(self.gate + ".ended", "w").close()
            os._exit(3)
        return {"x": x}


serve(Gated, arrays="buffer")
`

// gatedFile returns a mesh file of a gated worker, and functions that close and open its gate.
func gatedFile(t *testing.T, rest string) (text string, shut, open func()) {
	t.Helper()
	folder := t.TempDir()
	worker, gate := filepath.Join(folder, "gated.py"), filepath.Join(folder, "closed")
	save(t, worker, gated)
	const file = `mesh: m
stages:
  gated:
    runner: {worker: {command: [python3, -m, stagemesh, %q], options: {closed: %q}}}
%s`
	return fmt.Sprintf(file, worker, gate, rest) + freePorts, func() { save(t, gate, "") }, func() {
		if err := os.Remove(gate); err != nil {
			t.Error(err)
		}
	}
}

// endAnswered awaits so many answers, none of which may be a failure, and ends the process.
func endAnswered(t *testing.T, p *process, statuses <-chan int, n int) {
	t.Helper()
	for range n {
		if code := testbed.Receive(t, "an answer", statuses); code != http.StatusOK {
			t.Errorf("an admitted request is answered %d", code)
		}
	}
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

func TestServeIsReadyOnceItsWorkerIs(t *testing.T) {
	t.Parallel()
	text, shut, open := gatedFile(t, "")
	shut()
	p := start(t, "serve", testbed.MeshFile(t, text))
	port := regexp.MustCompile(`operations port listens" address=(\S+)`)
	testbed.Eventually(t, "the operations port listens", func() bool { return port.MatchString(p.errOut.String()) })
	url := "http://" + port.FindStringSubmatch(p.errOut.String())[1]
	if code, text := ask(t, http.MethodGet, url+"/readyz", ""); code != http.StatusServiceUnavailable {
		t.Errorf("before the worker is ready: %d %s", code, text)
	}
	open()
	p.ready(t)
	if code, text := ask(t, http.MethodGet, url+"/readyz", ""); code != http.StatusOK {
		t.Errorf("the worker is ready: %d %s", code, text)
	}
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

func TestServeIsNotReadyWhileItsWorkerIsDead(t *testing.T) {
	t.Parallel()
	text, _, _ := gatedFile(t, "")
	p, address, operations := serveFile(t, text)
	probes := []string{operations + "/readyz", address + "/readyz", address + "/v2/health/ready", address + "/v2/models/gated/ready"}
	areReady := func(want int) func() bool {
		return func() bool {
			return !slices.ContainsFunc(probes, func(url string) bool {
				code, _ := ask(t, http.MethodGet, url, "")
				return code != want
			})
		}
	}
	testbed.Eventually(t, "serve is ready", areReady(http.StatusOK))
	poison := make(chan int, 1)
	go func() {
		code, _ := ask(t, http.MethodPost, address+"/v1/pipelines/gated:infer", strings.Replace(three, "[3]", "[-1]", 1))
		poison <- code
	}()
	testbed.Eventually(t, "serve is not ready while its worker starts again", areReady(http.StatusServiceUnavailable))
	testbed.Receive(t, "the answer to the poison item", poison)
	testbed.Eventually(t, "serve is ready again", areReady(http.StatusOK))
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

// answers sends so many requests at once, and returns a channel with the status of each.
func answers(t *testing.T, url string, n int, headers ...string) <-chan int {
	t.Helper()
	out := make(chan int, n)
	for range n {
		go func() {
			code, _ := ask(t, http.MethodPost, url, three, headers...)
			out <- code
		}()
	}
	return out
}

func TestServeRejectsOverloadAtOnceAndAnswersTheRestWhenItStops(t *testing.T) {
	t.Parallel()
	text, shut, open := gatedFile(t, "    queue: {max_items: 4}\n")
	p, address, operations := serveFile(t, text)
	shut()
	const n = 20
	url := address + "/v1/pipelines/gated:infer"
	statuses := answers(t, url, n)
	for range n - 4 {
		if code := testbed.Receive(t, "a rejection", statuses); code != http.StatusTooManyRequests {
			t.Errorf("beyond its queue it answers %d", code)
		}
	}
	_, err := inferencev1.NewInferenceServiceClient(testbed.Dial(t, address)).Infer(t.Context(), addOne("gated"))
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("gRPC: %v", err)
	}
	p.stop()
	testbed.Eventually(t, "it drains", func() bool {
		code, _ := ask(t, http.MethodGet, operations+"/readyz", "")
		return code == http.StatusServiceUnavailable
	})
	open()
	for range 4 {
		if code := testbed.Receive(t, "an answer", statuses); code != http.StatusOK {
			t.Errorf("what was admitted is answered %d", code)
		}
	}
	if err := testbed.Receive(t, "the end", p.ended); err != nil {
		t.Error(err)
	}
}

func TestServeAnswersAllThatWaitForCapacity(t *testing.T) {
	t.Parallel()
	text, shut, open := gatedFile(t, "    queue: {max_items: 1}\n")
	p, address, _ := serveFile(t, text)
	shut()
	const n = 50
	all := answers(t, address+"/v1/pipelines/gated:infer", n, "Stagemesh-Wait-For-Capacity: true")
	open()
	endAnswered(t, p, all, n)
}

func TestServeAnswersTheNeighboursOfAPoisonItem(t *testing.T) {
	t.Parallel()
	text, shut, open := gatedFile(t, "")
	p, address, operations := serveFile(t, text)
	shut()
	url := address + "/v1/pipelines/gated:infer"
	const n = 8
	good := answers(t, url, n)
	poison := make(chan string, 1)
	go func() {
		_, answer := ask(t, http.MethodPost, url, strings.Replace(three, "[3]", "[-1]", 1))
		poison <- answer
	}()
	testbed.Eventually(t, "all are in flight", func() bool {
		_, page := ask(t, http.MethodGet, operations+"/metrics", "")
		return regexp.MustCompile(fmt.Sprintf(`(?m)^stagemesh_gateway_requests_in_flight\S* %d$`, n+1)).MatchString(page)
	})
	open()
	if answer := testbed.Receive(t, "an answer", poison); !strings.Contains(answer, "RUNNER_CRASHED") {
		t.Errorf("the item that ends its worker is answered %s", answer)
	}
	endAnswered(t, p, good, n)
}

func TestServeStreams(t *testing.T) {
	t.Parallel()
	p, address, _ := serveWorker(t, fmt.Sprintf(teller, 32))
	_, text := ask(t, http.MethodPost, address+"/v1/pipelines/my-adder:stream", "a b c", "Content-Type: text/plain")
	if strings.Count(text, "event: chunk") != 3 {
		t.Errorf("three words are answered by %s", text)
	}
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

func TestServeTakesTheLargestPayload(t *testing.T) {
	t.Parallel()
	p, address, _ := serveFile(t, echoes+"gateway: {max_payload: 7MiB, listen: \"127.0.0.1:0\", admin: {listen: \"127.0.0.1:0\"}}\nops: {listen: \"127.0.0.1:0\"}\n")
	blob := bytes.Repeat([]byte{1}, 7<<20-1024)
	in := &inferencev1.InferRequest{Pipeline: "p", Inputs: []*inferencev1.Part{{Name: "x", Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{Data: blob, ContentType: "application/octet-stream"}}}}}
	out, err := inferencev1.NewInferenceServiceClient(testbed.Dial(t, address)).Infer(t.Context(), in, grpc.MaxCallRecvMsgSize(16<<20))
	if err != nil || !bytes.Equal(out.GetOutputs()[0].GetBlob().GetData(), blob) {
		t.Errorf("it answers %d outputs, %v", len(out.GetOutputs()), err)
	}
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}
