// Package discovery says who is alive, and keeps a small table that all parts of a
// mesh agree on. Consul does it in production (discovery/consul), a broker that is
// there anyway does it for one binary and for tests (discovery/natskv). Both keep
// the promises below, which discovery/discoverytest holds them to.
//
//	err := registry.Announce(ctx, discovery.Instance{Service: "digits-classify", ID: host, Address: addr}, state)
//	err := registry.Watch(ctx, "digits-classify", observer)           // who is healthy
//	entry, err := table.Get(ctx, discovery.KeyOf("pipelines", "digits"))
//	revision, err := table.Commit(ctx, discovery.Put(key, value, entry.Revision))
//	err := table.Observe(ctx, discovery.KeyOf("pipelines"), observer) // all of it, then changes
//
// Functions that take an observer, and Announce, block until their context ends:
// their callers own the goroutines. They reconnect by themselves, for ever, and end
// early only for what no waiting mends: bad arguments, and credentials that are
// refused. All methods are safe for concurrent use.
//
// # Instances
//
// An instance is registered from when Announce has said so until its context ends,
// and is healthy while it answers: where it has an address, that is asked for
// grpc.health.v1 about every second, by the store, or by Announce where the store
// cannot; without an address it is there as long as its process says so. A process
// that is killed, or does not serve, is out of every watcher's sight within MaxGone,
// one whose Announce has returned within a second. An instance that the store has
// lost, because it was wiped or started anew without its files, is registered again
// within MaxRepair.
//
// A watcher sees full snapshots of the healthy instances of one service, sorted by
// ID. It sees the first as soon as it has one, also an empty one, and another one
// after each change, of which several may come as one. Snapshots never go back in
// time while the store lives; after a wipe they begin anew.
//
// # The table
//
// Reads are of committed values, and may be as old as the store takes to tell all
// of its servers; a writer reads its own writes. Every entry has the revision of its
// last change. A commit is of up to MaxOperations changes, all of them made or none,
// and each says which revision it expects: 0 that the key is not there. One that
// finds another is ErrConflict. So of any number of writers that read and commit,
// none overwrites what it has not seen. The revision of a commit is that of its last
// change; those before it may have smaller ones, which Get and List tell. A List has
// all of a commit or nothing.
//
// An answer to a commit may be lost with its connection. Commit asks again, with the
// nonce that every value is stored with, until it knows or the context ends. What it
// cannot know, as somebody has written since or the context has ended, is
// ErrUnknown: read, and decide. It never says ErrConflict of what it has done.
//
// An observer is told all entries below a key at first (Change.Reset), then changes
// in the order of their revisions, of which several of one key may come as one, and
// those of one commit as several. After a break, or a wipe, it is told all entries
// again. It hears that the store cannot be reached by Lose, and that it can be again
// by the next See, which comes also where nothing has changed.
//
// # Keys, and bounds
//
// A key is a path of segments; a segment is any text of 1 to MaxSegment bytes.
// Segments are written to stores by Escape: letters, digits, '-' and '_' as they are,
// every other byte as "=" and two hexadecimal digits, so that every store takes
// them. MaxValue, MaxOperations and MaxKey are what both stores take.
package discovery
