package dispatch

import (
	"fmt"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/store"
)

func TestBatchesNeedTimeToEnd(t *testing.T) {
	t.Parallel()
	pools := map[string]PoolConfig{"gpu": {Target: TargetConfig{Pipelines: []string{"a"}}}}
	for want, c := range map[string]Config{
		`batches.queue: there is no "daily" in jobs.queues`: {Batches: store.BatchSettings{Queue: "daily"}},
		"batches.queue: the ttl of nightly is 6h0m0s, at least the 24h0m0s of a batch are needed": {
			Pools: pools, Queues: map[string]QueueConfig{"nightly": {JobQueueSettings: store.JobQueueSettings{TTL: 6 * time.Hour}}}, Batches: store.BatchSettings{Queue: "nightly"},
		},
		"batches.queue: jobs.retention is 24h0m0s, more than the 24h0m0s of a batch are needed": {
			Settings: store.Settings{Retention: 24 * time.Hour}, Pools: pools, Queues: map[string]QueueConfig{"nightly": {}}, Batches: store.BatchSettings{Queue: "nightly"},
		},
		"batches.queue: is missing; name the queue of the lines of batches": {Batches: store.BatchSettings{Settings: store.Settings{Replicas: 1}}},
		"batches.retention: 1h0m0s, more than the 24h0m0s of a batch are needed": {
			Pools: pools, Queues: map[string]QueueConfig{"nightly": {}}, Batches: store.BatchSettings{Queue: "nightly", Settings: store.Settings{Retention: time.Hour}},
		},
	} {
		if err := c.Validate(); fmt.Sprint(err) != want {
			t.Errorf("got %v\nwant %s", err, want)
		}
	}
}
