package worker

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/stagehost/runner/worker/spawn"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker/supervise"
)

// spawn starts the processes of an incarnation. Where one cannot be started the
// others are ended.
func (w *worker) spawn(of supervise.Incarnation) []supervise.Action {
	l := &life{worker: w, of: of, flights: map[uint64]*flight{}}
	w.life, w.last, w.exits = l, nil, make([]error, w.replica.Ranks)
	err := w.startRanks(l)
	w.starting.PIDs = l.pids()
	w.tell(*w.starting)
	if err == nil {
		for _, r := range l.ranks {
			w.watch(l, r)
		}
		return nil
	}
	now := time.Now()
	actions := w.machine.Fail(of, err, now)
	for i := range w.replica.Ranks {
		if i < len(l.ranks) && l.ranks[i].process != nil {
			w.watch(l, l.ranks[i])
			continue
		}
		w.exits[i] = err
		actions = append(actions, w.machine.Exited(of, i, err, now)...)
	}
	return actions
}

// watch has a rank that was started listened to, until its process has ended.
func (w *worker) watch(l *life, r *rank) {
	w.tasks.Go(r.serve)
	w.tasks.Go(func() {
		<-r.process.Done()
		r.hearOut()
		w.exited(l, r)
	})
}

func (w *worker) startRanks(l *life) error {
	program, err := w.runner.settings.program(w.index)
	if err != nil {
		return fmt.Errorf("command: %w", err)
	}
	env, err := w.environment(l.of)
	if err != nil {
		return err
	}
	cpus, err := w.replica.cpus()
	if err != nil {
		return err
	}
	if err := lay(w.runner.files, w.runner.settings.Files); err != nil {
		return fmt.Errorf("files for the workers: %w", err)
	}
	for i := range w.replica.Ranks {
		r := &rank{life: l, index: i, heard: make(chan struct{}), log: w.log.With("rank", i, "incarnation", l.of)}
		if r.listener, err = w.runner.spawner.Listen(w.name(l.of, i)); err != nil {
			return err
		}
		l.ranks = append(l.ranks, r)
		env["RANK"], env["LOCAL_RANK"] = strconv.Itoa(i), strconv.Itoa(i)
		env["STAGEMESH_SOCKET"] = r.listener.Addr().String()
		if r.process, err = w.runner.spawner.Start(spawn.Command{
			Args: append([]string{program}, w.runner.settings.Command[1:]...),
			Dir:  w.runner.settings.Dir, Env: pairs(env), CPUs: cpus, Log: r.log,
		}); err != nil {
			return fmt.Errorf("command: %w", errors.Join(err, r.listener.Close()))
		}
	}
	return nil
}

// environment returns what all ranks of an incarnation have in common.
func (w *worker) environment(of supervise.Incarnation) (map[string]string, error) {
	s := w.runner.settings
	env := s.environment(w.index)
	if s.Files != nil {
		env[s.FilesPath] = strings.TrimPrefix(env[s.FilesPath]+string(filepath.ListSeparator)+w.runner.files, string(filepath.ListSeparator))
	}
	env["STAGEMESH_STAGE"] = s.Stage
	env["STAGEMESH_WORKER"] = strconv.Itoa(w.index)
	env["STAGEMESH_INCARNATION"] = strconv.FormatUint(uint64(of), 10)
	env["WORLD_SIZE"] = strconv.Itoa(w.replica.Ranks)
	if w.replica.Ranks == 1 {
		return env, nil
	}
	port, err := freePort()
	if err != nil {
		return nil, fmt.Errorf("a port for the gang: %w", err)
	}
	env["MASTER_ADDR"], env["MASTER_PORT"] = "127.0.0.1", port
	return env, nil
}

// freePort returns a port that is free now. Somebody else may take it before the
// gang does, which then fails, and has another one the next time.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, errors.Join(err, l.Close())
}

func pairs(env map[string]string) []string {
	out := make([]string, 0, len(env))
	for _, name := range slices.Sorted(maps.Keys(env)) {
		out = append(out, name+"="+env[name])
	}
	return out
}

// pids returns the ids of the processes that were started.
func (l *life) pids() []int {
	var out []int
	for _, r := range l.ranks {
		if r.process != nil {
			out = append(out, r.process.PID())
		}
	}
	return out
}
