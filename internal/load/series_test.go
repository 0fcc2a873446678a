package load

import (
	"slices"
	"testing"
	"time"
)

// times returns the times of a series' samples in seconds. Each is due after the one
// before; missed ones are not added.
func times(until int, missed func(second int) bool) []float64 {
	s := &sampleSeries{interval: firstInterval}
	for at := time.Duration(0); at <= time.Duration(until)*time.Second; at = s.next(at) {
		if !missed(int(at.Seconds())) {
			s.add(at, ProcessSample{})
		}
	}
	var out []float64
	for _, sample := range s.samples {
		out = append(out, sample.AtMS/1000)
	}
	return out
}

// every returns multiples of a step, up to a bound.
func every(step, until int) []float64 {
	var out []float64
	for n := 0; n <= until; n += step {
		out = append(out, float64(n))
	}
	return out
}

func TestFullSeriesDropsEverySecondSample(t *testing.T) {
	t.Parallel()
	none := func(int) bool { return false }
	for name, test := range map[string]struct {
		got, want []float64
	}{
		"one":               {times(0, none), every(1, 0)},
		"full":              {times(59, none), every(1, 59)},
		"one more":          {times(60, none), every(2, 60)},
		"full again":        {times(119, none), every(2, 118)},
		"and thinned again": {times(120, none), every(4, 120)},
		"an hour":           {times(3600, none), every(64, 3584)},
		"some are missed": {
			times(100, func(second int) bool { return second > 0 && second < 95 }),
			[]float64{0, 95, 96, 97, 98, 99, 100},
		},
		// The interval of 20 and 21 has only 21; 60 and 61 share an interval.
		"one is missed": {
			times(62, func(second int) bool { return second == 20 }),
			slices.Replace(every(2, 62), 10, 11, 21),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if !slices.Equal(test.got, test.want) {
				t.Errorf("got  %v\nwant %v", test.got, test.want)
			}
		})
	}
}

func TestMissedSamplesAreSkipped(t *testing.T) {
	t.Parallel()
	s := &sampleSeries{interval: firstInterval}
	for after, want := range map[time.Duration]time.Duration{
		0: time.Second, time.Millisecond: time.Second, 999 * time.Millisecond: time.Second,
		time.Second: 2 * time.Second, 7300 * time.Millisecond: 8 * time.Second,
	} {
		if got := s.next(after); got != want {
			t.Errorf("after %s the next is due at %s, not %s", after, got, want)
		}
	}
}

func TestResidentMemoryIsSecondNumberOfStatm(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]uint64{"25814 1987 1200 700 0 6100 0\n": 1987, "": 0, "1": 0, "1 -2 3": 0, "1 x": 0} {
		if got := residentPages([]byte(text)); got != want {
			t.Errorf("%q: got %d", text, got)
		}
	}
}
