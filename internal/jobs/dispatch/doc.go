// Package dispatch forwards jobs from queues on disk to targets, while a gate says that there
// is room.
//
//	d, err := dispatch.New(dispatch.Settings{Config: config, Mesh: "demo", Target: targets})
//	err = d.Run(ctx)            // until the context ends; then running attempts are awaited
//
// A pool is a target with its capacity: queues feed it, a gate and a budget say how much may be
// in flight. Of any number of dispatchers one owns a pool at a time, by a lease on the broker.
// An owner follows the headers of its queues and keeps an entry for each job, so order, expiry
// and positions are exact, and a closed gate costs the broker nothing.
//
// An attempt begins by a compare-and-set of the job's record (internal/store), so no two owners
// begin the same one, and a cancelled job begins none. An end is the last write of the record;
// then the job leaves its queue. Each step may be repeated, so a crash between any two is
// harmless. A new owner resumes the attempts that it finds running: see Target.
//
// All methods are safe for concurrent use. The pure parts (order, credit, attempts, limits)
// decide; an owner calls them under its lock. Each attempt has a goroutine of its own.
package dispatch
