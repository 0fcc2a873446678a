package credentials

import (
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// reloaded is what files hold. It is read again within reloadEvery of a change, when it is used. A
// version that cannot be read is logged once, and the one before stays until it can.
type reloaded[T any] struct {
	paths []string
	read  func() (T, error)
	log   *slog.Logger

	mu      sync.Mutex
	checked time.Time
	version string
	failed  string // the version that was logged
	value   T
}

const reloadEvery = time.Second

func newReloaded[T any](log *slog.Logger, read func() (T, error), paths ...string) (*reloaded[T], error) {
	r := &reloaded[T]{paths: paths, read: read, log: log, checked: time.Now()}
	r.version = r.versions()
	var err error
	r.value, err = read()
	return r, err
}

func (r *reloaded[T]) get() T {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if now.Sub(r.checked) < reloadEvery {
		return r.value
	}
	r.checked = now
	version := r.versions()
	if version == r.version {
		return r.value
	}
	switch value, err := r.read(); {
	case err == nil:
		r.value, r.version, r.failed = value, version, ""
		r.log.Info("tokens or certificates were read again", "files", r.paths)
	case version != r.failed:
		r.failed = version
		r.log.Error("tokens or certificates that were changed are not used", "error", err)
	}
	return r.value
}

func (r *reloaded[T]) versions() (out string) {
	for _, path := range r.paths {
		if info, err := os.Stat(path); err == nil {
			out += fmt.Sprint(info.Size(), info.ModTime().UnixNano(), ";")
		}
	}
	return out
}
