// Package roster is who is in a mesh: what every host says of itself, and whether it
// is alive.
//
// A host has its instance announced, and its record published:
//
//	instance := roster.Instance(record)
//	err := registry.Announce(ctx, instance, state)
//	err := roster.Publish(ctx, table, roster.Settings{Current: host.Record, Changed: host.Changed})
//
// Everybody else has a view:
//
//	view := roster.NewView(registry, table, "digits")
//	err := view.Run(ctx)           // on a goroutine
//	for _, host := range view.Hosts() { host.Record.GetStage(); host.Alive }
//
// A record is JSON in the table, under "hosts/<stage>/<host>". It is published when
// something of it has changed that matters (Differs), at most once an Interval, and
// again where the registry has lost it. Publish removes it in the end; that of a host
// that was killed stays, and its host is not alive. A view leaves such hosts out
// after Forget, and removes their records after Keep if it is told to Sweep.
package roster
