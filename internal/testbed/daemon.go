package testbed

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// daemon is a server of others in a process of its own, whose log is a file in its folder.
// Tests kill it and start it again.
type daemon struct {
	name, folder string
	process      *exec.Cmd
	ended        chan struct{}
	log          *os.File
}

// launch starts the program, which the target of the Makefile with its name builds.
func (d *daemon) launch(args ...string) error {
	paths, err := Tools(d.name)
	if err != nil {
		return err
	}
	if d.log, err = os.OpenFile(filepath.Join(d.folder, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
		return err
	}
	// Others have it on a machine of its own: it comes first here too, where this process may say so.
	d.process = exec.Command("nice", append([]string{"-n", "-10", paths[0]}, args...)...)
	d.process.Stdout, d.process.Stderr = d.log, d.log
	if err := d.process.Start(); err != nil {
		return errors.Join(err, d.log.Close())
	}
	d.ended = make(chan struct{})
	go func() {
		defer close(d.ended)
		_ = d.process.Wait() // it is killed
	}()
	return nil
}

// awaitUntil waits until the server is ready, for that long at most.
func (d *daemon) awaitUntil(isReady func() bool, most time.Duration) error {
	late := time.After(most)
	for pause := 10 * time.Millisecond; !isReady(); pause = min(2*pause, 200*time.Millisecond) {
		select {
		case <-time.After(pause):
		case <-d.ended:
			return fmt.Errorf("%s ended:\n%s", d.name, d.readLog())
		case <-late:
			return fmt.Errorf("%s does not start", d.name)
		}
	}
	return nil
}

func (d *daemon) readLog() []byte {
	text, err := os.ReadFile(filepath.Join(d.folder, "log"))
	if err != nil {
		return []byte(err.Error())
	}
	return text
}

// Kill ends the server as a crash does, if it runs.
func (d *daemon) Kill() {
	if d.process == nil {
		return
	}
	_ = d.process.Process.Kill() // it may have ended
	<-d.ended
	_ = d.log.Close() // the server has written it
	d.process = nil
}

// Pause stops a running server by SIGSTOP: it accepts connections and does not answer.
func (d *daemon) Pause() error { return d.process.Process.Signal(syscall.SIGSTOP) }
