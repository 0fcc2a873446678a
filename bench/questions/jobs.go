package questions

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/services/runners"
)

// ofJobs are the measurements of bench jobs, by name.
var ofJobs = map[string]func(*measurement, context.Context) error{
	"submit": (*measurement).submit, "drained": (*measurement).drained, "waited": (*measurement).waited, "queued": (*measurement).queued,
	"bulk": (*measurement).bulk, "beside": (*measurement).beside, "opened": (*measurement).opened, "batch": (*measurement).batch,
}

// JobGoals are the goals of bench jobs.
func JobGoals() []Goal {
	return []Goal{
		{"submit", "submit", true, 1, "submitted jobs of 1 KiB per second over answers of one stage, 64 in flight"},
		{"drained", "drain", true, 0.6, "jobs per second of a drain over durable requests, 256 in flight"},
		{"waited", "P50", false, 3, "P50 of a job waited for over that of a durable request, 1 in flight"},
		{"queued", "bytes", false, 256, "bytes of a dispatcher's heap per queued job"},
		{"bulk", "bulk", true, 0.3, "jobs of 1 KiB per second, submitted 1,000 at a time, over bare asynchronous publishes to a file stream"},
		{"beside", "P99", false, 1.5, "P99 of requests beside a backlog with the mesh gate over that without"},
		{"beside", "busy", true, 90, "percent of the time of the runners in use beside a backlog"},
		{"opened", "first send", false, inMS(gateInterval) + 50, "ms from the opening of a gate that is asked each 200 ms until the first attempt"},
		{"batch", "batch", false, 1.3, "time of a batch of 10,000 lines over that of a drain of as many jobs"},
	}
}

// NewJobs returns the command jobs. It starts this program's command part.
func NewJobs() *cobra.Command { return newCommand("jobs", "a mesh with queues of jobs", ofJobs) }

// The queues: the jobs of held wait behind one that takes its time.
const (
	echo, fast, held = "stage:echo", "fast", "held"
	// queuedJobs are as many as wait, before a drain or beside it.
	queuedJobs = 20_000
	// batchLines are the lines of a batch.
	batchLines = 10_000
	// submitters call SubmitJobs at a time, with maxJobs each.
	submitters, maxJobs = 4, 1000
)

// jobsFile has the keys of a gate's source.
const jobsFile = `mesh: bench
stages:
  echo: {runner: {echo: {}}}
  sleep: {runner: {sleep: {base: 2s}}}
  busy: {runner: {sleep: {base: 100ms, concurrency: 64}}, batch: {max_size: 1}}
pipelines:
  echo: {steps: [{name: echo, stage: echo}]}
  slow: {timeout: 10m, steps: [{name: sleep, stage: sleep}]}
  busy: {steps: [{name: busy, stage: busy}]}
jobs:
  pools:
    fast: {target: {pipelines: [echo]}, max_in_flight: 256}
    held: {target: {pipelines: [slow]}, max_in_flight: 1}
    beside: {target: {pipelines: [busy]}, max_in_flight: 64, gate: {interval: 100ms, mesh: {}, budget: {baseline: 0.15}}}
    gated: {target: {pipelines: [echo]}, gate: {%s}}
  queues:
    fast: {pool: fast}
    held: {pool: held}
    beside: {pool: beside}
    gated: {pool: gated}
  batches: {queue: fast}
`

// jobMesh is a running mesh of processes with queues.
type jobMesh struct {
	*compare.Bed
	file   string
	infer  inferencev1connect.InferenceServiceClient
	jobs   inferencev1connect.JobServiceClient
	inputs []*inferencev1.Part
}

// withJobs measures on a mesh that it starts.
func (m *measurement) withJobs(ctx context.Context, dispatches bool, measure func(b *jobMesh) error) error {
	return m.withGate(ctx, "constant: {}", dispatches, measure)
}

