package worker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
)

// Exit codes of a worker; those of one in Python are the same.
const (
	// ExitAsked is that of a worker that was asked to leave, and finished.
	ExitAsked = 0
	// ExitFailed is that of one that could not start.
	ExitFailed = 1
	// ExitMisused is that of a process that no host started, or with settings that
	// cannot be.
	ExitMisused = 2
	// ExitHostGone is that of one whose host is gone.
	ExitHostGone = 3
	// ExitViolation is that of one whose host does not keep to the protocol.
	ExitViolation = 4
	// ExitUnfinished is that of one that was asked to leave, and did not finish.
	ExitUnfinished = 5
)

// ExitCode is that of a process whose Serve returned err.
func ExitCode(err error) int {
	switch {
	case err == nil:
		return ExitAsked
	case errors.Is(err, ErrNoHost), errors.Is(err, errEnvironment), errors.Is(err, errMisused):
		return ExitMisused
	case errors.Is(err, ErrHostGone):
		return ExitHostGone
	case errors.Is(err, ErrUnfinished):
		return ExitUnfinished
	case errors.Is(err, frame.ErrViolation), errors.Is(err, ErrRefused):
		return ExitViolation
	}
	return ExitFailed
}

// Main is a worker's process: it serves until the host, SIGTERM or SIGINT asks it
// to leave, says on standard error what went wrong, if anything did, and returns
// the exit code.
//
//	func main() { os.Exit(worker.Main(settings)) }
func Main(settings Settings) int {
	// A second signal is caught too, and changes nothing.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	// The host reads what the worker prints; when it is gone, that fails.
	signal.Ignore(syscall.SIGPIPE)
	err := Serve(ctx, settings)
	if err != nil {
		fmt.Fprintf(os.Stderr, "worker %s: %v\n", settings.Name, err)
	}
	if errors.Is(err, ErrHostGone) {
		endGroup()
	}
	return ExitCode(err)
}
