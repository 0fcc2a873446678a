package librarytest

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

const smallDisk = 48 << 20

// diskBed is a mesh with its files on a small disk, and callers of requests in memory.
type diskBed struct {
	*stagemesh.Mesh
	t      *testing.T
	folder string
	// served and failed count the requests in memory.
	served, failed atomic.Int64
	failure        atomic.Pointer[error]
	slowest        atomic.Int64
	// release has the stage held answer.
	release chan struct{}
}

// startOnSmallDisk returns false in the process that only waits for the one with the disk.
func startOnSmallDisk(t *testing.T, nats string, options ...string) (*diskBed, bool) {
	t.Helper()
	folder := testbed.SmallDisk(t, smallDisk)
	if folder == "" {
		return nil, false
	}
	m := meshtest.FromFile(t, meshtest.Parse(t, `
mesh: m
nats: {store_dir: `+folder+nats+`}
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages: {echo: {runner: {echo: {}}}}
pipelines:
  p: {steps: [{name: e, stage: echo}]}
  filed: {durability: file, steps: [{name: e, stage: echo}]}
jobs:
  pools: {main: {target: {pipelines: [p]}}}
  queues: {nightly: {}}
  batches: {queue: nightly}
`+strings.Join(options, "")), stagemesh.FileSettings{Dispatcher: true, Logger: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))})
	b := &diskBed{t: t, folder: folder, release: make(chan struct{})}
	held := inproc.Each(inproc.Settings{}, func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
		select {
		case <-b.release:
			return item.Inputs, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	})
	err := m.AddStage(stagemesh.Stage{Name: "held", Runner: held, Config: stagehost.Config{DrainTimeout: time.Second}})
	if err == nil {
		err = m.AddPipeline(pipeline.Pipeline{Name: "held", Durability: pipeline.File, Steps: []pipeline.Step{{Name: "h", Stage: "held"}, {Name: "e", Stage: "echo"}}})
	}
	if err != nil {
		t.Fatal(err)
	}
	b.Mesh = meshtest.Start(t, m)
	ctx, stop := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	callers.Go(func() {
		for ctx.Err() == nil {
			began := time.Now()
			_, err := b.infer(ctx, pipeline.Memory)
			b.slowest.Store(max(b.slowest.Load(), int64(time.Since(began))))
			if err == nil {
				b.served.Add(1)
			} else if ctx.Err() == nil {
				b.failed.Add(1)
				b.failure.Store(&err)
				_ = process.Sleep(ctx, fault.From(err).RetryAfter) // as it asks for
			}
		}
	})
	t.Cleanup(func() {
		stop()
		callers.Wait()
	})
	return b, true
}

func (b *diskBed) infer(ctx context.Context, d pipeline.Durability) (*request.Response, error) {
	return b.Infer(ctx, &request.Request{Pipeline: "p", Durability: d, Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("x"))}})
}

// serves waits until more requests in memory are served.
func (b *diskBed) serves(when string) {
	b.t.Helper()
	before := b.served.Load()
	testbed.Eventually(b.t, "requests in memory are served "+when, func() bool { return b.served.Load() > before+10 })
}

func (b *diskBed) http(method, path, contentType, body string) (status int, answer string) {
	b.t.Helper()
	return b.send(method, b.URL()+path, contentType, body)
}

