//go:build !unix

package load

import "time"

// cpuTime returns 0: the processor time of this process is not known on
// this system.
func cpuTime() time.Duration { return 0 }
