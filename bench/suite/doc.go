// Package suite is the standard suite of benchmarks: its loads and meshes, its results,
// its goals, and the page that shows them.
//
//	results, err := suite.Run(ctx, suite.Settings{
//		Program: "bin/bench", Folder: "bench", Items: suite.Items(suite.Full()), Log: os.Stderr,
//	})
//	err = results.Write("bench/results.json")
//	page, err := suite.Page(results)
//
// An item is a question. Its rounds are command lines of `bench run` on mesh files of one
// folder. The suite runs them as child processes and reads their reports, so anybody can
// repeat a figure of the page with the command beside it.
//
// # Alternation
//
// The commands of a round alternate, in reverse order every second time, so that a
// disturbance of the machine affects all that are compared. Figures are medians of the
// repetitions, with the least and the greatest.
//
// # Results
//
// Results contain what the page needs and no more: no curve, no path, and no name of a
// machine or a user. The page is computed from them, so the two cannot disagree; a test
// checks the committed ones.
//
// # Failure
//
// Each child has a limit on its time and on its output. The error of a failed child has
// its command line and its standard error, and the suite drops the child's item. All
// functions but Run, Short and the command are pure. Tests run scripts instead of the
// program.
package suite
