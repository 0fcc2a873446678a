// Package workers is a mesh under test whose stage is run by real processes: the
// workers of testdata, in Python with the standard library alone.
//
//	func TestMain(m *testing.M) {
//		if workers.IsProgram() {
//			os.Exit(workers.Main()) // this process is `stagemesh up`
//		}
//		goleak.VerifyTestMain(m)
//	}
//
//	bed := workers.New(t, workers.Spec{File: "obedient.py", Workers: 2})
//	bed.Ask("die").Fails(t, fault.RunnerCrashed, "")
//	bed.AwaitEntry("run", "die") // what a worker has put on record
//
//	p := workers.Up(t, "obedient.py", nil, "--workers", "2")
//	p.Kill()
//	workers.Gone(t, p.PIDs(), 2*time.Second)
//
// A bed has broker, host and gateway in the test's process; Up has them in one of
// their own. The workers' record is a file that a SIGKILL does not take back, and
// by files, too, a test tells them what to do.
//
// # What others get wrong
//
// The failures of MOSEC and mpservice, and the tests that hold this mesh to better:
//
//	a bad item fails its batch           TestRaisingPoisonFailsAlone, TestCrashingPoisonFailsAlone,
//	                                     TestFaultsReachTheRightCaller
//	so does a batch that is too large    TestOutOfMemoryHalvesTheBatchAndBlamesNobody,
//	                                     TestTooLargeItemIsOutOfMemory
//	a killed worker costs its callers    TestKilledWorkersCostNoAnswer
//	their answers, and with one worker   TestCallersWaitForTheOnlyWorker
//	the server ends
//	a dead, or silent, worker blocks     TestFrozenWorkerBlocksNoOther,
//	the others                           TestWorkerSilentInFrameBlocksNoOther
//	a hung one is never noticed          TestBatchOfFrozenWorkerIsAnswered,
//	                                     TestFrozenIdleWorkerIsReplaced
//	a lone request waits for company     TestIdleWorkerGetsLoneRequestAtOnce
//	the wait begins when a worker idles  TestWindowBeginsWithArrival
//	requests run whose callers are gone  TestCancelledRequestsNeverReachTheWorker,
//	                                     TestCancelReachesRunningItem
//	a full queue answers nonsense        TestFullQueueRejectsAtOnce
//	a large result crashes the server    TestLargeResultsLeaveNothingBehind,
//	                                     TestTooLargeResultIsRefused
//	so does a wrong one, or garbage      TestMisbehavingWorkerFailsItsCallers
//	workers outlive their parent         TestNoWorkerOutlivesTheProgram
//	a stop loses what is in hand         TestTerminatedProgramAnswersAndLeavesNothing
//	a second signal skips the clean-up   TestSecondSignalEndsProgramAtOnce
//	a crash loop looks like a service    TestCrashLoopIsReportedAndRecovers
package workers
