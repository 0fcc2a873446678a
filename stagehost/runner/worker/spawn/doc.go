// Package spawn starts the processes of workers so that none outlives its host,
// and says at once when one has ended.
//
//	s, err := spawn.Open(spawn.Settings{})
//	defer s.Close(ctx)
//	socket, err := s.Listen("0-0-1")            // in a folder of this host alone
//	p, err := s.Start(spawn.Command{Args: args, Env: env, Log: log})
//	<-p.Done()                                  // p.Exit says how
//
// A process is the leader of a process group of its own. Kill ends the group, so
// what a worker has started ends with it, and so does the end of the process
// itself. What has left the group (setsid) is beyond reach.
//
// It inherits the read end of a pipe to which nothing is written, its lifeline,
// whose number is in the variable STAGEMESH_LIFELINE: its end of file means that
// the host is gone, however that came. On Linux the kernel kills the process too
// (PR_SET_PDEATHSIG), which works for one that is stuck or stopped, or does not
// know about lifelines. That signal follows the end of the thread that forked, not
// of the process, so a Spawner forks on one thread that lives as long as itself.
// The same thread takes on the CPU set of a process before it forks, so that the
// process never runs elsewhere. On other systems there is only the lifeline, and
// CPU sets are refused.
//
// What a process writes goes to a log, line by line. It is read as fast as it
// comes, and at most maxLine bytes of a line are kept.
//
// A folder whose host was killed is removed by the next that is opened beside it.
//
// A Spawner and a Process are safe for concurrent use.
package spawn
