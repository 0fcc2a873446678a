package body

import (
	"strconv"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// TooLarge refuses a request that is over the limit, in bytes.
func TooLarge(limit int64) *fault.Fault {
	return fault.Newf(fault.PayloadTooLarge, "the request is larger than this gateway's limit of %d bytes", limit).
		WithMetadata("limit_bytes", strconv.FormatInt(limit, 10))
}

// Stalled refuses a request whose body stopped coming.
func Stalled(patience time.Duration) *fault.Fault {
	return fault.Newf(fault.DeadlineExceeded, "nothing of the request's body came for %s", patience)
}
