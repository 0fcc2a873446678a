// Package tempfolder makes private temporary folders that outlive no process for long: whoever
// opens a folder removes folders of the same kind whose processes were killed.
//
//	folder, err := tempfolder.Open(os.TempDir(), "stagemesh-broker-", nil)
//	defer folder.Remove()
//
// A file in the folder is locked as long as its process lives, and touched every hour, as some systems
// remove old files. Errors name the path.
package tempfolder

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// lockName is a file that is locked as long as the folder's process lives. It has another name
	// until it is locked.
	lockName = "host.lock"
	// lockGrace is how long a process takes, at most, until its folder has the file.
	lockGrace = time.Minute
	// touchInterval is how often the file is touched.
	touchInterval = time.Hour
)

// Folder is a folder of this process.
type Folder struct {
	// Path is where it is.
	Path string

	mu    sync.Mutex
	lock  *os.File
	timer *time.Timer
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
	f.mu.Lock()
	defer f.mu.Unlock()
	f.timer = time.AfterFunc(touchInterval, f.touch)
	return f, nil
}

// Restore touches the lock, and makes it and the folder again where they were removed: some systems
// remove old temporary files. It does nothing after Remove.
func (f *Folder) Restore() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lock == nil {
		return nil
	}
	if err := os.MkdirAll(f.Path, 0o700); err != nil {
		return err
	}
	now := time.Now()
	if err := os.Chtimes(filepath.Join(f.Path, lockName), now, now); !errors.Is(err, fs.ErrNotExist) {
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

// touch restores the folder, and starts the timer again, until the folder is removed.
func (f *Folder) touch() {
	_ = f.Restore() // or in an hour
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lock != nil {
		f.timer.Reset(touchInterval)
	}
}

// Remove removes the folder.
func (f *Folder) Remove() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.timer != nil {
		f.timer.Stop()
	}
	err := os.RemoveAll(f.Path)
	if f.lock != nil {
		err = errors.Join(err, f.lock.Close())
		f.lock = nil
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
