package load

import (
	"context"
	"time"
)

// RunLate is Run of a process that was held up from the begin on for that long.
func RunLate(ctx context.Context, s Settings, late time.Duration, target Target, recorder Recorder) error {
	if err := s.Validate(); err != nil {
		return err
	}
	start := time.Now().Add(-late)
	r := &run{settings: s.WithDefaults(), target: target, recorder: recorder, start: start, window: newWindow(s, start)}
	return r.open(ctx)
}