func (b *diskBed) send(method, url, contentType, body string) (status int, answer string) {
	b.t.Helper()
	r, err := http.NewRequestWithContext(b.t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	r.Header.Set("Content-Type", contentType)
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		b.t.Fatal(err)
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return response.StatusCode, string(data)
}

// stored makes each kind of request that is stored, and returns those that were.
func (b *diskBed) stored() (out []string) {
	b.t.Helper()
	began := time.Now()
	for name, r := range map[string]*request.Request{"durable": {Durability: pipeline.File}, "keyed": {IdempotencyKey: uuid.NewString()}} {
		r.Pipeline, r.Inputs = "p", []payload.Part{payload.OfBlob("", "text/plain", []byte("x"))}
		if _, err := b.Infer(b.t.Context(), r); err == nil {
			out = append(out, name)
		} else if f := fault.From(err); f.Reason == fault.BrokerUnavailable && name == "keyed" {
			continue // the key is read, which nobody answers while JetStream starts again
		} else if f.Reason != fault.StoreFull || f.RetryAfter <= 0 || !strings.Contains(f.Message, "store_dir") {
			b.t.Errorf("%s: %v", name, err)
		}
	}
	const file = "--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n" +
		"--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n{}\r\n--b--\r\n"
	for name, r := range map[string][3]string{"job": {"/v1/queues/nightly/jobs", "text/plain", "x"}, "file": {"/v1/files", "multipart/form-data; boundary=b", file}} {
		status, answer := b.http(http.MethodPost, r[0], r[1], r[2])
		switch {
		case status/100 == 2:
			out = append(out, name)
		case status != http.StatusTooManyRequests || !strings.Contains(answer, "STORE_FULL") && !strings.Contains(answer, "store_full"):
			b.t.Errorf("%s: %d %s", name, status, answer)
		}
	}
	apply := `{"pipeline": {"name": "` + fmt.Sprintf("applied-%d", began.UnixNano()) + `", "steps": [{"name": "e", "stage": "echo"}]}}`
	status, answer := b.send(http.MethodPost, b.AdminURL()+"/stagemesh.admin.v1.PipelineService/ApplyPipeline", "application/json", apply)
	switch {
	case status == http.StatusOK:
		out = append(out, "pipeline")
	case strings.Contains(answer, "REGISTRY_UNAVAILABLE"): // it connects to the broker again
	case status != http.StatusTooManyRequests || !strings.Contains(answer, "store_dir"):
		b.t.Errorf("pipeline: %d %s", status, answer)
	}
	slices.Sort(out)
	return out
}

// refusesAll requires that nothing is stored, and that all callers are told at once.
func (b *diskBed) refusesAll() {
	b.t.Helper()
	began := time.Now()
	if stored := b.stored(); len(stored) > 0 {
		b.t.Errorf("stored on a full disk: %v", stored)
	}
	if took := time.Since(began); took > 2*time.Second {
		b.t.Errorf("the answers took %s", took)
	}
}

func (b *diskBed) storesAll() bool { return len(b.stored()) == 5 }

func TestFullDiskStopsDurableRequestsAlone(t *testing.T) {
	t.Parallel()
	b, ok := startOnSmallDisk(t, "")
	if !ok {
		return
	}
	if !b.storesAll() || b.StoreReady() != nil {
		t.Fatal("not all is stored on an empty disk")
	}
	for range 3 {
		free := testbed.FillDisk(t, b.folder)
		b.refusesAll()
		if err := b.StoreReady(); err == nil || fault.From(err).Reason != fault.StoreFull || b.Ready() != nil {
			t.Errorf("ready: %v; to store: %v", b.Ready(), err)
		}
		if status, answer := b.http(http.MethodGet, "/readyz?pipeline=filed", "", ""); status != http.StatusServiceUnavailable || !strings.Contains(answer, "STORE_FULL") {
			t.Errorf("readyz of a durable pipeline: %d %s", status, answer)
		}
		if status, answer := b.http(http.MethodGet, "/readyz?pipeline=p", "", ""); status != http.StatusOK {
			t.Errorf("readyz of a pipeline in memory: %d %s", status, answer)
		}
		b.serves("on a full disk")
		free()
		testbed.Eventually(t, "all is stored again", func() bool { return b.StoreReady() == nil })
		testbed.Eventually(t, "all is stored again", b.storesAll)
		b.serves("once there is space")
	}
	if n := b.failed.Load(); n > 0 {
		t.Errorf("%d of %d requests in memory failed: %v", n, n+b.served.Load(), *b.failure.Load())
	}
}

func TestStreamsOpenAgainAfterAFailedWrite(t *testing.T) {
	t.Parallel()
	failAWrite(t, "")
}

func TestBrokeredRequestsGoOnWhileStreamsOpenAgain(t *testing.T) {
	t.Parallel()
	failAWrite(t, "local_hops: false")
}

// failAWrite has another client write to the stage's queue before the mesh has noticed the full disk.
func failAWrite(t *testing.T, options string) {
	t.Helper()
	b, ok := startOnSmallDisk(t, `, listen: "127.0.0.1:0"`, options)
	if !ok {
		return
	}
	if !b.storesAll() {
		t.Fatal("not all is stored on an empty disk")
	}
	other, err := nats.Connect(b.BrokerURL())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for range 2 {
		free := func() {}
		testbed.Eventually(t, "a write fails", func() bool {
			free()
			testbed.Eventually(t, "the broker stores", func() bool {
				_, err := other.Request("m.stage.echo.file.low", nil, time.Second)
				return err == nil
			})
			free = testbed.FillDisk(t, b.folder)
			_, err := other.Request("m.stage.echo.file.low", make([]byte, 1<<20), time.Second)
			return err != nil // an answer is a refusal
		})
		b.refusesAll()
		free()
		freed := time.Now()
		testbed.Eventually(t, "all is stored again", b.storesAll)
		t.Logf("stored %s after there was space; %d requests in memory, %d failed, the slowest took %s", time.Since(freed), b.served.Load(), b.failed.Load(), time.Duration(b.slowest.Load()))
	}
	b.serves("once streams are open again")
	// Two that are sent while the streams open again may be lost, or find the host not ready, each time.
	const lost = 4
	if n := b.failed.Load(); n > lost || n > 0 && !fault.From(*b.failure.Load()).Retryable() {
		t.Errorf("%d of %d requests in memory failed: %v", n, n+b.served.Load(), *b.failure.Load())
	}
}

// What has expired in a stream that a failed write has closed is deleted once the stream is open again,
// so it opens although the rest of the disk is full.
func TestExpiredMessagesMakeSpaceAfterAFailedWrite(t *testing.T) {
	t.Parallel()
	b, ok := startOnSmallDisk(t, `, listen: "127.0.0.1:0"`)
	if !ok {
		return
	}
	conn, err := nats.Connect(b.BrokerURL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "aging", Subjects: []string{"aging"}, Storage: jetstream.FileStorage, MaxAge: 5 * time.Second}); err != nil {
		t.Fatal(err)
	}
	const message, messages, left = 512 << 10, 32, 5 << 19 // left is less than what stays free of messages
	testbed.Eventually(t, "a write fails, of a stream that has most of the disk", func() bool {
		for range messages {
			if _, err := conn.Request("aging", make([]byte, message), time.Second); err != nil {
				return false
			}
		}
		free := testbed.FillDisk(t, b.folder)
		if _, err := conn.Request("aging", make([]byte, message), time.Second); err != nil {
			return true
		}
		free() // the broker has refused the message before that
		testbed.Eventually(t, "the broker stores", func() bool { return b.StoreReady() == nil })
		return false
	})
	fill := filepath.Join(b.folder, "fill")
	full, err := os.Stat(fill)
	if err == nil {
		err = os.Truncate(fill, full.Size()-left)
	}
	if err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the broker stores", func() bool { return b.StoreReady() == nil })
	testbed.Eventually(t, "all is stored again", b.storesAll)
}

