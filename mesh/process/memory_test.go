package process

import (
	"os"
	"runtime"
	"runtime/metrics"
	"testing"
)

func TestASmallHeapMayGrowToTheFloorAndALargeOneByItsSize(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		live uint64
		want int
	}{
		"nothing yet":         {0, 1600},
		"nearly nothing":      {1 << 10, 1600},
		"a sixteenth":         {HeapFloor / 16, 1500},
		"a quarter":           {HeapFloor / 4, 300},
		"half":                {HeapFloor / 2, 100},
		"more than half":      {HeapFloor * 3 / 4, 100},
		"far above the floor": {HeapFloor * 100, 100},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := growth(test.live); got != test.want {
				t.Errorf("%d bytes may grow by %d %%, want %d", test.live, got, test.want)
			}
		})
	}
}

// percent is by how much the heap may grow.
func percent() uint64 {
	sample := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// collections is how many a test waits for at most.
const collections = 1000

// becomes collects until the heap may grow by a percentage that will do.
func becomes(t *testing.T, what string, will func(percent uint64) bool) {
	t.Helper()
	for range collections {
		if will(percent()) {
			return
		}
		runtime.GC()
	}
	t.Errorf("%s: the heap may grow by %d %%", what, percent())
}

// It is the process's, so nothing runs beside it.
func TestCollectionIsEasedWhileTheHeapIsSmall(t *testing.T) { //nolint:paralleltest // see above
	for _, name := range []string{"GOGC", "GOMEMLIMIT"} {
		t.Setenv(name, "") // so that it is as it was at the end
		if err := os.Unsetenv(name); err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, "1GiB")
			before := percent()
			EaseCollection()
			if got := percent(); got != before {
				t.Errorf("the heap may grow by %d %%, before by %d", got, before)
			}
		})
	}
	EaseCollection()
	becomes(t, "a small heap", func(percent uint64) bool { return percent > usual })
	large := make([]byte, HeapFloor)
	becomes(t, "a large heap", func(percent uint64) bool { return percent == usual })
	runtime.KeepAlive(large)
	becomes(t, "a heap that is small again", func(percent uint64) bool { return percent > usual })
}
