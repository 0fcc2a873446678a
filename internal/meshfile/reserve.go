package meshfile

import (
	"cmp"
	"slices"

	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
	"github.com/stagemesh/stagemesh/stagehost"
)

// Reserve is what a broker sets aside for a mesh, in bytes.
type Reserve struct {
	Memory int64
	Store  int64
}

// ReserveOf returns what a mesh with these queues reserves. Where none of them is
// on file there are no dead letters; requests with an idempotency key have their
// answers stored all the same.
func ReserveOf(queues []stagehost.QueueSettings, results, deadLetters, keys store.Settings) Reserve {
	var out Reserve
	for _, q := range queues {
		size := cmp.Or(q.MaxBytes, stagehost.DefaultMaxBytes)
		if has(q.Durabilities, pipeline.Memory) {
			out.Memory += size
		}
		if has(q.Durabilities, pipeline.File) {
			out.Store += size
		}
	}
	if out.Store > 0 {
		out.Store += cmp.Or(deadLetters.MaxBytes, store.DefaultMaxBytes)
	}
	if len(queues) > 0 {
		out.Store += store.DefaultRunMaxBytes + cmp.Or(results.MaxBytes, store.DefaultMaxBytes) + cmp.Or(keys.MaxBytes, store.DefaultMaxBytes)
	}
	return out
}

// Registry adds the reservation of a registry on the broker.
func (r Reserve) Registry(c RegistryConfig) Reserve {
	if c.None || c.Consul != nil {
		return r
	}
	var settings natskv.Settings
	if c.NATS != nil {
		settings = *c.NATS
	}
	memory, store := settings.Reserves()
	return Reserve{Memory: r.Memory + memory, Store: r.Store + store}
}

// has reports whether a stage has a queue of that durability; one that says
// nothing has all.
func has(durabilities []pipeline.Durability, d pipeline.Durability) bool {
	return len(durabilities) == 0 || slices.Contains(durabilities, d)
}
