package process

import (
	"os"
	"runtime/debug"
	"sync"
)

// Ballast is what ReduceCollections adds to the heap, in bytes.
const Ballast = 32 << 20

// ballast is never touched, so it takes address space and no memory, and a
// collection has nothing in it to scan.
var ballast = sync.OnceValue(func() []byte { return make([]byte, Ballast) })

// ReduceCollections has a program with a small heap collect less often: it adds a
// Ballast to the heap, which Go lets grow to twice of what was in use. Parts of a
// mesh use a few megabytes and allocate as much tens of times a second under
// load, and each collection would scan all of it. It changes nothing where the
// environment sets GOGC or GOMEMLIMIT.
func ReduceCollections() {
	for _, name := range []string{"GOGC", "GOMEMLIMIT"} {
		if _, isSet := os.LookupEnv(name); isSet {
			return
		}
	}
	ballast()
}

// Version returns the version of the program from its build information.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "(devel)"
	}
	return info.Main.Version
}
