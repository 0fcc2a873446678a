package cli_test

import (
	"os/exec"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

var built testbed.Program

// startProgram starts stagemesh as a process.
func startProgram(t *testing.T, args ...string) *testbed.Process {
	t.Helper()
	return testbed.StartProcess(t, exec.Command(built.Path(t), args...))
}
