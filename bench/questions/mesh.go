package questions

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/services/runners"
)

const (
	// size is a model's, in KiB.
	size = 64
	// score loads models, plain is a stage with the same runner without models.
	score, plain = "score", "stage:plain"
)

// mesh is a running mesh of processes.
type mesh struct {
	*compare.Bed
	file   string
	client inferencev1connect.InferenceServiceClient
	input  []*inferencev1.Part
}

// setup is a mesh to measure.
type setup struct {
	// hosts have room for so many models each, besides what loads borrow.
	hosts, room int
	// models are registered, whose loads and unloads take so long; and loaded if isLoaded is true.
	models       int
	load, unload time.Duration
	isLoaded     bool
}

// with measures on a mesh that it starts, with the names of its models.
func (m *measurement) with(ctx context.Context, s setup, measure func(b *mesh, all []string) error) error {
	b := &mesh{file: filepath.Join(m.folder, fmt.Sprint(time.Now().UnixNano(), ".yaml"))}
	text := fmt.Sprintf(`mesh: bench
gateway: {model_control: true}
stages:
  score: {hosts: %d, runner: {echo_models: {}}, models: {capacity: %dKiB, default_size: %dKiB}}
  plain: {runner: {echo: {}}}
`, s.hosts, max(s.room+1, (100*s.room+98)/99)*size, size)
	if err := os.WriteFile(b.file, []byte(text), 0o600); err != nil {
		return err
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}
	if b.Bed, err = compare.StartBed(ctx, compare.BedSettings{File: b.file, Program: program, Arguments: []string{compare.PartName}}); err != nil {
		return err
	}
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	defer transport.CloseIdleConnections()
	b.client = inferencev1connect.NewInferenceServiceClient(&http.Client{Transport: transport}, b.GRPCURL(), connect.WithGRPC())
	data := make([]byte, 1<<10)
	rand.Read(data)
	b.input = payload.ToProto([]payload.Part{payload.OfBlob("", "application/octet-stream", data)})
	all := names("m", s.models)
	if s.models > 0 {
		_, err = b.register(ctx, all, s.load, s.unload)
	}
	if err == nil && s.isLoaded {
		err = b.each(ctx, all, few, first)
	}
	if err == nil {
		err = measure(b, all)
	}
	return errors.Join(err, b.Stop())
}

// names returns the names of n models.
func names(prefix string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("model:%s%05d", prefix, i)
	}
	return out
}

// register registers models from a file, and returns how long that takes.
func (b *mesh) register(ctx context.Context, all []string, load, unload time.Duration) (time.Duration, error) {
	var lines []byte
	for _, name := range all {
		lines = fmt.Appendf(lines, `{"id": %q, "stage": %q, "type": "echo", "source": %q, "size": {"host": %d}, "options": {"load": %q, "unload": %q}}`+"\n",
			name[len("model:"):], score, name, size<<10, load, unload)
	}
	file := b.file + ".jsonl"
	if err := os.WriteFile(file, lines, 0o600); err != nil {
		return 0, err
	}
	cmd := cli.New()
	cmd.SetArgs([]string{"models", "register", "--file", file, "--admin", b.URL()})
	cmd.SetOut(io.Discard)
	begin := time.Now()
	err := cmd.ExecuteContext(ctx)
	return time.Since(begin), err
}

// infer sends a request, and returns the timing of its step.
func (b *mesh) infer(ctx context.Context, name string) (*inferencev1.StepTiming, error) {
	request := connect.NewRequest(&inferencev1.InferRequest{Pipeline: name, Inputs: b.input})
	answer, err := b.client.Infer(ctx, request)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return answer.Msg.GetTimeline().GetSteps()[0], nil
}

// each sends a request for each model, so many at a time, and gives each answer to a function,
// one at a time.
func (b *mesh) each(ctx context.Context, all []string, atOnce int, answered func(step *inferencev1.StepTiming, took time.Duration, err error) error) error {
	var mu sync.Mutex
	calls, ctx := errgroup.WithContext(ctx)
	calls.SetLimit(atOnce)
	for _, name := range all {
		calls.Go(func() error {
			begin := time.Now()
			step, err := b.infer(ctx, name)
			took := time.Since(begin)
			mu.Lock()
			defer mu.Unlock()
			return answered(step, took, err)
		})
	}
	return calls.Wait()
}

// first takes the first answers of models that are loaded so.
func first(_ *inferencev1.StepTiming, _ time.Duration, err error) error { return err }

// target sends requests for models in turn.
func (b *mesh) target(all ...string) load.Target {
	var next atomic.Int64
	return func(ctx context.Context, _ *load.Answer) error {
		_, err := b.infer(ctx, all[int(next.Add(1)-1)%len(all)])
		return err
	}
}

// load returns a function that sends a load.
func (b *mesh) load(ctx context.Context, s load.Settings, all ...string) func() (load.Run, error) {
	return func() (load.Run, error) { return runLoad(ctx, s, b.target(all...)) }
}

// runLoad sends a load. A request that fails is an error.
func runLoad(ctx context.Context, s load.Settings, target load.Target) (load.Run, error) {
	recorder := load.NewRecorder(0)
	outcome, err := load.RunLoad(ctx, s, target, recorder.Record)
	if err != nil {
		return load.Run{}, err
	}
	out := recorder.Run(s, outcome)
	switch {
	case out.Interrupted:
		err = context.Cause(ctx)
	case out.Failed > 0:
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
	load.Separate(f)
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
	heap, err := steadyHeap(ctx)
	return heap, errors.Join(err, m.Stop())
}
