package item

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestBusyTimeIncludesRunningBatches(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var slots slotTime
		for _, step := range []struct {
			busy int
			want float64
		}{{2, 0}, {1, 4}, {1, 6}, {0, 8}, {0, 8}} {
			if got := slots.seconds(); got != step.want {
				t.Errorf("got %v, want %v", got, step.want)
			}
			slots.set(step.busy)
			<-time.After(2 * time.Second)
		}
	})
}
