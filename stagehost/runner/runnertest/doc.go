// Package runnertest holds runners against the promises of package runner.
// Every implementation runs the same ones:
//
//	func TestRunner(t *testing.T) {
//		runnertest.Test(t, func(t *testing.T, slots int) runner.Runner { ... })
//	}
//
// The runner under test has the Spec of this package: it takes rows of one
// whole number each and gives them back, but for the few that ask for trouble:
// Bad, Crash and Hold. Runners of Go code answer each row by Answer; others do
// the same in their own language. TestStream is the same for runners that answer in
// chunks, with StreamSpec and AnswerStream.
//
// The suite waits for real processes as long as they need, and never sleeps.
package runnertest
