package dispatch

import (
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

const (
	maxInterruptions = 20 // how often the death of a dispatcher may interrupt a job
	// Pauses double between these: of retries, of an open breaker, of refusals without a gate that tells more.
	firstPause, longestPause = time.Second, time.Minute
	breakerFailures          = 10 // in a row open the breaker
)

// outcome is how one attempt ended.
type outcome string

const (
	// The attempt tells nothing of job or target: the job was cancelled, or its dispatcher stopped.
	interrupted outcome = "interrupted"
	succeeded   outcome = "succeeded"
	latched     outcome = "refused" // for want of capacity, so the job did not run
	retried     outcome = "retried" // failed in a way that a later one may not
	failed      outcome = "failed"
	poison      outcome = "poison" // the job ends the process that runs it
)

// outcomeOfStatus returns the outcome of an HTTP answer. Redirects are not followed, so they are failures.
func outcomeOfStatus(status int) outcome {
	switch {
	case status/100 == 2:
		return succeeded
	case status == 429, status == 503:
		return latched
	case status == 408, status == 425, status/100 == 5 && status != 501 && status != 505:
		return retried
	}
	return failed
}

func outcomeOfReason(reason fault.Reason) outcome {
	switch class := fault.Classify(reason); {
	case class.Refused():
		return latched
	case reason == fault.RunnerCrashed:
		return poison
	case class.Retryable, reason == fault.StreamInterrupted: // the run has ended, and nobody else begins another one
		return retried
	}
	return failed
}

// attempt is an attempt that has ended, with what its job has behind and before it.
type attempt struct {
	outcome outcome
	counts  bool // true where the attempt is one of the job's; see credit.finish
	// failures and interruptions are the job's before this attempt, of at most so many failures.
	failures, interruptions, most int
	retryAfter                    time.Duration // what the target asked for; 0 means nothing
	left                          time.Duration
}

// next returns what happens to the job: success, failure, a dead letter (poison), or another try after a
// pause. random is uniform in [0, 1). A latched job does not pause, because its pool is closed.
func (a attempt) next(random float64) (outcome, time.Duration) {
	switch {
	case a.outcome == interrupted && a.interruptions >= maxInterruptions:
		return poison, 0
	case a.outcome == interrupted, a.outcome == latched:
		return retried, 0
	case a.outcome != retried:
		return a.outcome, 0
	}
	failures := a.failures
	if a.counts {
		failures++
	}
	if failures >= a.most {
		return poison, 0
	}
	pause := retryPause(max(1, failures), a.retryAfter, a.left, random)
	if pause >= a.left {
		return failed, 0
	}
	return retried, pause
}

// retryPause returns the pause before retry k, 1 for the first: between a half and all of a time that doubles,
// or Retry-After and up to a quarter more, which takes at most half the time left.
func retryPause(k int, retryAfter, left time.Duration, random float64) time.Duration {
	half := pauseOf(k) / 2
	pause := half + time.Duration(random*float64(half))
	asked := float64(retryAfter) * (1 + random/4)
	return max(pause, time.Duration(min(asked, float64(left)/2)))
}

func pauseOf(k int) time.Duration {
	if k > 6 {
		return longestPause
	}
	return min(longestPause, firstPause<<(k-1))
}

// breaker closes a pool whose target fails for every job, but for one probe after pauses that double.
type breaker struct {
	disabled bool // true where each job has a target of its own
	failures int  // in a row
	opened   int  // how often in a row; 0 while the breaker is closed
	until    time.Time
	probing  bool
	probe    [16]byte
}

// blocks reports whether nothing may be sent now.
func (b *breaker) blocks(now time.Time) bool {
	return b.opened > 0 && (b.probing || now.Before(b.until))
}

func (b *breaker) start(id [16]byte) {
	if b.opened > 0 {
		b.probing, b.probe = true, id
	}
}

// finish reports whether an attempt counts: a failure does while the breaker is closed.
func (b *breaker) finish(id [16]byte, o outcome, now time.Time) (counts bool) {
	probe := b.probing && b.probe == id
	if probe {
		b.probing = false
	}
	switch o {
	case interrupted:
		return false
	case latched:
		if probe {
			b.open(now)
		}
		return false
	case retried:
		wasOpen := b.opened > 0
		b.failures++
		if b.disabled {
			return true
		}
		if probe || !wasOpen && b.failures >= breakerFailures {
			b.open(now)
		}
		return !wasOpen
	}
	*b = breaker{disabled: b.disabled} // the target answers
	return true
}

func (b *breaker) open(now time.Time) {
	b.opened++
	b.until = now.Add(pauseOf(b.opened))
}
