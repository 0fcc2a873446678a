package program

import (
	"context"
	"os"
	"time"
)

// settle is how long a file has to be left alone after a change: editors write one in
// several steps, and tools take it away for a moment.
const settle = 200 * time.Millisecond

// FileVersion identifies a version of a file; zero means that it is not there.
type FileVersion struct {
	size  int64
	saved time.Time
	mode  os.FileMode
}

// VersionOf returns the version of a file.
func VersionOf(path string) FileVersion {
	info, err := os.Stat(path)
	if err != nil {
		return FileVersion{}
	}
	return FileVersion{size: info.Size(), saved: info.ModTime(), mode: info.Mode()}
}

// Watch reports each new version of a file until the context ends, from the first that is not
// last. It polls, which sees also files that are replaced, links, and folders that are removed for
// a while.
func Watch(ctx context.Context, path string, last FileVersion, saved chan<- struct{}) {
	ticks := time.NewTicker(settle)
	defer ticks.Stop()
	before := last
	for {
		select {
		case <-ticks.C:
		case <-ctx.Done():
			return
		}
		now := VersionOf(path)
		if now == before && now != last && now != (FileVersion{}) {
			last = now
			select {
			case saved <- struct{}{}:
			default: // the previous save has not been received yet
			}
		}
		before = now
	}
}
