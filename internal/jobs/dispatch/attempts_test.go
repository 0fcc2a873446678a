package dispatch

import (
	"math"
	"net/http"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// epoch is when the tests of pure parts begin.
var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func TestStatusesHaveOutcomes(t *testing.T) {
	t.Parallel()
	for want, statuses := range map[outcome][]int{
		succeeded: {200, 201, 202, 204, 299},
		latched:   {429, 503},
		retried:   {408, 425, 500, 502, 504, 507, 599},
		failed:    {0, 100, 199, 300, 301, 302, 307, 308, 400, 401, 404, 409, 410, 413, 422, 499, 501, 505, 600},
	} {
		for _, status := range statuses {
			if got := outcomeOfStatus(status); got != want {
				t.Errorf("%d: got %s, want %s", status, got, want)
			}
		}
	}
}

func TestReasonsHaveOutcomes(t *testing.T) {
	t.Parallel()
	want := map[fault.Reason]outcome{
		fault.QueueFull: latched, fault.StoreFull: latched, fault.Overloaded: latched, fault.NoCapacity: latched,
		fault.BrokerUnavailable: latched, fault.RegistryUnavailable: latched, fault.ShuttingDown: latched,
		fault.RunnerCrashed: poison,
		fault.ModelLoading:  retried, fault.ModelLoadFailed: retried, fault.CacheFull: retried, fault.QueueLost: retried,
		fault.DeadlineExceeded: retried, fault.RunnerStalled: retried, fault.RunnerOutOfMemory: retried,
		fault.TargetFailed: retried, fault.StreamInterrupted: retried,
	}
	for _, reason := range append(fault.Reasons(), "UNHEARD_OF") {
		expected, ok := want[reason]
		if !ok {
			expected = failed
		}
		if got := outcomeOfReason(reason); got != expected {
			t.Errorf("%s: got %s, want %s", reason, got, expected)
		}
	}
}

func TestAttemptDecidesNextStep(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		attempt attempt
		want    outcome
		pause   time.Duration
	}{
		"success":                         {attempt{outcome: succeeded}, succeeded, 0},
		"final failure":                   {attempt{outcome: failed, left: time.Hour}, failed, 0},
		"poison":                          {attempt{outcome: poison, left: time.Hour}, poison, 0},
		"refusal":                         {attempt{outcome: latched, failures: 4, retryAfter: time.Hour, left: time.Second}, retried, 0},
		"first failure":                   {attempt{outcome: retried, counts: true, left: time.Hour}, retried, 750 * time.Millisecond},
		"fourth failure":                  {attempt{outcome: retried, counts: true, failures: 3, left: time.Hour}, retried, 6 * time.Second},
		"fifth failure":                   {attempt{outcome: retried, counts: true, failures: 4, left: time.Hour}, poison, 0},
		"fifth failure during an outage":  {attempt{outcome: retried, failures: 4, left: time.Hour}, retried, 6 * time.Second},
		"first failure during an outage":  {attempt{outcome: retried, left: time.Hour}, retried, 750 * time.Millisecond},
		"retry after":                     {attempt{outcome: retried, counts: true, retryAfter: 8 * time.Second, left: time.Hour}, retried, 9 * time.Second},
		"retry after most of the time":    {attempt{outcome: retried, counts: true, retryAfter: time.Hour, left: time.Minute}, retried, 30 * time.Second},
		"retry after ages":                {attempt{outcome: retried, counts: true, retryAfter: math.MaxInt64, left: time.Minute}, retried, 30 * time.Second},
		"pause past the deadline":         {attempt{outcome: retried, counts: true, left: 750 * time.Millisecond}, failed, 0},
		"deadline passed":                 {attempt{outcome: retried, counts: true, retryAfter: time.Second, left: -time.Second}, failed, 0},
		"twentieth interruption":          {attempt{outcome: interrupted, failures: 4, interruptions: 19}, retried, 0},
		"one interruption more than that": {attempt{outcome: interrupted, interruptions: 20}, poison, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test.attempt.most = DefaultAttempts
			if got, pause := test.attempt.next(.5); got != test.want || pause != test.pause {
				t.Errorf("got %s after %s, want %s after %s", got, pause, test.want, test.pause)
			}
		})
	}
}

