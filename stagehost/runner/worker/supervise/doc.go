// Package supervise decides what becomes of one worker: a process, or the ranks
// of a gang, which live and die together.
//
//	m := supervise.New(settings)
//	actions := m.Start(now)                 // events in, actions out
//	actions = m.Hello(incarnation, rank, now)
//	...
//	actions = m.Tick(now)                   // whenever m.Wake() is due
//
// A worker is in one of five states:
//
//	STARTUP  its processes have been asked for, and load
//	READY    every rank is ready and the warm-up went well: it takes batches
//	ERROR    something failed; its processes are being ended
//	SHUTDOWN it was asked to leave, and finishes
//	DEAD     no process is left
//
// and each edge is handed to Settings.Edge with its cause. From DEAD a worker
// starts again, later and later, until it is told to stop. A worker that died
// several times in a row without having been ready for a while is in a crash
// loop: it goes on trying, and whoever asks is told why.
//
// Every event carries the incarnation that it is about, and one of an earlier
// incarnation changes nothing: processes, connections and timers race.
//
// The machine is pure: no process, goroutine, lock or clock. Time is an argument,
// and must not go back. It is not safe for concurrent use.
package supervise
