package process

import (
	"os"
	"runtime"
	"runtime/metrics"
	"testing"
)

// live is what the heap has in use, in bytes.
func live() uint64 {
	runtime.GC()
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// The ballast is the process's, so nothing runs beside it.
func TestReduceCollectionsAddsBallast(t *testing.T) { //nolint:paralleltest // see above
	for _, name := range []string{"GOGC", "GOMEMLIMIT"} {
		t.Setenv(name, "") // so that it is as it was at the end
		if err := os.Unsetenv(name); err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, "1GiB")
			before := live()
			ReduceCollections()
			if got := live(); got > before+Ballast/2 {
				t.Errorf("%d bytes are in use, before %d", got, before)
			}
		})
	}
	ReduceCollections()
	for range 2 { // it is not collected itself
		if got := live(); got < Ballast {
			t.Errorf("%d bytes are in use", got)
		}
	}
}
