package meshtest_test

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/jobs"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

func echo(t testing.TB) runner.Runner {
	r, err := runners.NewEcho(runners.EchoSettings{})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// BenchmarkHops is the cost of a request of 1 KiB through echo stages, with
// broker, hosts and gateway in one process.
func BenchmarkHops(b *testing.B) {
	for _, stages := range []int{1, 3} {
		for _, inFlight := range []int{1, 64, 256} {
			b.Run(fmt.Sprintf("stages=%d/inflight=%d", stages, inFlight), func(b *testing.B) { benchmarkHops(b, stages, inFlight) })
		}
	}
}

func benchmarkHops(b *testing.B, stages, inFlight int) {
	bed := meshtest.New(b)
	var route []pipeline.StageName
	for i := range stages {
		stage := pipeline.StageName(fmt.Sprintf("echo-%d", i))
		bed.Host(stage, echo(b))
		route = append(route, stage)
	}
	gateway := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("echo", route...)})
	request := &request.Request{Pipeline: "echo", Inputs: []payload.Part{payload.OfBlob("x", payload.OctetStream, make([]byte, 1024))}}
	work := make(chan struct{}, inFlight)
	b.ReportAllocs()
	b.ResetTimer()
	done := make(chan struct{})
	for range inFlight {
		go func() {
			defer func() { done <- struct{}{} }()
			for range work {
				if _, err := gateway.Service().Infer(b.Context(), request); err != nil {
					b.Error(err)
				}
			}
		}()
	}
	for range b.N {
		work <- struct{}{}
	}
	close(work)
	for range inFlight {
		<-done
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "req/s")
}

// BenchmarkClosedLoop shows how callers who each wait for their answer before
// they ask again share batches at a stage of 5 ms + 0.2 ms an item, batches of
// at most 32: the ceiling is 2,807 items a second.
func BenchmarkClosedLoop(b *testing.B) {
	for _, callers := range []int{1, 8, 32, 64, 128} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) { benchmarkClosedLoop(b, callers) })
	}
}

func benchmarkClosedLoop(b *testing.B, callers int) {
	sleep, err := runners.NewSleep(runners.SleepSettings{Base: 5 * time.Millisecond, PerItem: 200 * time.Microsecond})
	if err != nil {
		b.Fatal(err)
	}
	bed := meshtest.New(b)
	bed.Host("sleep", sleep, meshtest.Batch(batch.Settings{Mode: batch.Eager, MaxSize: 32, MaxWait: 10 * time.Millisecond}))
	gateway := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("sleep", "sleep")})
	request := &request.Request{Pipeline: "sleep", Inputs: []payload.Part{payload.OfBlob("x", payload.OctetStream, make([]byte, 1024))}}
	var left atomic.Int64
	left.Store(int64(b.N))
	times := make([][]time.Duration, callers)
	sizes := make([]map[uint32]int, callers)
	var loops sync.WaitGroup
	b.ResetTimer()
	for i := range callers {
		sizes[i] = map[uint32]int{}
		loops.Go(func() {
			for left.Add(-1) >= 0 {
				begin := time.Now()
				response, err := gateway.Service().Infer(b.Context(), request)
				if err != nil {
					b.Error(err)
					return
				}
				times[i] = append(times[i], time.Since(begin))
				sizes[i][response.Timeline.Steps[0].BatchSize]++
			}
		})
	}
	loops.Wait()
	b.StopTimer()
	report(b, slices.Concat(times...), sizes)
}

func report(b *testing.B, times []time.Duration, sizes []map[uint32]int) {
	slices.Sort(times)
	b.ReportMetric(float64(len(times))/b.Elapsed().Seconds(), "req/s")
	b.ReportMetric(float64(times[len(times)/2])/1e6, "p50-ms")
	b.ReportMetric(float64(times[len(times)*99/100])/1e6, "p99-ms")
	items := map[uint32]int{}
	for _, m := range sizes {
		for size, n := range m {
			items[size] += n
		}
	}
	batches := map[uint32]int{}
	for size, n := range items {
		batches[size] = n / int(size)
	}
	b.Logf("batches by size: %v", batches)
}

// BenchmarkSubmitJobs is the cost of a job of 1 KiB that is submitted in bulk, beside bare
// asynchronous publishes to a file stream.
func BenchmarkSubmitJobs(b *testing.B) {
	data := make([]byte, 1024)
	b.Run("bulk", func(b *testing.B) { benchmarkSubmitJobs(b, data, func(int) string { return "" }) })
	b.Run("bulk-keyed", func(b *testing.B) {
		benchmarkSubmitJobs(b, data, func(i int) string { return fmt.Sprint("k/", i) })
	})
	b.Run("bare", func(b *testing.B) {
		js, err := jetstream.New(meshtest.New(b).Broker.Client(), jetstream.WithPublishAsyncMaxPending(256))
		if err != nil {
			b.Fatal(err)
		}
		if _, err := js.CreateStream(b.Context(), jetstream.StreamConfig{Name: "bare", Subjects: []string{"bare.>"}}); err != nil {
			b.Fatal(err)
		}
		b.ResetTimer()
		for i := range b.N {
			if _, err := js.PublishAsync(fmt.Sprint("bare.", i), data); err != nil {
				b.Fatal(err)
			}
		}
		<-js.PublishAsyncComplete()
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "jobs/s")
	})
}

func benchmarkSubmitJobs(b *testing.B, data []byte, key func(i int) string) {
	gateway := meshtest.New(b).Gateway([]pipeline.Pipeline{testbed.Pipeline("echo", "echo")}, func(s *gateway.Settings) {
		s.Jobs.Queues = map[pipeline.QueueName]jobs.Queue{"nightly": {
			JobQueueSettings: store.JobQueueSettings{MaxJobs: 10_000_000, MaxBytes: 1 << 30}, Pipelines: []string{"echo"},
		}}
	})
	request := (&request.Request{Inputs: []payload.Part{payload.OfBlob("x", payload.OctetStream, data)}}).ToProto()
	b.ReportAllocs()
	b.ResetTimer()
	err := gateway.Jobs().SubmitJobs(b.Context(), func(yield func(*inferencev1.SubmitJobRequest, error) bool) {
		for i := range b.N {
			if !yield(&inferencev1.SubmitJobRequest{Queue: "nightly", IdempotencyKey: key(i), Payload: &inferencev1.SubmitJobRequest_Infer{Infer: request}}, nil) {
				return
			}
		}
	}, func(_ *inferencev1.Job, err error) error { return err })
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "jobs/s")
}
