package workers_test

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/services/meshtest/workers"
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
func bytesOf(bed *workers.Bed, n int) error {
	response, err := bed.Gateway.Service().Infer(bed.Context(), &call.Request{
		Pipeline: "stage:" + workers.Stage, Inputs: []payload.Part{payload.OfBlob("", "application/json", fmt.Append(nil, n))},
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
	bed := workers.New(t, workers.Spec{File: "large.py", Workers: 2, Broker: func(o *server.Options) { o.MaxPayload = 64 * megabyte }})
	before := heap()
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			for range results / callers {
				if err := bytesOf(bed, megabyte); err != nil {
					t.Errorf("a megabyte: %v", err)
				}
			}
		})
	}
	all.Wait()
	shrinks(t, before+heapBound)
	for range 2 {
		if err := bytesOf(bed, huge); err != nil {
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
	bed := workers.New(t, workers.Spec{File: "large.py"})
	err := bytesOf(bed, huge)
	f := workers.FaultOf(err)
	if f == nil || f.Reason != fault.OutputTooLarge {
		t.Errorf("got %v", err)
	}
	t.Log(f)
	if err := bytesOf(bed, megabyte); err != nil {
		t.Errorf("the next: %v", err)
	}
	if n := bed.Exits(); n > 0 {
		t.Errorf("%d processes ended", n)
	}
}
