//go:build unix

package spawn

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

const (
	folderPattern = "stagemesh-w-"
	// lockName is a file that is locked as long as the folder's host lives. It
	// has another name until it is locked.
	lockName = "host.lock"
	// lockGrace is how long a host takes, at most, until its folder has the file.
	lockGrace = time.Minute
)

// folder is a private folder for sockets: only its user can enter it.
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

// flock locks a file, or fails where another host has locked it.
func flock(f *os.File) error {
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return nil
}

// restore makes the folder and its lock again where they were removed.
func (f *folder) restore() error {
	if err := os.MkdirAll(f.path, 0o700); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(f.path, lockName)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	lock, err := lockNew(f.path)
	if err != nil {
		return err
	}
	err = f.lock.Close()
	f.lock = lock
	return err
}

func (f *folder) remove() error {
	err := os.RemoveAll(f.path)
	if f.lock != nil {
		err = errors.Join(err, f.lock.Close())
	}
	return err
}

// sweep removes the folders of hosts that are gone. It leaves folders of other users,
// which it cannot open.
func sweep(in string) {
	folders, err := filepath.Glob(filepath.Join(in, folderPattern+"*"))
	if err != nil {
		return
	}
	for _, path := range folders {
		sweepOne(path)
	}
}

func sweepOne(folder string) {
	path := filepath.Join(folder, lockName)
	lock, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		if info, err := os.Lstat(folder); err == nil && info.IsDir() && time.Since(info.ModTime()) > lockGrace {
			_ = os.RemoveAll(folder) // or the next one does
		}
		return
	}
	if err != nil {
		return
	}
	defer lock.Close() //nolint:errcheck // nothing was written
	if flock(lock) == nil {
		_ = os.RemoveAll(folder) // or the next one does
	}
}