// withGate is withJobs with a gate of the queue gated.
func (m *measurement) withGate(ctx context.Context, gate string, dispatches bool, measure func(b *jobMesh) error) error {
	b := &jobMesh{file: filepath.Join(m.folder, fmt.Sprint(time.Now().UnixNano(), ".yaml"))}
	if err := os.WriteFile(b.file, fmt.Appendf(nil, jobsFile, gate), 0o600); err != nil {
		return err
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}
	arguments := []string{compare.PartName}
	if dispatches {
		arguments = append(arguments, "--"+compare.DispatcherFlag)
	}
	if b.Bed, err = compare.StartBed(ctx, compare.BedSettings{File: b.file, Program: program, Arguments: arguments}); err != nil {
		return err
	}
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	b.infer = inferencev1connect.NewInferenceServiceClient(client, b.GRPCURL(), connect.WithGRPC())
	b.jobs = inferencev1connect.NewJobServiceClient(client, b.GRPCURL(), connect.WithGRPC())
	data := make([]byte, 1<<10)
	rand.Read(data)
	b.inputs = payload.ToProto([]payload.Part{payload.OfBlob("", "application/octet-stream", data)})
	return errors.Join(measure(b), b.Stop())
}

// request returns a target of requests.
func (b *jobMesh) request(pipeline string, d inferencev1.Durability) load.Target {
	return func(ctx context.Context, _ *load.Answer) error {
		r := connect.NewRequest(&inferencev1.InferRequest{Pipeline: pipeline, Inputs: b.inputs, Durability: d})
		_, err := b.infer.Infer(ctx, r)
		return err
	}
}

// submit submits a job, and returns its ID.
func (b *jobMesh) submit(ctx context.Context, queue string) (string, error) {
	r := connect.NewRequest(&inferencev1.SubmitJobRequest{Queue: queue, Payload: &inferencev1.SubmitJobRequest_Infer{Infer: &inferencev1.InferRequest{Inputs: b.inputs}}})
	out, err := b.jobs.SubmitJob(ctx, r)
	if err != nil {
		return "", err
	}
	return out.Msg.GetJob().GetId(), nil
}

// fill submits jobs, as many in a call as it takes.
func (b *jobMesh) fill(ctx context.Context, queue string, n int) error {
	job := &inferencev1.SubmitJobRequest{Queue: queue, Payload: &inferencev1.SubmitJobRequest_Infer{Infer: &inferencev1.InferRequest{Inputs: b.inputs}}}
	submits, ctx := errgroup.WithContext(ctx)
	submits.SetLimit(submitters)
	for left := n; left > 0; left -= maxJobs {
		r := connect.NewRequest(&inferencev1.SubmitJobsRequest{Jobs: slices.Repeat([]*inferencev1.SubmitJobRequest{job}, min(left, maxJobs))})
		submits.Go(func() error {
			out, err := b.jobs.SubmitJobs(ctx, r)
			if err != nil {
				return err
			}
			for _, answer := range out.Msg.GetAnswers() {
				if answer.GetJob() == nil {
					return fmt.Errorf("a job was not accepted: %v", answer)
				}
			}
			return nil
		})
	}
	return submits.Wait()
}

func (b *jobMesh) load(ctx context.Context, s load.Settings, target load.Target) func() (load.Run, error) {
	return func() (load.Run, error) { return runLoad(ctx, s, target) }
}

// submit compares submits with requests.
func (m *measurement) submit(ctx context.Context) error {
	return m.withJobs(ctx, false, func(b *jobMesh) error {
		closed := load.Settings{Concurrency: 64, Warmup: warmup, Duration: m.duration}
		return m.pairs("submit", throughput, b.load(ctx, closed, func(ctx context.Context, _ *load.Answer) error {
			_, err := b.submit(ctx, fast)
			return err
		}), b.load(ctx, closed, b.request(echo, inferencev1.Durability_DURABILITY_MEMORY)))
	})
}

// drained compares a drain with durable requests.
func (m *measurement) drained(ctx context.Context) error {
	return m.withJobs(ctx, false, func(b *jobMesh) error {
		closed := load.Settings{Concurrency: 256, Warmup: warmup, Duration: m.duration}
		return m.pairs("drain", throughput, b.drain(ctx, queuedJobs), b.load(ctx, closed, b.request("echo", inferencev1.Durability_DURABILITY_FILE)))
	})
}

