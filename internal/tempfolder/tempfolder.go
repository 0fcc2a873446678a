// Package tempfolder makes private temporary folders that outlive no process for long: whoever
// opens a folder removes folders of the same kind whose processes were killed.
//
//	folder, err := tempfolder.Open(os.TempDir(), "stagemesh-broker-", nil)
//	defer folder.Remove()
//
// A file in the folder is locked as long as its process lives. A Folder is for one goroutine at a
// time. Errors name the path.
package tempfolder

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
	// lockName is a file that is locked as long as the folder's process lives. It has another name
	// until it is locked.
	lockName = "host.lock"
	// lockGrace is how long a process takes, at most, until its folder has the file.
	lockGrace = time.Minute
)

// Folder is a folder of this process.
type Folder struct {
	// Path is where it is.
	Path string

	lock *os.File
}

// Open makes a folder in another, whose name begins with the prefix. It removes folders of the same
// prefix whose processes are gone, and calls left, if that is not nil, before it removes one.
func Open(in, prefix string, left func(path string)) (*Folder, error) {
	folders, _ := filepath.Glob(filepath.Join(in, prefix+"*")) // or the next process does
	for _, path := range folders {
		if isLeft(path) {
			if left != nil {
				left(path)
			}
			_ = os.RemoveAll(path) // or the next process does
		}
	}
	path, err := os.MkdirTemp(in, prefix)
	if err != nil {
		return nil, err
	}
	f := &Folder{Path: path}
	if f.lock, err = lockFolder(path); err != nil {
		return nil, errors.Join(err, f.Remove())
	}
	return f, nil
}

// Restore makes the folder and its lock again where they were removed: some systems remove old
// temporary folders.
func (f *Folder) Restore() error {
	if err := os.MkdirAll(f.Path, 0o700); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(f.Path, lockName)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	lock, err := lockFolder(f.Path)
	if err != nil {
		return err
	}
	err = f.lock.Close()
	f.lock = lock
	return err
}

// Remove removes the folder.
func (f *Folder) Remove() error {
	err := os.RemoveAll(f.Path)
	if f.lock != nil {
		err = errors.Join(err, f.lock.Close())
	}
	return err
}

// lockFolder makes the lock file of a folder.
func lockFolder(path string) (*os.File, error) {
	early := filepath.Join(path, "unlocked")
	lock, err := os.OpenFile(early, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err = lockFile(lock); err == nil {
		err = os.Rename(early, filepath.Join(path, lockName))
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}

// lockFile locks a file, or fails where another process has locked it.
func lockFile(f *os.File) error {
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return nil
}

// isLeft reports whether the process of a folder is gone. Those of other users, which it cannot
// open, are not.
func isLeft(path string) bool {
	lock, err := os.OpenFile(filepath.Join(path, lockName), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		info, err := os.Lstat(path)
		return err == nil && info.IsDir() && time.Since(info.ModTime()) > lockGrace
	}
	if err != nil {
		return false
	}
	defer lock.Close() //nolint:errcheck // nothing was written
	return lockFile(lock) == nil
}
