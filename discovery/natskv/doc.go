// Package natskv implements package discovery on NATS JetStream, for a mesh that
// wants nothing beside its broker.
//
//	store, err := natskv.New(natskv.Settings{Mesh: "digits", URL: "nats://127.0.0.1:4222", Logger: log})
//	go store.Run(ctx)                  // the connection, until the context ends
//	entry, err := store.Get(ctx, key)  // and all else of discovery.Registry and discovery.Table
//
// New checks the settings. Run holds the connection, one for all uses, and
// reconnects for ever; what is called before or without it finds the store
// unavailable. All other functions may be called at any time, from any goroutine.
// Calls that have an answer wait up to two seconds for a store that is away, then
// say discovery.ErrUnavailable; a commit whose answer was lost goes on asking until
// its context ends.
//
// # On the broker
//
// There are two streams for a mesh, made by whoever finds them missing, and changed
// by whoever knows a higher version of their settings:
//
//   - <mesh>_table, on file: a message for each key, on <mesh>.table.<key>, the key's
//     "/" being ".". A commit is a message, or an atomic batch of them, each of which
//     expects the sequence that its entry has. A header has the commit's nonce, by
//     which it is recognised when its answer was lost. A deleted entry is an empty
//     message with a header that says so, for an hour. Sequences are revisions; those
//     of a new stream begin at the clock's microseconds, so that none comes twice
//     when the stream was lost. Nothing else may be removed from it: the broker
//     refuses purges and deletes, which no observer could see.
//   - <mesh>_instances, in memory: a message for each instance, on
//     <mesh>.instances.<service>.<id>, that lives for two seconds. Announce renews it
//     every half a second, with what grpc.health.v1 says at the instance's own
//     address, if it has one. When it is not renewed the broker leaves a marker in its
//     place, which watchers see. It is in memory as it is written all the time and
//     means nothing after a restart.
//
// It is not the broker's KeyValue API: that knows no commits of several keys, and
// makes a key that expires permanent when it is put.
//
// Who follows a stream has a push consumer of its own that the broker forgets five
// seconds after it left. A consumer is never trusted beyond its connection, nor when
// it is silent for three seconds instead of half a second: then all is read anew from
// a new one. A watcher whose instance stream was lost keeps those that it saw for
// three seconds, until they have had the time to register again.
//
// A user of the broker needs, with <stream> being both,
//
//	publish   <mesh>.table.>  <mesh>.instances.>
//	          $JS.API.STREAM.INFO.<stream>  $JS.API.STREAM.CREATE.<stream>  $JS.API.STREAM.UPDATE.<stream>
//	          $JS.API.STREAM.MSG.GET.<stream>  $JS.API.DIRECT.GET.<stream>
//	          $JS.API.CONSUMER.CREATE.<stream>  $JS.FC.>
//	subscribe _INBOX.>
//
// # Failures
//
// A broker that is away, without a leader or without JetStream is
// discovery.ErrUnavailable. One that refuses the user, or a subject that the user
// needs, is discovery.ErrDenied. Errors never have a secret, nor a URL that may have
// one. A store that is full refuses commits with an error of its own; reads go on.
// Where the broker does not answer, an observer is told all entries again when it
// does. One commit may reach an observer in two changes, and a List from a store of
// several replicas may be without what others have just committed; it is never
// without what this Store has.
//
// Tests run a real broker as a process of its own, which they kill.
package natskv
