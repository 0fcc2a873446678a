package procedure

import (
	"context"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Within returns the earlier of what a request asks for, 0 where it does not, and what
// the protocol's own deadline leaves; 0 where there is neither.
func Within(ctx context.Context, asked time.Duration) (time.Duration, error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return asked, nil
	}
	left := time.Until(deadline)
	if left <= 0 {
		return 0, fault.From(context.DeadlineExceeded)
	}
	if asked == 0 {
		return left, nil
	}
	return min(asked, left), nil
}
