//go:build !unix

package stagemesh

import "errors"

// diskSpace is not known on this system: writes that fail tell that the disk is full.
func diskSpace(string) (free, total int64, err error) { return 0, 0, errors.ErrUnsupported }
