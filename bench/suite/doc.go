// Package suite is the standard suite of benchmarks: what is asked, of which meshes,
// what it came to, and the page that tells it.
//
//	results, err := suite.Run(ctx, suite.Settings{
//		Program: "bin/stagemesh", Folder: "bench", Items: suite.Items(suite.Full()), Log: os.Stderr,
//	})
//	err = results.Write("bench/results.json")
//	page, err := suite.Page(results)
//
// An item is a question. It has rounds of command lines of `stagemesh bench`, on mesh
// files of one folder, and the suite runs them as anybody could: as child processes whose
// report it reads. So each figure of the page can be had again by the command beside it.
//
// # In turns
//
// The commands of a round are run one after the other, again and again, and every second
// time in reverse, so that what disturbs a machine for a while disturbs all that are
// compared. What is told is the median of the repetitions, and the least and greatest of
// them.
//
// # Results
//
// Results are what the page needs and no more: no curve, no path, no name of a machine or
// of a user. What the page says is computed from them when it is rendered, so a page and
// its results cannot disagree: a test holds the committed ones.
//
// # Failure
//
// Each child has a bound on its time, and one on what it may print. Where one fails the
// error has its command line and what it said, and nothing of its item is kept. All but
// Run, Short and the command are pure functions. Tests run scripts in the place of the
// program.
package suite
