// Package modelcache decides which models a host keeps in memory and in which order it loads
// them. It is a pure policy: one goroutine of a host drives it and executes its actions.
//
// # Use
//
// Want a model: for an item (Waiting), which pins the replica until Unpin, or to have it here.
// If its size is unknown, ask the runtime first. After every event, and when the time that
// Wake returned has come, execute Actions, each in a goroutine and for at most LoadTimeout.
// Report the end of each, a timeout too:
//
//	Load     load the model: Loaded or LoadFailed; Resize if its size is measured later
//	Unload   remove the replica's record, then unload the model: Unloaded
//	Refuse   the replica is not loaded: cancel its load, remove its record, forward or answer its
//	         items
//
// RuntimeLost stands for the reports of all actions before it. A report that does not fit the
// state of a replica does nothing. Each Want is refused at once, or
// its replica is loaded, or gets a Refuse. Calls take time logarithmic in the number of models,
// Actions for each model that it moves; RuntimeLost and All visit all.
//
// # Memory
//
// Host and device memory must both fit; one of capacity 0 does not count. Models use the
// capacity less the unload buffer. A load evicts all that it displaces, or is refused as Full
// and evicts nothing. It starts as soon as its memory is free: it borrows the buffer while
// evicted models unload, which repays it. Loads that wait for that start in order, and are
// refused after 3 minutes. Live sizes exceed the capacity only if a model is larger than
// predicted. Then models are evicted, and no load starts until they fit.
//
// The model used longest ago is evicted first, never a pinned one, nor one to Keep. A load
// without items displaces no model used later than its own.
// The churn guard lets no load displace a model used less than 10 load times ago. It begins
// after three loads of the type: earlier it would prevent the loads that it learns from.
//
// A dropped model unloads when its items have ended, or after 127 s. One that is being loaded
// keeps its load slot until that load has ended, and then unloads. A failed unload is tried
// 6 times, 10 s apart. Then the capacity shrinks, until the runtime is replaced.
//
// # Loads
//
// First are the loads that items wait for, by arrival, then the requested ones, the latest use
// first, which fill at most half of the queue. A queued load that nobody wants is refused. A
// model that is wanted while its old replica unloads stays queued until that has ended, and
// delays no other. GiveUpQueued refuses the loads that have not begun, of a host that leaves.
//
// RuntimeLost queues the models in use and refuses the others as Lost. A model that was being
// loaded alone is refused as Crashed. If several were, models load one at a time until one of
// them crashes again or all are loaded.
//
// Queued and failed loads weigh nothing: the queue is bounded, failures are in the registry.
package modelcache
