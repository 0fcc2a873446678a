package worker

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/stagemesh/stagemesh/internal/worker/fork"
)

// startRanks opens the socket and starts the process of each rank. With an error, those before have
// been started.
func (w *worker) startRanks(of *incarnation) error {
	s := w.settings()
	program, err := s.program(w.index)
	if err != nil {
		return fmt.Errorf("command: %w", err)
	}
	env, err := w.environment(of.number)
	if err != nil {
		return err
	}
	cpus, err := s.Replicas[w.index].cpus()
	if err != nil {
		return err
	}
	if err := w.runner.spawner.Restore(); err != nil {
		return err
	}
	w.runner.copying.Lock()
	err = copyFiles(w.runner.files, s.Files)
	w.runner.copying.Unlock()
	if err != nil {
		return fmt.Errorf("files for the workers: %w", err)
	}
	args := append([]string{program}, s.Command[1:]...)
	if s.Script != "" {
		args = append(args, filepath.Join(w.runner.files, s.Script))
	}
	for i := range w.ranks {
		r := &rank{of: of, index: i, readDone: make(chan struct{}), log: w.log.With("rank", i, "incarnation", of.number)}
		if r.listener, err = w.runner.spawner.Listen(fmt.Sprintf("%d-%d-%d", w.index, i, of.number)); err != nil {
			return err
		}
		of.ranks = append(of.ranks, r)
		env["RANK"], env["LOCAL_RANK"] = strconv.Itoa(i), strconv.Itoa(i)
		if r.process, err = w.runner.spawner.Start(fork.Command{
			Args: args, Dir: s.Dir, Env: pairs(env), Socket: r.listener.Addr().String(), CPUs: cpus, Log: r.log,
		}); err != nil {
			return fmt.Errorf("command: %w", errors.Join(err, r.listener.Close()))
		}
	}
	return nil
}

// environment returns the environment that all ranks of an incarnation share.
func (w *worker) environment(number uint64) (map[string]string, error) {
	s := w.settings()
	env := s.environment(w.index)
	if s.Files != nil {
		env[s.FilesPath] = strings.TrimPrefix(env[s.FilesPath]+string(filepath.ListSeparator)+w.runner.files, string(filepath.ListSeparator))
	}
	env["STAGEMESH_STAGE"] = s.Stage
	env["STAGEMESH_WORKER"] = strconv.Itoa(w.index)
	env["STAGEMESH_INCARNATION"] = strconv.FormatUint(number, 10)
	env["WORLD_SIZE"] = strconv.Itoa(w.ranks)
	if w.ranks == 1 {
		return env, nil
	}
	port, err := freePort()
	if err != nil {
		return nil, fmt.Errorf("a port for the gang: %w", err)
	}
	env["MASTER_ADDR"], env["MASTER_PORT"] = "127.0.0.1", port
	return env, nil
}

// environment returns the environment of a replica's processes without the variables of
// the protocol. It leaves out the host's own variables, which may have a password.
func (s Settings) environment(replica int) map[string]string {
	out := map[string]string{}
	for _, pair := range os.Environ() {
		if name, value, ok := strings.Cut(pair, "="); ok && name != "" && !strings.HasPrefix(name, reservedPrefix) {
			out[name] = value
		}
	}
	delete(out, "MASTER_ADDR")
	delete(out, "MASTER_PORT")
	maps.Copy(out, s.Env)
	r := s.Replicas[replica]
	if len(r.Devices) > 0 {
		out[s.DeviceEnv] = strings.Join(r.Devices, ",")
	}
	maps.Copy(out, r.Env)
	return out
}

// freePort returns a port that is free now. If another process takes it before the
// gang does, the gang fails and gets another one at its next start.
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

// program returns the path of the command's program for a replica.
func (s Settings) program(replica int) (string, error) {
	name := s.Command[0]
	if strings.Contains(name, "/") {
		path := name
		if !filepath.IsAbs(path) {
			path = filepath.Join(s.Dir, path)
		}
		path, err := filepath.Abs(path)
		if err != nil {
			return "", err
		}
		return path, checkExecutable(path)
	}
	list := s.environment(replica)["PATH"]
	for _, dir := range filepath.SplitList(list) {
		if path := filepath.Join(dir, name); filepath.IsAbs(path) && checkExecutable(path) == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("there is no program %q in PATH, which is %q", name, list)
}

func checkExecutable(path string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return fmt.Errorf("there is no program %s", path)
	case info.IsDir() || info.Mode().Perm()&0o111 == 0:
		return fmt.Errorf("%s is not executable", path)
	default:
		return nil
	}
}

// copyFiles copies the files that a folder lacks. It runs before every start, because
// some systems remove old temporary files.
func copyFiles(folder string, files fs.FS) error {
	if files == nil {
		return nil
	}
	return fs.WalkDir(files, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		to := filepath.Join(folder, filepath.FromSlash(path))
		if _, err := os.Stat(to); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		data, err := fs.ReadFile(files, path)
		if err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
			return err
		}
		if err := os.WriteFile(to, data, 0o600); err != nil {
			return errors.Join(err, os.Remove(to)) // the next start takes what is there for whole
		}
		return nil
	})
}
