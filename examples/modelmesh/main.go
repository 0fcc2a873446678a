// Command modelmesh serves 300 models on three hosts that hold a third of them. Reader k reads
// a handwritten digit and answers (digit + k) mod 10, so that an answer of a wrong model shows.
// 270 readers are softmax models for a worker in Python, 30 are ONNX files. It sends requests
// for readers by Zipf's law, prints how the cache did, and ends. With the argument switch it moves
// an alias from reader to reader under load instead.
package main

import (
	"bufio"
	"context"
	"embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/internal/request"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/examples/digits"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/runners"
)

//go:embed mesh.yaml reader.py softmax.json
var files embed.FS

// inFlight is how many requests are sent at a time.
const inFlight = 64

func main() {
	requests := flag.Int("requests", 3000, "requests to send")
	level := flag.String("log-level", "warn", "debug, info, warn or error")
	flag.Parse()
	ctx, stop := process.SignalContext(context.Background())
	defer stop()
	do := sendZipf
	if flag.Arg(0) == "switch" {
		do = switchReaders
	}
	if err := run(ctx, os.Stdout, *requests, *level, do); err != nil {
		fmt.Fprintln(os.Stderr, "modelmesh:", err)
		os.Exit(1)
	}
}

// errDone ends the mesh after the requests.
var errDone = errors.New("done")

// demo sends requests to the readers and prints what it saw.
type demo func(ctx context.Context, out io.Writer, c *caller, requests int) error

