// Package fleet is a mesh of real processes under test: a broker, hosts and
// gateways that are killed, paused, stopped and started again while requests
// flow, and a client that knows each request's answer.
//
//	func TestMain(m *testing.M) {
//		if fleet.IsMember() {
//			os.Exit(fleet.Main()) // this process is a member of a fleet
//		}
//		goleak.VerifyTestMain(m)
//	}
//
//	f := fleet.New(t)
//	host := f.Host(fleet.HostSpec{Stage: "echo"})
//	f.Gateway(fleet.GatewaySpec{Pipelines: ...})
//	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: 20_000, InFlight: 64})
//	host.Kill()
//	tally := load.Wait()
//
// The members are the test's own program, started again with a role. Each says
// by a line on its standard output that it is ready and where it listens, and
// ends with its parent. What a host's runner runs is on record in a file of its
// own, which a SIGKILL does not take back; Count reads the members' metrics, and
// Queue and Results look at the broker's streams past the mesh.
//
// A test runs alone where what it measures is a time below a second, and beside
// others where it is longer.
package fleet