func TestPausesStayInBounds(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		k := rapid.IntRange(1, math.MaxInt).Draw(t, "k")
		retryAfter := time.Duration(rapid.Int64Min(0).Draw(t, "retry after"))
		left := time.Duration(rapid.Int64Min(1).Draw(t, "left"))
		random := rapid.Float64Range(0, math.Nextafter(1, 0)).Draw(t, "random")
		full := time.Duration(min(60, math.Pow(2, float64(k-1))) * float64(time.Second))
		pause := retryPause(k, 0, left, random)
		if pause < full/2 || pause >= full {
			t.Fatalf("pause %s is not between %s and %s", pause, full/2, full)
		}
		asked := retryPause(k, retryAfter, left, random)
		// Floats of durations of a century are exact to some microseconds.
		if asked < pause || asked > max(pause, left/2)+time.Millisecond || asked < min(retryAfter, left/2)-time.Millisecond {
			t.Fatalf("pause %s after a Retry-After of %s with %s left", asked, retryAfter, left)
		}
	})
}

func TestRetryAfterIsSecondsOrDate(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]time.Duration{
		"120": 2 * time.Minute, " 3 ": 3 * time.Second, "0": 0, "": 0, "-1": 0, "1.5": 0, "soon": 0,
		"99999999999999999999":                              0,
		epoch.Add(90 * time.Second).Format(http.TimeFormat): 90 * time.Second,
		epoch.Add(-time.Hour).Format(http.TimeFormat):       0,
	} {
		if got := parseRetryAfter(value, epoch); got != want {
			t.Errorf("%q: got %s, want %s", value, got, want)
		}
	}
}

func FuzzRetryAfter(f *testing.F) {
	f.Add("120")
	f.Add("Fri, 02 Jan 2026 03:05:05 GMT")
	f.Fuzz(func(t *testing.T, value string) {
		if got := parseRetryAfter(value, epoch); got < 0 {
			t.Errorf("%q: %s", value, got)
		}
	})
}

func TestBreakerProbesUntilTargetAnswers(t *testing.T) {
	t.Parallel()
	var b breaker
	now, job := epoch, func(n int) [16]byte { return [16]byte{byte(n)} }
	blocked := func(want bool) {
		t.Helper()
		if got := b.blocks(now); got != want {
			t.Fatalf("at %s: blocks %t, want %t", now.Sub(epoch), got, want)
		}
	}
	b.finish(job(0), succeeded, now)
	for n := range breakerFailures {
		blocked(false)
		if !b.finish(job(n), retried, now) {
			t.Fatalf("failure %d is not an attempt", n)
		}
	}
	blocked(true)
	if b.finish(job(20), retried, now) {
		t.Error("a failure of a job in flight is an attempt while the breaker is open")
	}
	for i, pause := range []time.Duration{1e9, 2e9, 4e9, 8e9, 16e9, 32e9, 60e9, 60e9} {
		now = now.Add(pause - 1)
		blocked(true)
		now = now.Add(1)
		blocked(false)
		b.start(job(30))
		blocked(true)
		b.finish(job(21), latched, now) // not the probe
		blocked(true)
		if b.finish(job(30), []outcome{retried, latched}[i%2], now) {
			t.Error("a failed probe is an attempt")
		}
	}
	now = now.Add(time.Minute)
	b.start(job(31))
	b.finish(job(31), interrupted, now)
	blocked(false)
	b.start(job(32))
	b.finish(job(32), failed, now)
	blocked(false)
	for n := range breakerFailures - 1 {
		b.finish(job(n), retried, now)
	}
	blocked(false)
}

func TestFinalFaultEndsItsJob(t *testing.T) {
	t.Parallel()
	f := fault.New(fault.RunnerOutOfMemory, "too large")
	if outcomeOf(Answer{Fault: f}) != retried || outcomeOf(Answer{Fault: f.Final()}) != failed || f.Final().Retryable() {
		t.Error("only a final fault ends its job")
	}
}