func run(ctx context.Context, out io.Writer, requests int, level string, do demo) error {
	folder, err := os.MkdirTemp("", "modelmesh-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder) //nolint:errcheck // what stays behind is in the system's folder for such things
	models := filepath.Join(folder, "models")
	if err := errors.Join(os.CopyFS(folder, files), os.Mkdir(models, 0o700)); err != nil {
		return err
	}
	all, err := generate(models)
	if err != nil {
		return err
	}
	file, err := meshfile.Load(filepath.Join(folder, "mesh.yaml"), runners.All()...)
	if err != nil {
		return err
	}
	file.Gateway.Listen, file.Gateway.Admin.Listen, file.Ops.Listen = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	log, err := program.Flags{Level: level, Format: "text"}.Apply(os.Stderr)
	if err != nil {
		return err
	}
	p := stagemesh.Program{File: file, FileSettings: stagemesh.FileSettings{Logger: log}, Ready: func(m *stagemesh.Mesh, ops net.Addr) error {
		transport := &http.Transport{}
		defer transport.CloseIdleConnections()
		client := &http.Client{Transport: transport}
		c := &caller{mesh: m, client: client, models: adminv1connect.NewModelServiceClient(client, m.AdminURL()), metrics: "http://" + ops.String() + "/metrics"}
		if err := c.register(ctx, all...); err != nil {
			return err
		}
		if err := do(ctx, out, c, requests); err != nil {
			return err
		}
		return errDone
	}}
	if err := p.Run(ctx); !errors.Is(err, errDone) {
		return errors.Join(err, ctx.Err())
	}
	return nil
}

// register registers the models by the admin port.
func (c *caller) register(ctx context.Context, all ...*meshv1.Model) error {
	for _, m := range all {
		_, err := c.models.RegisterModel(ctx, connect.NewRequest(&adminv1.RegisterModelRequest{Model: m}))
		for connect.CodeOf(err) == connect.CodeUnavailable && process.Sleep(ctx, time.Second/10) == nil {
			// The gateway does not know the registry yet.
			_, err = c.models.RegisterModel(ctx, connect.NewRequest(&adminv1.RegisterModelRequest{Model: m}))
		}
		if err != nil {
			return fmt.Errorf("model %s: %w", m.GetId(), err)
		}
	}
	return nil
}

// caller asks readers and counts their right answers.
type caller struct {
	mesh    *stagemesh.Mesh
	client  *http.Client
	models  adminv1connect.ModelServiceClient
	metrics string // their URL

	asked, right [2]atomic.Int64 // of softmax models, and of networks
}

// sendZipf sends requests to readers that Zipf's law chooses.
func sendZipf(ctx context.Context, out io.Writer, c *caller, requests int) error {
	images, err := fs.Glob(digits.FS, "images/*.png")
	if err != nil {
		return err
	}
	// A fixed seed: each run asks the same.
	popular := rand.NewZipf(rand.New(rand.NewPCG(1, 2)), 1.1, 1, readers-1) //nolint:gosec // it is not a secret
	calls, calling := errgroup.WithContext(ctx)
	calls.SetLimit(inFlight)
	for i := range requests {
		// Readers of both kinds are popular.
		k := int(popular.Uint64()) * 7 % readers
		calls.Go(func() error { return c.ask(calling, k, images[i%len(images)]) })
	}
	if err := calls.Wait(); err != nil {
		return err
	}
	return c.print(ctx, out)
}

// busy are the faults after which a caller tries again.
var busy = []fault.Reason{fault.CacheFull, fault.ModelLoading, fault.Overloaded}

// ask asks reader k for the digit of an image, again where a host has no room for it yet.
func (c *caller) ask(ctx context.Context, k int, image string) error {
	for {
		answer, err := c.read(ctx, stageOf(k), payload.ModelRef{Model: readerID(k)}, image)
		if f := fault.From(err); err != nil && slices.Contains(busy, f.Reason) {
			if err := process.Sleep(ctx, f.RetryAfter); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("%s: %w", readerID(k), err)
		}
		_, label, _ := strings.Cut(strings.TrimSuffix(path.Base(image), ".png"), "-")
		digit, err := strconv.Atoi(label)
		if err != nil {
			return err
		}
		kind := 0
		if k >= softmaxReaders {
			kind = 1
		}
		c.asked[kind].Add(1)
		if answer == (digit+k)%digitCount {
			c.right[kind].Add(1)
		}
		return nil
	}
}

// read returns the answer of a reader of the pipeline to an image.
func (c *caller) read(ctx context.Context, name string, by payload.ModelRef, image string) (int, error) {
	data, err := digits.FS.ReadFile(image)
	if err != nil {
		return 0, err
	}
	response, err := c.mesh.Infer(ctx, &request.Request{
		Pipeline: name,
		Inputs:   []payload.Part{payload.OfBlob("image", "image/png", data)},
		Steps:    map[pipeline.StepName]pipeline.StepOptions{"read": {Model: by}},
	})
	if err != nil {
		return 0, err
	}
	scores, err := response.Outputs[0].Tensor.FP32Values()
	if err != nil {
		return 0, err
	}
	return slices.Index(scores, slices.Max(scores)), nil
}

// sum returns the sums of metrics whose lines begin so.
func (c *caller) sum(ctx context.Context, prefixes ...string) (map[string]float64, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.metrics, http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := c.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close() //nolint:errcheck // it was only read
	sums := map[string]float64{}
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		for _, prefix := range prefixes {
			if line := lines.Text(); strings.HasPrefix(line, "stagemesh_"+prefix) {
				value, _ := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
				sums[prefix] += value
			}
		}
	}
	return sums, nil
}

// print prints what was counted, here and by the hosts.
func (c *caller) print(ctx context.Context, out io.Writer) error {
	const hit, miss = `stage_model_requests_total{result="hit"`, `stage_model_requests_total{result="miss"`
	const loaded, evicted = `stage_model_loads_total{outcome="loaded"`, `stage_model_evictions_total{`
	sums, err := c.sum(ctx, hit, miss, loaded, evicted)
	if err != nil {
		return err
	}
	hits, misses := sums[hit], sums[miss]
	fmt.Fprintf(out, "requests   %d\n", c.asked[0].Load()+c.asked[1].Load())
	fmt.Fprintf(out, "hits       %.0f of %.0f, %.0f %%\n", hits, hits+misses, 100*hits/(hits+misses))
	fmt.Fprintf(out, "loads      %.0f\n", sums[loaded])
	fmt.Fprintf(out, "evictions  %.0f\n", sums[evicted])
	for kind, name := range []string{"softmax", "network"} {
		asked, right := c.asked[kind].Load(), c.right[kind].Load()
		fmt.Fprintf(out, "%s    %d of %d right: accuracy %.2f\n", name, right, asked, float64(right)/float64(max(1, asked)))
	}
	return nil
}
