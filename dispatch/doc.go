// Package dispatch forwards jobs from queues on disk to targets, while a gate says that there
// is room.
//
//	d, err := dispatch.New(dispatch.Settings{Config: config, Mesh: "demo", Target: targets})
//	err = d.Run(ctx)            // until the context ends; then running attempts are awaited
//
// # Pools
//
// A pool is a target with its capacity: queues feed it, a gate and a budget say how much may be
// in flight. Any number of dispatchers may have a pool; one owns it at a time, by a lease on
// the broker. It renews the lease each second, sends nothing once the last renewal began over
// 2.5 s ago, and others take over after 5 s without a change.
//
// An owner follows the headers of its queues and keeps an entry for each job. So order,
// expiry and positions are exact, nothing is pulled and put back, and a closed gate costs
// the broker nothing. Payloads are read when they are sent.
//
// SetConfig replaces pools and queues while attempts run. Which pool has a queue is a value on the
// broker, so that two pools never have one queue. An owner whose pool has changed sends nothing
// more until its attempts have ended, and begins anew.
//
// # A job's life
//
// An attempt begins by a compare-and-set of the job's record (mesh/store), so no two owners
// begin the same one, and a cancelled job begins none. An end is the last write of the record;
// then the job leaves its queue. Each step may be repeated, so a crash between any two is
// harmless. A new owner resumes the attempts that it finds running: see Target.
//
// # Concurrency
//
// All methods are safe for concurrent use. The pure parts (order, credit, attempts, limits)
// decide; an owner calls them under its lock. Each attempt has a goroutine of its own, so there
// are as many as jobs in flight.
package dispatch
