// Package natskv implements package discovery on NATS JetStream, for a mesh that
// needs nothing beside its broker.
//
//	store, err := natskv.New(natskv.Settings{Mesh: "digits", URL: "nats://127.0.0.1:4222", Logger: log})
//	go store.Run(ctx)                  // the connection, until the context ends
//	entry, err := store.Get(ctx, key)  // and everything else of discovery.Registry
//
// Run holds one connection for all uses, and reconnects forever; without it every call finds
// the store unavailable. All other functions may be called at any time, from any goroutine.
// Get, Put and Delete wait up to two seconds for a store that is unavailable, then return
// discovery.ErrUnavailable. A change whose answer was lost is retried until its context ends.
//
// A mesh has two streams. A process that finds one missing creates it:
//
//   - <mesh>_registry, on file: a message for each key, on <mesh>.table.<key>, where "."
//     replaces the key's "/". A change is a message that expects the sequence which its
//     entry has. A header has the nonce that identifies the change when its answer was
//     lost. An empty message with a header marks a deleted entry for an hour. A revision
//     is a sequence and the creation of the stream in microseconds, so that none comes
//     twice after the stream was lost. The broker rejects purges and deletes, which no
//     observer could see.
//   - <mesh>_instances, in memory: a message for each instance, on
//     <mesh>.instances.<service>.<id>, that lives for two seconds. Announce renews it
//     every half second, with the answer of grpc.health.v1 at the instance's address, if
//     it has one. If it is not renewed, the broker leaves a marker in its place, which
//     watchers receive.
//
// The package does not use jetstream.KeyValue, which lacks three things: revisions that grow
// after a wipe, a nonce that settles a lost answer, and a new listing after a reconnect or a
// wipe. docs/decisions/0012-registry.md has the measurement.
//
// A consumer is never trusted beyond its connection, nor when it is silent for three seconds
// instead of half a second: then a new one reads everything again. A watcher whose instance
// stream was lost keeps the instances for three seconds, so that they can register again.
//
// A broker that is unreachable, or has no leader or no JetStream, is discovery.ErrUnavailable.
// One that rejects the user, or a subject that the user needs, is discovery.ErrDenied. A full
// store rejects changes with discovery.ErrFull; reads go on. Errors never contain a secret, nor
// a URL that may have one.
package natskv
