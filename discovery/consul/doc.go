// Package consul implements package discovery on Consul.
//
//	registry, err := consul.New(consul.Settings{Mesh: "digits", Address: "127.0.0.1:8500"})
//	...                       // a discovery.Registry
//	registry.Close()
//
// # In Consul
//
// An instance is a service of the local agent, with the service's name, the ID
// "<service>:<id>", and one check: gRPC for its ID if the instance has an address, which
// the agent has to reach, else a TTL. Consul removes an instance whose check fails for
// a minute. The table is below "stagemesh/<mesh>/" in the key-value store; an
// entry's flags are the nonce of its write.
//
// With ACLs a token needs service:write on the names of the services that it
// announces, service:read and node:read on those that it watches, and key:write, or
// key:read, on "stagemesh/<mesh>/".
//
// # Watching
//
// Watches are blocking queries, as Consul's documentation recommends: an index that goes
// back starts over, queries end after WaitTime and a random addition, and a query that
// takes longer has lost its agent. After each failure the observer is notified, and
// everything is read again, with growing delays of up to two seconds. The first read is
// consistent: a server that begins to lead, or to run, answers other reads before it has
// applied everything that was committed. Settings.Stale turns that off.
//
// # Errors
//
// Answers of Consul without a leader, and missing answers, are
// discovery.ErrUnavailable. A rejected token, and one whose policy hides a part of an answer,
// are discovery.ErrDenied, which ends watches. Tokens are in no error and in no log.
package consul
