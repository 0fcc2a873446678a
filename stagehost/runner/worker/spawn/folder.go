//go:build unix

package spawn

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	folderPattern = "stagemesh-w-"
	// lockName is a file that is locked as long as the folder's host lives. It
	// has another name until it is.
	lockName = "host.lock"
)

// folder is where sockets are: only its user can enter it.
type folder struct {
	path string
	lock *os.File
}

func openFolder(in string) (*folder, error) {
	if in == "" {
		in = os.TempDir()
	}
	sweep(in)
	path, err := os.MkdirTemp(in, folderPattern)
	if err != nil {
		return nil, err
	}
	f := &folder{path: path}
	if longest := filepath.Join(path, fmt.Sprintf("%0*d", longestName, 0)); len(longest) > maxSocketPath {
		return nil, errors.Join(tooLong(longest), f.remove())
	}
	if f.lock, err = lockNew(path); err != nil {
		return nil, errors.Join(err, f.remove())
	}
	return f, nil
}

// lockNew makes the lock file of a folder.
func lockNew(path string) (*os.File, error) {
	early := filepath.Join(path, "unlocked")
	lock, err := os.OpenFile(early, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := flock(lock); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	if err := os.Rename(early, filepath.Join(path, lockName)); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}

// flock locks a file that nobody has locked.
func flock(f *os.File) error {
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return nil
}

func (f *folder) remove() error {
	err := os.RemoveAll(f.path)
	if f.lock != nil {
		err = errors.Join(err, f.lock.Close())
	}
	return err
}

// sweep removes the folders whose hosts are gone. What cannot be looked at is
// somebody else's.
func sweep(in string) {
	locks, err := filepath.Glob(filepath.Join(in, folderPattern+"*", lockName))
	if err != nil {
		return
	}
	for _, path := range locks {
		sweepOne(path)
	}
}

func sweepOne(path string) {
	lock, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer lock.Close() //nolint:errcheck // nothing was written
	if flock(lock) == nil {
		_ = os.RemoveAll(filepath.Dir(path)) // or the next one does
	}
}