// drain returns a function that fills a queue, and drains it.
func (b *jobMesh) drain(ctx context.Context, jobs int) func() (load.Run, error) {
	return func() (out load.Run, err error) {
		if err := b.fill(ctx, fast, jobs); err != nil {
			return out, err
		}
		took, err := b.dispatch(ctx, func(*stagemesh.Mesh) error {
			return poll(ctx, func() (bool, error) {
				page, err := b.jobs.ListJobs(ctx, connect.NewRequest(&inferencev1.ListJobsRequest{Queue: fast, Limit: 1}))
				return err == nil && len(page.Msg.GetJobs()) == 0, err
			})
		})
		out.ThroughputPerS = float64(jobs) / took.Seconds()
		return out, err
	}
}

// poll calls a function until it returns true or an error.
func poll(ctx context.Context, holds func() (bool, error)) error {
	for {
		if ok, err := holds(); ok || err != nil {
			return err
		}
		if err := process.Sleep(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
}

// dispatch runs a dispatcher in this process while a function runs, and returns how long that
// takes.
func (b *jobMesh) dispatch(ctx context.Context, during func(*stagemesh.Mesh) error) (took time.Duration, err error) {
	f, err := meshfile.Flags{Broker: b.BrokerURL()}.Read(b.file, runners.All()...)
	if err != nil {
		return 0, err
	}
	load.Separate(f)
	m, err := stagemesh.FromFile(f, stagemesh.FileSettings{Stages: []string{}, Dispatcher: true})
	if err != nil {
		return 0, err
	}
	if err := m.Start(ctx); err != nil {
		return 0, err
	}
	begin := time.Now()
	err = during(m)
	took = time.Since(begin)
	return took, errors.Join(err, m.Stop())
}

// waited compares a job and the wait for its result with a durable request.
func (m *measurement) waited(ctx context.Context) error {
	return m.withJobs(ctx, true, func(b *jobMesh) error {
		alone := load.Settings{Concurrency: 1, Warmup: warmup, Duration: m.duration}
		return m.pairs("P50", p50, b.load(ctx, alone, func(ctx context.Context, _ *load.Answer) error {
			id, err := b.submit(ctx, fast)
			if err != nil {
				return err
			}
			r := connect.NewRequest(&inferencev1.GetJobRequest{Id: id, Wait: durationpb.New(10 * time.Second)})
			out, err := b.jobs.GetJob(ctx, r)
			if err != nil {
				return err
			}
			if state := out.Msg.GetJob().GetState(); state != inferencev1.JobState_JOB_STATE_SUCCEEDED {
				return fmt.Errorf("job %s: %s", id, state)
			}
			return nil
		}), b.load(ctx, alone, b.request("echo", inferencev1.Durability_DURABILITY_FILE)))
	})
}

// queued measures the memory of a dispatcher by the number of jobs.
func (m *measurement) queued(ctx context.Context) error {
	for range m.times {
		if err := m.withJobs(ctx, false, func(b *jobMesh) error {
			var heaps [2]float64
			for i := range heaps {
				if _, err := b.dispatch(ctx, func(*stagemesh.Mesh) (err error) {
					heaps[i], err = steadyHeap(ctx)
					return err
				}); err != nil {
					return err
				}
				if i == 0 {
					if err := b.fill(ctx, held, queuedJobs); err != nil {
						return err
					}
				}
			}
			m.add("bytes", (heaps[1]-heaps[0])/queuedJobs)
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// steadyHeap returns the heap of this process once it does not grow any more.
func steadyHeap(ctx context.Context) (float64, error) {
	var before, stats runtime.MemStats
	for before.HeapAlloc == 0 || stats.HeapAlloc > before.HeapAlloc+(64<<10) {
		before = stats
		if err := process.Sleep(ctx, time.Second/2); err != nil {
			return 0, err
		}
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&stats)
	}
	return float64(stats.HeapAlloc), nil
}
