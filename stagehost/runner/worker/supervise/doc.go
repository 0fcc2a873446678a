// Package supervise decides what becomes of one worker: a process, or the ranks
// of a gang, which live and die together.
//
//	m := supervise.New(settings)
//	actions := m.Start(now)                 // events in, actions out
//	actions = m.Ready(incarnation, rank, now)
//	...
//	m.Work(incarnation, work, now)          // before every Tick
//	actions = m.Tick(now)                   // whenever m.Wake() is due
//
// A worker is in one of five states:
//
//	STARTUP  its processes have been asked for, and load
//	READY    every rank is ready and the warm-up went well: it takes batches
//	ERROR    something failed; it cleans up, or is being ended
//	SHUTDOWN it is leaving, as it was asked to or says itself
//	DEAD     no process is left
//
// and each edge is handed to Settings.Edge with its cause. From DEAD a worker
// starts again, later and later, until it is told to stop. A worker that died
// several times in a row, and neither finished a batch nor was ready for a while
// in between, is in a crash loop: it goes on trying, and whoever asks is told
// why.
//
// A worker is ended at once where it can no longer be trusted (Fail, and the
// limits). One that says itself that it failed or leaves has as long as one that
// was asked to.
//
// Every event carries the incarnation that it is about, and one of an earlier
// incarnation changes nothing: processes, connections and timers race. What
// happens often, batches, is no event: Work looks at it when the time comes.
//
// The machine is pure: no process, goroutine, lock or clock. Time is an argument,
// and must not go back. It is not safe for concurrent use.
package supervise
