package cli

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// settle is how long a file has to be left alone after a change: editors write
	// one in several steps, and tools take it away for a moment.
	settle = 200 * time.Millisecond
	// lookAgain is how often a removed folder is looked for.
	lookAgain = time.Second
)

// saves watches a file.
type saves struct {
	path    string
	log     *slog.Logger
	watcher *fsnotify.Watcher
	// folders are that of the file and, where it is a link, that of its target: an
	// editor replaces the file, so that there is nothing to watch in itself.
	folders []string
	// C holds a value when the file was saved, until somebody takes it.
	C chan struct{}
}

// watchSaves begins to watch a file.
func watchSaves(path string, log *slog.Logger) (*saves, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	s := &saves{path: path, log: log, folders: []string{filepath.Dir(path)}, C: make(chan struct{}, 1)}
	if target, err := filepath.EvalSymlinks(path); err == nil && !slices.Contains(s.folders, filepath.Dir(target)) {
		s.folders = append(s.folders, filepath.Dir(target))
	}
	if s.watcher, err = fsnotify.NewWatcher(); err != nil {
		return nil, err
	}
	for _, folder := range s.folders {
		if err := s.watcher.Add(folder); err != nil {
			s.watcher.Close() //nolint:errcheck // it was only made
			return nil, err
		}
	}
	return s, nil
}

// run fills C until the context ends.
func (s *saves) run(ctx context.Context) {
	defer s.watcher.Close() //nolint:errcheck // it was only read
	quiet, look := time.NewTimer(time.Hour), time.NewTicker(lookAgain)
	defer quiet.Stop()
	defer look.Stop()
	last, changed := s.state(), false
	for {
		select {
		case <-s.watcher.Events:
			quiet.Reset(settle)
			changed = true
		case err := <-s.watcher.Errors:
			s.log.Warn("watching for changes", "file", s.path, "error", err)
		case <-look.C:
			if s.watchAnew() {
				quiet.Reset(settle)
				changed = true
			}
		case <-quiet.C:
			now := s.state()
			if changed && now.there && now != last {
				last = now
				s.notify()
			}
			changed = false
		case <-ctx.Done():
			return
		}
	}
}

// state identifies a version of a file.
type state struct {
	there bool
	size  int64
	saved time.Time
}

func (s *saves) state() state {
	info, err := os.Stat(s.path)
	if err != nil {
		return state{}
	}
	return state{there: true, size: info.Size(), saved: info.ModTime()}
}

// watchAnew watches folders again that were removed and are back, and reports
// whether there are any.
func (s *saves) watchAnew() (anew bool) {
	for _, folder := range s.folders {
		if slices.Contains(s.watcher.WatchList(), folder) {
			continue
		}
		if s.watcher.Add(folder) == nil {
			s.log.Info("the worker's folder is back", "folder", folder)
			anew = true
		}
	}
	return anew
}

func (s *saves) notify() {
	select {
	case s.C <- struct{}{}:
	default: // the previous save has not been received yet
	}
}
