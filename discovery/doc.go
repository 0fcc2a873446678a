// Package discovery finds the live parts of a mesh, and keeps a small table that all of
// them agree on. Consul implements it in production (discovery/consul); the mesh's own
// broker implements it for a single binary and for tests (discovery/natskv). One
// conformance suite, discovery/internal/discoverytest, holds both to the promises below.
//
//	err := registry.Announce(ctx, discovery.Instance{Service: "digits-classify", ID: host, Address: addr}, report)
//	err := registry.Watch(ctx, "digits-classify", observer)              // healthy instances
//	entry, err := registry.Get(ctx, discovery.KeyOf("pipelines", "digits"))
//	revision, err := registry.Put(ctx, key, value, entry.Revision)
//	err := registry.Observe(ctx, discovery.KeyOf("pipelines"), observer) // all entries, then changes
//
// Announce, and the functions that take an observer, block until their context ends:
// their callers own the goroutines. They reconnect forever, and return early only for
// errors that no retry mends: invalid arguments and rejected credentials. All methods
// are safe for concurrent use.
//
// # Instances
//
// An instance is registered from when Announce has reported so until its context ends.
// It is healthy while it answers. An address is checked by grpc.health.v1 about every
// second, by the store, or by Announce where the store cannot. An instance without an
// address is healthy while its process renews it. Watchers lose an instance that was
// killed, or does not serve, within MaxDetectTime, and one whose Announce has returned
// within a second. An instance that the store has lost, because it was wiped or
// restarted without its files, is registered again within MaxRepairTime.
//
// A watcher receives full snapshots of the healthy instances of one service, sorted by
// ID. The first snapshot comes as soon as there is one, even if it is empty, and another
// one after each change; several changes may come as one. Snapshots never go back in
// time while the store lives; after a wipe they start over.
//
// # The table
//
// Every change is of one key, and names the revision that it expects; 0 means that the
// key has no entry. Put and Delete return ErrConflict where the key has another
// revision. So of any number of writers that read and then write, none overwrites what
// it has not seen. Reads return committed values, and may lag behind other writers; a
// writer reads its own writes. Every entry has the revision of its last change.
//
// The answer to a change may be lost with its connection. Put and Delete then ask again,
// by a nonce that every value is stored with, until they know what happened or the
// context ends. Where nobody can know, because another writer has changed the entry
// since or the context has ended, they return ErrUnknown: read, and decide. They never
// return ErrConflict for a change that they have made.
//
// An observer receives all entries below a key first (Change.Reset), then changes in the
// order of their revisions; several changes of a key may come as one. After a broken
// connection, or a wipe, it receives all entries again. OnDisconnect reports that the
// store is unavailable, and the next OnUpdate that it is available again, which also
// comes if nothing has changed.
//
// # Mirrors
//
// A mirror is the local copy that readers use. Reading costs nothing, and goes on while
// the registry is unavailable; Stale returns since when.
//
//	pipelines := discovery.NewTableMirror(registry, discovery.KeyOf("pipelines"))
//	go pipelines.Run(ctx)
//	err := pipelines.Loaded(ctx)
//	entries := pipelines.Entries()
//	for keys := range pipelines.ChangedKeys(ctx) { ... } // single changes, of any number of keys
//
// NewMirror is for an owner that keeps the entries in a form of its own. Restore writes
// back what a wiped table has lost.
//
// A mirror is empty until Loaded. From then on it shows states that the store has had,
// in their order. A reset replaces everything at once: no reader sees a mirror that is
// half filled. A wiped registry is an empty one.
//
// # Membership
//
// A host announces its instance, and publishes a record about itself. Everyone else
// reads the membership: all hosts, and which of them are alive.
//
//	err := registry.Announce(ctx, discovery.HostInstance(record), report)
//	err := discovery.PublishHost(ctx, registry, host.Record, log)
//	...
//	members := discovery.NewMembership(registry, registry, "digits", log)
//	go members.Run(ctx)
//	for _, host := range members.Hosts() { host.Record.GetStage(); host.Alive }
//
// A record is JSON under "hosts/<stage>/<host>". A host publishes it when it has changed
// noticeably, at most once a second, and again when the registry has lost it. PublishHost
// removes it in the end. A killed host leaves its record: Hosts shows it as not alive
// for 15 seconds, and Sweep removes it after 30 seconds.
//
// # Keys and limits
//
// A key is a path of segments; a segment is any text of 1 to MaxSegment bytes. KeyOf
// writes letters, digits, '-' and '_' of segments as they are, and every other byte as
// "=" and two hexadecimal digits, so that every store takes them. Every store takes
// values of MaxValue bytes and keys of MaxKey.
package discovery
