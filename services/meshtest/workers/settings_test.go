package workers_test

import (
	"time"

	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker"
)

// pause has every batch take so many seconds.
func pause(seconds string) func(*worker.Settings) {
	return func(s *worker.Settings) { s.Env["PAUSE"] = seconds }
}

// full has batches leave when they have that many items; the wait for them is
// longer than any test.
func full(size int) batch.Settings {
	return batch.Settings{Mode: batch.Window, MaxSize: size, MaxBytes: 1 << 20, MaxWait: time.Minute}
}
