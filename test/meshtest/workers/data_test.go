package workers

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

const (
	megabyte = 1 << 20
	huge     = 50 * megabyte

	// heapBound is for what results of a megabyte leave behind, hugeBound for what
	// those of 50 do: connections to the broker, and the broker, which is in this
	// process too, keep a buffer as large as the largest message.
	heapBound = 32 * megabyte
	hugeBound = 4 * huge
)

// bytesOf asks for so many bytes, and checks them.
func bytesOf(m *mesh, n int) error {
	response, err := m.gateway.Service().Infer(m.t.Context(), &request.Request{
		Pipeline: "stage:" + stage, Inputs: []payload.Part{payload.OfBlob("", "application/json", fmt.Append(nil, n))},
	})
	if err != nil {
		return err
	}
	data := response.Outputs[0].Blob.Data
	if len(data) != n {
		return fmt.Errorf("%d bytes came, not %d", len(data), n)
	}
	for at := 0; at < n; at += 8 * 61 {
		if got := binary.LittleEndian.Uint64(data[at:]); got != uint64(at/8) {
			return fmt.Errorf("at %d there is %d", at, got)
		}
	}
	return nil
}

// heap is what is in use, in bytes.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// Alone: what other tests hold is not to be counted.
func TestLargeResultsLeaveNothingBehind(t *testing.T) {
	const results, callers = 100, 4
	m := start(t, spec{file: "large.py", workers: 2, broker: func(o *server.Options) { o.MaxPayload = 64 * megabyte }})
	before := heap()
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			for range results / callers {
				if err := bytesOf(m, megabyte); err != nil {
					t.Errorf("a megabyte: %v", err)
				}
			}
		})
	}
	all.Wait()
	shrinks(t, before+heapBound)
	for range 2 {
		if err := bytesOf(m, huge); err != nil {
			t.Errorf("50 megabytes: %v", err)
		}
	}
	shrinks(t, before+hugeBound)
}

// shrinks waits until the heap is within the bound: a host may learn that its answer
// has come after the caller has it, and pools let go of what they hold in the second
// collection.
func shrinks(t *testing.T, bound uint64) {
	t.Helper()
	var now uint64
	defer func() { t.Logf("the heap has %d MB, and may have %d", now>>20, bound>>20) }()
	testbed.Eventually(t, "the heap is within its bound", func() bool {
		now = heap()
		return now <= bound
	})
}

func TestTooLargeResultIsRefused(t *testing.T) {
	t.Parallel()
	m := start(t, spec{file: "large.py"})
	err := bytesOf(m, huge)
	f := meshtest.FaultOf(err)
	if f == nil || f.Reason != fault.OutputTooLarge {
		t.Errorf("got %v", err)
	}
	t.Log(f)
	if err := bytesOf(m, megabyte); err != nil {
		t.Errorf("the next: %v", err)
	}
	m.checkNoExit()
}

// pad sends a tensor of those extents, and returns the worker's peak memory in MiB and the
// number of items of the batch.
func pad(m *mesh, extents ...int64) (peak, items int64, err error) {
	n, _ := tensor.Elements(extents)
	ids := payload.OfTensor("ids", tensor.Tensor{Datatype: tensor.Int64, Shape: extents, Raw: make([]byte, 8*n)})
	response, err := m.gateway.Service().Infer(m.t.Context(), &request.Request{Pipeline: "stage:" + stage, Inputs: []payload.Part{ids}})
	if err != nil {
		return 0, 0, err
	}
	number := func(i int) int64 { return int64(binary.LittleEndian.Uint64(response.Outputs[i].Tensor.Raw)) }
	return number(0), number(1), nil
}

