// Package consul keeps the promises of package discovery by Consul.
//
//	registry, err := consul.New(consul.Settings{Mesh: "digits", Address: "127.0.0.1:8500"})
//	...                       // a discovery.Registry and a discovery.Table
//	registry.Close()
//
// # What it makes
//
// An instance is a service of the local agent, with the service's name, the ID
// "<service>:<id>", and one check: gRPC where the instance has an address, which the
// agent has to reach, else a TTL. What does not pass for CriticalAfter is removed by
// Consul itself. The table is below "stagemesh/<mesh>/" in the key-value store, its
// values as they are; the nonce of a write is in an entry's flags.
//
// With ACLs a token needs service:write on the names of the services that it
// announces, service:read and node:read on those that it watches, and key:write, or
// key:read, on "stagemesh/<mesh>/".
//
// # How it watches
//
// By blocking queries, as Consul's documentation wants them: an index that goes back
// begins anew, queries end after WaitTime and a bit at random, and one that takes
// longer than that has lost its agent. After each failure the observer hears of it,
// and everything is read again, later and later, up to every two seconds. Whatever is
// read anew is read consistently: a server that begins to lead, or to run, answers other
// reads before it has made all that was committed. Settings.Stale does without.
//
// # How it fails
//
// Answers of Consul without a leader, and those that do not come, are
// discovery.ErrUnavailable. A refused token is discovery.ErrDenied, and ends what is
// watched. Tokens are in no error and in no log.
package consul
