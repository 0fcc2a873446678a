package models

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/services/bench"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/services/runners"
)

const (
	// size is that of a model, in KiB.
	size = 64
	// score loads models, plain has the same runner without models.
	score, plain = "score", "stage:plain"
)

// mesh is a running mesh of processes: broker and gateway, hosts of the stage score, and one of
// the stage plain.
type mesh struct {
	*compare.Bed
	folder, file string
	http         *http.Client
	client       inferencev1connect.InferenceServiceClient
	input        []*inferencev1.Part
}

// start starts a mesh whose hosts have room for so many models each, besides what loads borrow.
func (m *measurement) start(ctx context.Context, hosts, room int) (*mesh, error) {
	folder, err := os.MkdirTemp(m.folder, "")
	if err != nil {
		return nil, err
	}
	out := &mesh{folder: folder, file: filepath.Join(folder, "mesh.yaml")}
	capacity := max(room+1, (100*room+98)/99) * size
	text := fmt.Sprintf(`mesh: bench
gateway: {model_control: true}
stages:
  score: {hosts: %d, runner: {echo_models: {}}, models: {capacity: %dKiB, default_size: %dKiB}}
  plain: {runner: {echo: {}}}
`, hosts, capacity, size)
	if err := os.WriteFile(out.file, []byte(text), 0o600); err != nil {
		return nil, err
	}
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	if out.Bed, err = compare.StartBed(ctx, compare.BedSettings{File: out.file, Program: program, Arguments: []string{compare.PartName}}); err != nil {
		return nil, err
	}
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	out.http = &http.Client{Transport: transport}
	out.client = inferencev1connect.NewInferenceServiceClient(out.http, out.URL(), connect.WithGRPC())
	data := make([]byte, 1<<10)
	rand.Read(data)
	out.input = payload.ToProto([]payload.Part{payload.OfBlob("", "application/octet-stream", data)})
	return out, nil
}

// stop stops the mesh.
func (b *mesh) stop() error {
	b.http.CloseIdleConnections()
	return b.Stop()
}

// names are those of n models.
func names(prefix string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("model:%s%05d", prefix, i)
	}
	return out
}

// register registers models from a file, and returns how long that takes.
func (b *mesh) register(ctx context.Context, all []string, load, unload time.Duration) (time.Duration, error) {
	path := filepath.Join(b.folder, "models.jsonl")
	file, err := os.Create(path)
	if err != nil {
		return 0, err
	}
	for _, name := range all {
		fmt.Fprintf(file, `{"id": %q, "stage": %q, "type": "echo", "source": %q, "size": {"host": %d}, "options": {"load": %q, "unload": %q}}`+"\n",
			name[len("model:"):], score, "models/"+name, size<<10, load, unload)
	}
	if err := file.Close(); err != nil {
		return 0, err
	}
	cmd := cli.New()
	cmd.SetArgs([]string{"models", "register", "--file", path, "--admin", b.URL()})
	cmd.SetOut(io.Discard)
	begin := time.Now()
	err = cmd.ExecuteContext(ctx)
	return time.Since(begin), err
}

// infer sends a request, and returns the timeline of its step.
func (b *mesh) infer(ctx context.Context, name string) (*inferencev1.StepTiming, error) {
	request := connect.NewRequest(&inferencev1.InferRequest{Pipeline: name, Inputs: b.input})
	request.Header().Set("User-Agent", "stagemesh-bench grpc-go")
	answer, err := b.client.Infer(ctx, request)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if steps := answer.Msg.GetTimeline().GetSteps(); len(steps) == 1 {
		return steps[0], nil
	}
	return nil, fmt.Errorf("%s: the answer has the timeline %v", name, answer.Msg.GetTimeline())
}

// load has hosts load models.
func (b *mesh) load(ctx context.Context, all []string) error {
	calls, ctx := errgroup.WithContext(ctx)
	calls.SetLimit(16)
	for _, name := range all {
		calls.Go(func() error {
			_, err := b.infer(ctx, name)
			return err
		})
	}
	return calls.Wait()
}

// run sends a load to pipelines in turn. A request that fails is an error.
func (b *mesh) run(ctx context.Context, s bench.Settings, all ...string) (bench.Run, error) {
	var next atomic.Int64
	recorder := bench.NewRecorder(0)
	outcome, err := bench.RunLoad(ctx, s, func(ctx context.Context, _ *bench.Answer) error {
		_, err := b.infer(ctx, all[int(next.Add(1))%len(all)])
		return err
	}, recorder.Record)
	if err != nil {
		return bench.Run{}, err
	}
	out := recorder.Run(s, outcome)
	if out.Failed > 0 {
		err = fmt.Errorf("%d of %d requests failed: %s", out.Failed, out.Sent, out.Failures[0].Example)
	}
	return out, err
}

// heap returns the heap of this process after a gateway, or else a host, has joined the mesh
// and knows its models.
func (b *mesh) heap(ctx context.Context, gateway bool) (float64, error) {
	f, err := meshfile.Flags{Broker: b.BrokerURL()}.Read(b.file, runners.All()...)
	if err != nil {
		return 0, err
	}
	bench.Separate(f)
	settings := stagemesh.FileSettings{Stages: []string{}}
	if !gateway {
		settings = stagemesh.FileSettings{Stages: []string{score}, NoGateway: true}
	}
	m, err := stagemesh.FromFile(f, settings)
	if err != nil {
		return 0, err
	}
	if err := m.Start(ctx); err != nil {
		return 0, err
	}
	// It has read everything when the heap does not grow any more.
	var before, stats runtime.MemStats
	for before.HeapAlloc == 0 || stats.HeapAlloc > before.HeapAlloc+(64<<10) {
		before = stats
		pause(ctx, time.Second/2)
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&stats)
	}
	return float64(stats.HeapAlloc), m.Stop()
}

// pause waits, unless the context ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
