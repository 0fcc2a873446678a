package workers_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/services/meshtest/workers"
)

func TestMain(m *testing.M) {
	if workers.IsProgram() {
		os.Exit(workers.Main()) //nolint:forbidigo // this is main
	}
	goleak.VerifyTestMain(m)
}

// echoes returns n texts that are no orders.
func echoes(prefix string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("%s %d", prefix, i)
	}
	return out
}
