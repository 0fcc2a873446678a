package batch_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
)

func TestBadSettingsAreRejectedByKey(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		settings batch.Settings
		refusals []string
	}{
		"adaptive by default":     {batch.Settings{MaxSize: 1}, nil},
		"eager with all limits":   {batch.Settings{Mode: batch.Eager, MaxSize: 32, MaxBytes: 1 << 20, MaxWait: time.Millisecond}, nil},
		"window":                  {batch.Settings{Mode: batch.Window, MaxSize: 32, MaxWait: time.Millisecond}, nil},
		"window without a window": {batch.Settings{Mode: batch.Window, MaxSize: 32}, []string{"batch.max_wait"}},
		"stream":                  {batch.Settings{Mode: batch.Stream, MaxSize: 32}, nil},
		"adaptive":                {batch.Settings{Mode: batch.Adaptive, MaxSize: 32}, nil},
		"an unknown mode":         {batch.Settings{Mode: "greedy", MaxSize: 32}, []string{`batch.mode: expected adaptive, eager, window or stream, got "greedy"`}},
		"no size":                 {batch.Settings{}, []string{"batch.max_size"}},
		"all of it wrong": {
			batch.Settings{MaxSize: -1, MaxBytes: -1, MaxWait: -1},
			[]string{"batch.max_size", "batch.max_bytes", "batch.max_wait"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := row.settings.Validate()
			if (err != nil) != (len(row.refusals) > 0) {
				t.Fatalf("Validate: %v", err)
			}
			for _, refusal := range row.refusals {
				if !strings.Contains(err.Error(), refusal) {
					t.Errorf("Validate: %v, which does not say %q", err, refusal)
				}
			}
		})
	}
}
