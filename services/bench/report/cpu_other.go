//go:build !unix

package report

import "time"

// CPUTime is the processor time that this process has had; 0, as it is not known on
// this system.
func CPUTime() time.Duration { return 0 }
