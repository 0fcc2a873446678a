package stagemesh

import (
	"context"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// settle is how long a folder has to be quiet after a change: editors write a
// file in several steps.
const settle = 200 * time.Millisecond

// onSave calls again after each change of the file, one call at a time, until the
// context ends.
func onSave(ctx context.Context, path string, log *slog.Logger, again func(context.Context)) error {
	// The folder and not the file, which editors replace.
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer watcher.Close() //nolint:errcheck // it was only read
	if err := watcher.Add(filepath.Dir(path)); err != nil {
		return err
	}
	quiet := time.NewTimer(time.Hour)
	defer quiet.Stop()
	changed := false
	for {
		select {
		case e := <-watcher.Events:
			if filepath.Base(e.Name) == filepath.Base(path) && !e.Has(fsnotify.Chmod) {
				changed = true
				quiet.Reset(settle)
			}
		case err := <-watcher.Errors:
			log.Warn("watching for changes", "file", path, "error", err)
		case <-quiet.C:
			if changed {
				changed = false
				again(ctx)
			}
		case <-ctx.Done():
			return nil
		}
	}
}
