package filestream_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/internal/filestream"
)

func TestAwaitDeletedWaitsForSeenStreams(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s filestream.Seen
		waits := func(name string, want time.Duration) {
			t.Helper()
			began := time.Now()
			if err := s.AwaitDeleted(t.Context(), name); err != nil || time.Since(began) != want {
				t.Errorf("waited %s for %s: %v; want %s", time.Since(began), name, err, want)
			}
		}
		waits("never seen", 0)
		s.Found("seen")
		short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		if err := s.AwaitDeleted(short, "seen"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the context ended, and the error is %v", err)
		}
		waits("seen", filestream.DeleteWait-200*time.Millisecond)
		waits("seen", 0)
		s.Found("seen")
		waits("seen", filestream.DeleteWait)
		s.Found("seen")
		s.Clear()
		waits("seen", 0)
	})
}
