//go:build unix

package stagemesh

import "golang.org/x/sys/unix"

// diskSpace returns the free and all bytes of the file system that has the folder.
func diskSpace(folder string) (free, total int64, err error) {
	var s unix.Statfs_t
	err = unix.Statfs(folder, &s)
	return int64(s.Bavail) * int64(s.Bsize), int64(s.Blocks) * int64(s.Bsize), err
}
