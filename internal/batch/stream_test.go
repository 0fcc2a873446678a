package batch_test

import (
	"testing"

	"github.com/stagemesh/stagemesh/internal/batch"
)

func TestStreamModeDispatchesItemsOneByOne(t *testing.T) {
	t.Parallel()
	b := batch.New(batch.Settings{Mode: batch.Stream, MaxSize: 4, MaxWait: 10 * ms})
	// What earlier runs took is no reason to hold anything.
	b.Finished(epoch, batch.Run{Key: "k", Items: 4, Rows: 4, Took: 100 * ms})
	add(t, b, item(1, 0), item(2, 0), item(3, 0, key("other")), item(4, 0, class("high")))
	expect(t, next(b, 0, 2), batchOf(batch.Idle, 4), batchOf(batch.Idle, 1))
	expect(t, next(b, ms, 1), batchOf(batch.Idle, 2))
	expect(t, next(b, ms, 1), batchOf(batch.Idle, 3))
	expect(t, next(b, ms, 1))
}
