// Package consultest runs real Consul agents, each a process, that are killed,
// paused, wiped and started again under test.
//
//	agent := consultest.Start(t)
//	r, err := consul.New(consul.Settings{Mesh: "test", Address: agent.Addr()})
//	agent.Kill()
//	err = agent.Start()          // on the same ports, with what it had
//
// An agent is a server, alone or one of a Cluster. The program is the one that
// `make consul` builds and names; without it every agent fails to start. A verb is
// called by one goroutine at a time.
package consultest
