package fault_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// A reason determines the codes on every protocol and whether a retry can help.
func ExampleNew() {
	f := fault.New(fault.InvalidInput, "input image is empty").WithViolation("inputs.image", "is empty")
	fmt.Println(f.Reason, f.GRPCCode(), f.HTTPStatus(), f.Retryable())
	fmt.Println(f.Violations[0].Field)
	// Output:
	// INVALID_INPUT INVALID_ARGUMENT 400 false
	// inputs.image
}

// From recovers a fault from an error chain. Any other error is INTERNAL, and its text does
// not reach the caller.
func ExampleFrom() {
	full := fmt.Errorf("decode: %w", fault.New(fault.QueueFull, "the queue of stage decode is full"))
	for _, err := range []error{full, context.DeadlineExceeded, errors.New("secret")} {
		fmt.Println(fault.From(err).Reason)
	}
	// Output:
	// QUEUE_FULL
	// DEADLINE_EXCEEDED
	// INTERNAL
}
