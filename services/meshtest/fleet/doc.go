// Package fleet is a mesh of real processes under test: a broker, hosts, gateways and
// a registry that are killed, paused, stopped and started again while requests flow,
// and a client that knows each request's answer.
//
//	func TestMain(m *testing.M) {
//		if fleet.IsMember() {
//			os.Exit(fleet.Main()) // this process is a member of a fleet
//		}
//		goleak.VerifyTestMain(m)
//	}
//
//	agent := testbed.StartConsul(t)
//	f := fleet.New(t, fleet.Registry{Consul: []string{agent.Addr()}})
//	host := f.Host(fleet.HostSpec{Stage: "echo"})
//	g := f.Gateway(fleet.GatewaySpec{Pipelines: ...})
//	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: 20_000, InFlight: 64})
//	host.Kill()
//	tally := load.Wait()
//	g.View()                  // which hosts are alive, by the registry
//
// The members are the test's own program, started again with a role. Each says
// by a line on its standard output that it is there, and by another that it is ready
// and where it listens, and ends with its parent. Host and Gateway wait for the
// second, LaunchHost and LaunchGateway for nothing. What a host's runner runs is on
// record in a file of its own, which a SIGKILL does not take back; Count reads the
// members' metrics, and Queue and Results look at the broker's streams past the mesh.
//
// The registry is a real Consul agent, or several: internal/testbed runs
// them, and has the verbs for them. Every fleet's mesh has a name of its own, so one
// agent is enough for all tests that do not harm it, and without it every test fails.
// A fleet without an agent has its registry in its broker.
//
// A test runs alone where what it measures is a time of a second or less, and beside
// others where it is longer.
package fleet