func TestPaddedBatchTakesNoMoreThanMaxBytes(t *testing.T) {
	t.Parallel()
	m := start(t, spec{file: "padding.py", batch: batch.Settings{Mode: batch.Window, MaxSize: 2, MaxBytes: 2 * megabyte, MaxWait: 300 * time.Millisecond}})
	before, _, err := pad(m, 1, 1, 4)
	if err != nil {
		t.Fatal(err)
	}
	for name, row := range map[string]struct {
		a, b  []int64
		items int64
	}{
		"alike":                  {[]int64{1, 2, 8}, []int64{1, 4, 4}, 2},
		"long and wide":          {[]int64{1, 5000, 1}, []int64{1, 1, 5000}, 1},
		"long without elements":  {[]int64{1, 1 << 20, 0}, []int64{1, 1, 4}, 1},
		"both without elements":  {[]int64{1, 1 << 20, 0}, []int64{1, 0, 1 << 20}, 1},
		"wide, of a few in long": {[]int64{1, 1, 1 << 17}, []int64{1, 2, 1}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			var all sync.WaitGroup
			for _, extents := range [][]int64{row.a, row.b} {
				all.Go(func() {
					if peak, items, err := pad(m, extents...); err != nil || items != row.items || peak > before+64 {
						t.Errorf("shape %v: %d items and a peak of %d MiB after one of %d, %v", extents, items, peak, before, err)
					}
				})
			}
			all.Wait()
		})
	}
	for name, row := range map[string]struct {
		extents []int64
		text    string
	}{
		"large once rounded up": {[]int64{1, 1, 1 << 17}, ""},
		"too large once padded": {[]int64{1, 1, 1<<17 + 1}, "batch.max_bytes, 2097152"},
		"empty and endless":     {[]int64{1, 1 << 21, 0}, "without elements"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, _, err := pad(m, row.extents...)
			if f := meshtest.FaultOf(err); err == nil != (row.text == "") || err != nil && (f.Reason != fault.InvalidInput || !strings.Contains(f.Message, row.text)) {
				t.Errorf("got %v", err)
			}
		})
	}
	m.checkNoExit()
}

// joinedWith asks for a row of x with parameters of that tensor, and returns how many rows
// the worker had at once, and the parameter k that it saw.
func joinedWith(m *mesh, parameters payload.Parameters) (rows, k int64, err error) {
	x := payload.OfTensor("x", tensor.Tensor{Datatype: tensor.Int64, Shape: []int64{1, 1}, Raw: make([]byte, 8)})
	x.Parameters = parameters
	response, err := m.gateway.Service().Infer(m.t.Context(), &request.Request{Pipeline: "stage:" + stage, Inputs: []payload.Part{x}})
	if err != nil {
		return 0, 0, err
	}
	raw := response.Outputs[0].Tensor.Raw
	return int64(binary.LittleEndian.Uint64(raw)), int64(binary.LittleEndian.Uint64(raw[8:])), nil
}

func TestTensorsWithParametersAreJoined(t *testing.T) {
	t.Parallel()
	m := start(t, spec{file: "joined.py", batch: batch.Settings{Mode: batch.Window, MaxSize: 3, MaxWait: testbed.Patience}})
	var all sync.WaitGroup
	for i, parameters := range []payload.Parameters{nil, {"k": payload.Int64(1), "other": payload.String("t")}, {"k": payload.Int64(2)}} {
		all.Go(func() {
			if rows, k, err := joinedWith(m, parameters); rows != 3 || k != int64(i) || err != nil {
				t.Errorf("item %d: %d rows and the parameter %d, %v", i, rows, k, err)
			}
		})
	}
	all.Wait()
	if got := m.log.String(); strings.Contains(got, "failed") {
		t.Errorf("a batch failed:\n%s", got)
	}
}

func TestItemsOfPredictItemShareNoSlot(t *testing.T) {
	t.Parallel()
	m := start(t, spec{file: "oneatatime.py", batch: batch.Settings{MaxSize: 8, MaxWait: 5 * time.Millisecond}, worker: func(s *worker.Settings) { s.Slots = 4 }})
	var all sync.WaitGroup
	for range 12 {
		all.Go(func() {
			if place, _, err := joinedWith(m, nil); place != 0 || err != nil {
				t.Errorf("an item was at place %d of its batch, %v", place, err)
			}
		})
	}
	all.Wait()
}

// clock is a m whose worker sends the time in chunks, and a client of its gateway.
type clock struct {
	*mesh
	folder string
	client inferencev1connect.InferenceServiceClient
}

func newClock(t testing.TB, pause time.Duration) *clock {
	t.Helper()
	c := &clock{folder: t.TempDir()}
	c.mesh = start(t, spec{
		file: "clock.py", options: map[string]any{"pause": pause.Seconds(), "folder": c.folder},
		worker:  func(s *worker.Settings) { s.Slots = 64 },
		gateway: func(g *gateway.Settings) { g.Listen = "127.0.0.1:0" },
	})
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(transport.CloseIdleConnections)
	c.client = inferencev1connect.NewInferenceServiceClient(&http.Client{Transport: transport}, "http://"+c.gateway.Addr().String(), connect.WithGRPC())
	return c
}

// chunks asks for chunks and hands each to take; it returns how many came.
func (c *clock) chunks(ctx context.Context, n int, take func(at time.Time)) (int, error) {
	answer, err := c.client.InferStream(ctx, connect.NewRequest(&inferencev1.InferRequest{
		Pipeline: "stage:" + stage, Inputs: []*inferencev1.Part{{
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
