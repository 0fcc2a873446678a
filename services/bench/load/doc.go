// Package load asks a target again and again, in one of two ways, and hands what
// comes of it to a recorder.
//
//	outcome, err := load.Run(ctx, load.Settings{Concurrency: 8, Warmup: time.Second, Duration: 10 * time.Second}, target, recorder)
//
// In a closed loop a number of callers each wait for their answer before they ask
// again: a slow target is asked less. In an open loop requests arrive at a rate,
// whatever becomes of those before: that is how strangers ask. Each is timed from the
// moment for which it was planned, so that a request that the generator could send
// only late, because it or the machine was held up, has waited in the figures as its
// caller would have. This corrects what is known as coordinated omission.
//
// An open loop has at most Settings.MaxInFlight requests in flight. An arrival beyond
// that is not sent, and counted in Outcome.NotSent: figures with any are too good.
//
// The warm-up is asked like the rest, and not recorded. What was asked in time is
// waited for, so the target has to end each request by itself; the end of the context
// calls off those in flight, which are not recorded.
//
// Schedules are pure. A target and a recorder are used by many goroutines at once, all
// of which have ended when Run returns. Nothing is kept for each request, and nothing
// allocated but by the target, and some bytes by Settings.Fine for an arrival that was
// waited for. Runs without that may be tested in a bubble of testing/synctest.
package load
