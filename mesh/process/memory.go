package process

import (
	"os"
	"sync"
)

// Ballast is what EaseCollection adds to the heap, in bytes.
const Ballast = 32 << 20

// ballast is never touched, so it takes addresses and no memory; nothing is in it for a
// collection to walk over.
var ballast = sync.OnceValue(func() []byte { return make([]byte, Ballast) })

// EaseCollection has this process collect less often while its heap is small, for a
// program's main: it adds a Ballast to the heap, which Go lets grow to twice of what was
// in use. Parts of a mesh have a few megabytes in use and allocate as much tens of times
// a second under load, and each time all of it would be walked over. Where the
// environment has GOGC or GOMEMLIMIT nothing is changed.
func EaseCollection() {
	for _, name := range []string{"GOGC", "GOMEMLIMIT"} {
		if _, said := os.LookupEnv(name); said {
			return
		}
	}
	ballast()
}
