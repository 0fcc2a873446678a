package process

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// HeapFloor is what the heap of a process with eased collection may grow to before it is
// collected, in bytes, however little of it is in use.
const HeapFloor = 64 << 20

const (
	// liveBytes is what the last collection found in use.
	liveBytes = "/gc/heap/live:bytes"
	// usual is the growth that Go allows by itself, in percent, and least the bytes
	// that Go has a heap grow to with it, however little of it is in use.
	usual = 100
	least = 4 << 20
)

// EaseCollection has this process collect less often while its heap is small, for a
// program's main. Parts of a mesh have a few megabytes in use and allocate as much ten
// times a second under load: each time all of it would be walked over. A heap of which
// more than half of the HeapFloor is in use is collected as usual. Where the environment
// has GOGC or GOMEMLIMIT nothing is changed.
func EaseCollection() {
	for _, name := range []string{"GOGC", "GOMEMLIMIT"} {
		if _, said := os.LookupEnv(name); said {
			return
		}
	}
	ease(0)
}

// ease sets how much the heap may grow, and does so again after each collection, which
// finds the word that nothing refers to.
func ease(int) {
	live := []metrics.Sample{{Name: liveBytes}}
	metrics.Read(live)
	debug.SetGCPercent(growth(live[0].Value.Uint64()))
	word := new([16]byte)
	runtime.AddCleanup(word, ease, 0)
}

// growth is by how many percent a heap of so many live bytes may grow.
func growth(live uint64) int {
	const most = usual * HeapFloor / least // by which Go has the least heap grow to the floor
	if live == 0 {
		return most
	}
	return int(min(most, max(usual, (HeapFloor-min(live, HeapFloor))*100/live)))
}
