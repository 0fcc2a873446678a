package bus

import (
	"testing"
	"time"
)

func TestSilenceIsTheBrokersNotThisProcesss(t *testing.T) {
	t.Parallel()
	const limit = time.Second
	for name, test := range map[string]struct {
		// pause is the time between two ticks.
		pause time.Duration
		want  bool
	}{
		"the broker is silent":    {limit / 10, true},
		"the process has no time": {2 * limit, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			begin := time.Unix(1000, 0)
			now := begin
			s := silence{limit: limit, ticked: now}
			for now.Sub(begin) < 2*limit {
				now = now.Add(test.pause)
				s.tick(now)
			}
			for _, when := range []string{"before", "after"} {
				if got := s.mayRedeliver(begin); got != test.want {
					t.Errorf("%s the echo: may redeliver: %t, want %t", when, got, test.want)
				}
				s.hear(now)
			}
		})
	}
}
