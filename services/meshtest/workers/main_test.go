package workers_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/services/meshtest/workers"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker"
)

func TestMain(m *testing.M) {
	if workers.IsProgram() {
		os.Exit(workers.Main()) //nolint:forbidigo // this is main
	}
	goleak.VerifyTestMain(m)
}

// echoes returns n texts that the workers return.
func echoes(prefix string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("%s %d", prefix, i)
	}
	return out
}

// pause makes every batch take so many seconds.
func pause(seconds string) func(*worker.Settings) {
	return func(s *worker.Settings) { s.Env["PAUSE"] = seconds }
}

// full makes batches wait until they have that many items, for longer than any test.
func full(size int) batch.Settings {
	return batch.Settings{Mode: batch.Window, MaxSize: size, MaxBytes: 1 << 20, MaxWait: time.Minute}
}
