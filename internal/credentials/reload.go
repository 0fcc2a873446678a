package credentials

import (
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// reloaded is what files hold. It is read again within reloadEvery of a change, when it is used. A
// version that cannot be read is logged and not used: the one before stays.
type reloaded[T any] struct {
	paths []string
	read  func() (T, error)
	log   *slog.Logger

	mu      sync.Mutex
	checked time.Time
	version string
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
	r.version = version
	if value, err := r.read(); err != nil {
		r.log.Error("tokens or certificates that were changed are not used", "error", err)
	} else {
		r.value = value
		r.log.Info("tokens or certificates were read again", "files", r.paths)
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
