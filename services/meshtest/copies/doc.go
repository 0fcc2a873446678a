// Package copies measures what a gateway allocates for the bytes of a request, from the
// socket to the broker and back:
//
//	func TestMain(m *testing.M) {
//		if copies.IsProgram() {
//			os.Exit(copies.Main()) // this process is a gateway
//		}
//		goleak.VerifyTestMain(m)
//	}
//
//	g := copies.Start(t)
//	bytes := g.Allocated(t, 100, func() { ... }) // for each of a hundred requests
//
// The gateway is a process of its own, so that nothing of its callers, of the broker or
// of hosts is counted. It counts itself: all that it has allocated so far is a metric of
// every process, and so is its allocation profile a page of its operations port.
package copies
