// Package mirror keeps what a registry said last, so that reading it costs nothing
// and goes on while the registry is away.
//
//	pipelines := mirror.NewTable(registry, discovery.KeyOf("pipelines"))
//	hosts := mirror.NewService(registry, "digits-classify")
//	...                                    // Run both, each on a goroutine
//	err := pipelines.Loaded(ctx)           // the registry has been heard of
//	entry, ok := pipelines.Get(key)
//	for { ...hosts.Instances()...; <-hosts.Changed() }
//
// A mirror is empty until Loaded. From then on it has what was true at some moment,
// later ones after earlier ones, and Stale says since when it may be out of date.
//
// What comes after a break replaces all at once: nobody sees a mirror that is half
// filled. A registry that was wiped is one that has nothing.
//
// All methods are safe for concurrent use; Run is called once.
package mirror