func TestCallersWhoWaitHearOfAFullDisk(t *testing.T) {
	t.Parallel()
	b, ok := startOnSmallDisk(t, "")
	if !ok {
		return
	}
	failed := make(chan error, 1)
	go func() {
		_, err := b.Infer(t.Context(), &request.Request{Pipeline: "held", Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("x"))}})
		failed <- err
	}()
	testbed.Eventually(t, "the request is queued", func() bool {
		requests, err := nats.Connect("", nats.InProcessServer(b.Broker().Server))
		if err != nil {
			return false
		}
		defer requests.Close()
		answer, err := requests.Request("$JS.API.STREAM.INFO.m_held_file", nil, time.Second)
		return err == nil && strings.Contains(string(answer.Data), `"messages":1`)
	})
	free := testbed.FillDisk(t, b.folder)
	close(b.release)
	f := fault.From(testbed.Receive(t, "the fault", failed))
	if f.Reason != fault.StoreFull || f.Metadata["request_id"] == "" {
		t.Fatalf("the caller got %v", f)
	}
	free()
	if got := result(t, b.Mesh, f.Metadata["request_id"]); got != "x" {
		t.Errorf("the result is %q", got)
	}
}

func TestBrokerWithoutSpaceSaysWhyItDoesNotStart(t *testing.T) {
	t.Parallel()
	folder := testbed.SmallDisk(t, smallDisk)
	if folder == "" {
		return
	}
	testbed.FillDisk(t, folder)
	m := meshtest.FromFile(t, meshtest.Parse(t, "mesh: m\nnats: {store_dir: "+folder+"}\nstages: {echo: {runner: {echo: {}}}}\n"), stagemesh.FileSettings{})
	if err := m.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "nats.store_dir: the disk of "+folder+" has 0 free") {
		t.Errorf("started with %v", err)
	}
}
