package workers_test

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/meshtest/workers"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker"
)

// clock is a bed whose worker sends the time in chunks, and a client of its gateway.
type clock struct {
	*workers.Bed
	folder string
	client inferencev1connect.InferenceServiceClient
}

func newClock(t testing.TB, pause time.Duration) *clock {
	t.Helper()
	c := &clock{folder: t.TempDir()}
	c.Bed = workers.New(t, workers.Spec{
		File: "clock.py", Options: map[string]any{"pause": pause.Seconds(), "folder": c.folder},
		Worker:  func(s *worker.Settings) { s.Slots = 64 },
		Gateway: func(g *gateway.Settings) { g.Listen = "127.0.0.1:0" },
	})
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(transport.CloseIdleConnections)
	c.client = inferencev1connect.NewInferenceServiceClient(&http.Client{Transport: transport}, "http://"+c.Bed.Gateway.Addr().String(), connect.WithGRPC())
	return c
}

// chunks asks for chunks and hands each to take; it returns how many came.
func (c *clock) chunks(ctx context.Context, n int, take func(at time.Time)) (int, error) {
	answer, err := c.client.InferStream(ctx, connect.NewRequest(&inferencev1.InferRequest{
		Pipeline: "stage:" + workers.Stage, Inputs: []*inferencev1.Part{{
			Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: "text/plain", Data: []byte(strconv.Itoa(n))}},
		}},
	}))
	if err != nil {
		return 0, err
	}
	defer answer.Close()
	came := 0
	for answer.Receive() {
		chunk := answer.Msg().GetChunk()
		if chunk == nil {
			continue
		}
		nanos, err := strconv.ParseInt(string(chunk.GetOutputs()[0].GetBlob().GetData()), 10, 64)
		if err != nil {
			return came, err
		}
		came++
		take(time.Unix(0, nanos))
	}
	return came, answer.Err()
}

func TestChunksArriveAsTheyAreMade(t *testing.T) {
	t.Parallel()
	c := newClock(t, 20*time.Millisecond)
	var streams sync.WaitGroup
	for range 8 {
		streams.Go(func() {
			var times []time.Time
			n, err := c.chunks(t.Context(), 10, func(at time.Time) { times = append(times, at) })
			if err != nil || n != 10 || !slices.IsSortedFunc(times, time.Time.Compare) {
				t.Errorf("%d chunks, %v, at %v", n, err, times)
			}
		})
	}
	streams.Wait()
}

func TestCallersLeavingStopStreams(t *testing.T) {
	t.Parallel()
	c := newClock(t, 10*time.Millisecond)
	const streams = 8
	ctx, leave := context.WithCancel(t.Context())
	var begun, over sync.WaitGroup
	begun.Add(streams)
	for range streams {
		over.Go(func() {
			first := sync.OnceFunc(begun.Done)
			if _, err := c.chunks(ctx, 1_000_000, func(time.Time) { first() }); connect.CodeOf(err) != connect.CodeCanceled {
				t.Errorf("a stream that was left ended with %v", err)
			}
		})
	}
	begun.Wait()
	left := time.Now()
	leave()
	over.Wait()
	var ends []string
	testbed.Eventually(t, "the streams end", func() bool {
		data, err := os.ReadFile(filepath.Join(c.folder, "ended"))
		ends = strings.Fields(string(data))
		return err == nil && len(ends) == streams
	})
	for _, end := range ends {
		nanos, err := strconv.ParseInt(end, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("ended %s after its caller left", time.Unix(0, nanos).Sub(left))
	}
}

// BenchmarkChunk is how long a chunk takes from the worker, in Python, to a client of
// the gateway over gRPC, where nothing else goes on.
func BenchmarkChunk(b *testing.B) {
	c := newClock(b, 2*time.Millisecond)
	took := make([]time.Duration, 0, b.N)
	b.ResetTimer()
	if _, err := c.chunks(b.Context(), b.N, func(at time.Time) { took = append(took, time.Since(at)) }); err != nil {
		b.Fatal(err)
	}
	slices.Sort(took)
	for _, percent := range []int{50, 90, 99} {
		b.ReportMetric(float64(took[(len(took)-1)*percent/100].Microseconds()), "p"+strconv.Itoa(percent)+"-us")
	}
}
