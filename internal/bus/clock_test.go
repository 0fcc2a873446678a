package bus

import (
	"testing"
	"time"
)

func TestShortestRoundTripSetsTheClock(t *testing.T) {
	t.Parallel()
	const ms = time.Millisecond
	type look struct {
		offset, roundTrip time.Duration
		at                int // seconds
	}
	for _, test := range []struct {
		name  string
		looks []look
		want  time.Duration
	}{
		{"none", nil, 0},
		{"one", []look{{50 * ms, 2 * ms, 0}}, 50 * ms},
		{"what the round trip explains is none", []look{{-9 * ms, 18 * ms, 0}}, 0},
		{"a slower one does not count", []look{{50 * ms, 2 * ms, 0}, {90 * ms, 100 * ms, 2}}, 50 * ms},
		{"a quicker one does", []look{{90 * ms, 100 * ms, 0}, {50 * ms, 2 * ms, 2}}, 50 * ms},
		{"an equal one does", []look{{50 * ms, 2 * ms, 0}, {51 * ms, 2 * ms, 2}}, 51 * ms},
		{"a slower one that contradicts it does", []look{{50 * ms, 2 * ms, 0}, {900 * ms, 100 * ms, 2}}, 900 * ms},
		{"an old one does not", []look{{50 * ms, 2 * ms, 0}, {60 * ms, 4 * ms, 31}}, 60 * ms},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var c clock
			for _, l := range test.looks {
				c.record(measurement{l.offset, l.roundTrip, time.Unix(int64(1000+l.at), 0)})
			}
			if got := c.ahead(); got != test.want {
				t.Errorf("ahead by %s, want %s", got, test.want)
			}
		})
	}
}
