package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/mesh/config"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker"
)

// check rejects arguments and flags that do not fit together.
func (f *upFlags) check(cmd *cobra.Command, args []string) error {
	given := func(flag string) bool { return cmd.Flags().Changed(flag) }
	switch {
	case len(args) > 1:
		return misused(cmd, errors.New("give one WORKER; a mesh of several stages is described by a file, --config"))
	case len(args) == 1 && (given("config") || given("stages")):
		return misused(cmd, errors.New("give either a WORKER or --config"))
	case len(args) == 0 && (given("workers") || given("options")):
		return misused(cmd, errors.New("--workers and --options are for a WORKER; a file has them below stages.<name>.runner.worker"))
	}
	if err := f.checkAddresses(); err != nil {
		return misused(cmd, err)
	}
	return nil
}

// checkAddresses rejects a bad address, which may be the environment's.
func (f *upFlags) checkAddresses() error {
	for _, addr := range []struct{ flag, value string }{{"listen", f.listen}, {"ops", f.ops}, {"admin", f.admin}} {
		if err := config.Address("--"+addr.flag, addr.value); err != nil {
			return err
		}
	}
	return nil
}

// override puts the addresses of the flags into the file.
func (f *upFlags) override(file *meshfile.File) {
	for _, addr := range []struct {
		into *string
		from string
	}{{&file.Gateway.Listen, f.listen}, {&file.Ops.Listen, f.ops}, {&file.Gateway.Admin.Listen, f.admin}} {
		if addr.from != "" {
			*addr.into = addr.from
		}
	}
}

// runWorker runs a mesh of one worker until the context ends.
func runWorker(ctx context.Context, flags upFlags, path string, out, errOut io.Writer) error {
	log, err := flags.log.Logger(errOut)
	if err != nil {
		return err
	}
	file, err := single{path: path, workers: flags.workers, options: flags.options}.file()
	if err != nil {
		return err
	}
	flags.override(file)
	saved, err := watchSaves(path, log)
	if err != nil {
		return fmt.Errorf("watching %s: %w", path, err)
	}
	ctx, end := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer end()
	watching.Go(func() { saved.run(ctx) })
	w := watched{path: path, file: file, log: log, out: out, saved: saved.C}
	return w.run(ctx)
}

// watched is a mesh of one worker that starts again when it is saved.
type watched struct {
	path  string
	file  *meshfile.File
	log   *slog.Logger
	out   io.Writer
	saved <-chan struct{}
	// served is true once it was ready.
	served bool
}

// errAnew ends a mesh that starts again.
var errAnew = errors.New("the worker's inputs, outputs or concurrency have changed")

func (w *watched) run(ctx context.Context) error {
	for {
		err := w.once(ctx)
		switch {
		case ctx.Err() != nil:
			return err
		case errors.Is(err, errAnew):
			w.log.Info("starting the mesh anew", "why", err)
			continue
		case !w.served && len(w.saved) == 0:
			return err
		}
		// The worker ran before, so wait for the next save.
		w.log.Error("the worker that was saved does not start; save it again when it is mended", "error", err)
		select {
		case <-w.saved:
		case <-ctx.Done():
			return nil
		}
	}
}

// once runs the mesh until the context ends, or it has to start anew.
func (w *watched) once(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	var restarting sync.WaitGroup
	defer restarting.Wait()
	defer end(nil)
	p := stagemesh.Program{File: w.file, Logger: w.log, Ready: func(m *stagemesh.Mesh, ops net.Addr) error {
		w.served = true
		// The addresses are kept where the mesh starts anew.
		w.file.Gateway.Listen, w.file.Gateway.Admin.Listen, w.file.Ops.Listen = m.Addr().String(), m.AdminAddr().String(), ops.String()
		restarting.Go(func() { w.restartOnSave(ctx, end, m) })
		return printWorker(w.out, m, nameOf(w.path), docs(w.file, m), ops)
	}}
	err := p.Run(ctx)
	if cause := context.Cause(ctx); errors.Is(cause, errAnew) {
		return errors.Join(cause, err)
	}
	return err
}

// restartOnSave restarts the worker each time that it is saved. A save ends the
// restart before, which may hang with what was saved then.
func (w *watched) restartOnSave(ctx context.Context, end context.CancelCauseFunc, m *stagemesh.Mesh) {
	var restart sync.WaitGroup
	defer restart.Wait()
	giveUp := func() {}
	for {
		select {
		case <-w.saved:
		case <-ctx.Done():
			giveUp()
			return
		}
		giveUp()
		restart.Wait()
		var one context.Context
		one, giveUp = context.WithCancel(ctx)
		restart.Go(func() { w.restart(one, end, m) })
	}
}

func (w *watched) restart(ctx context.Context, end context.CancelCauseFunc, m *stagemesh.Mesh) {
	w.log.Info("the worker was saved; starting it again", "file", w.path)
	switch err := m.Restart(ctx); {
	case err == nil || ctx.Err() != nil:
	case errors.Is(err, worker.ErrSpecChanged), errors.Is(err, worker.ErrStreamsChanged):
		end(errAnew)
	default:
		w.log.Error("the worker that was saved does not start; save it again when it is mended", "error", err)
	}
}

// printWorker prints that the worker is ready, its addresses, and how to call it.
func printWorker(out io.Writer, m *stagemesh.Mesh, name, docs string, ops net.Addr) error {
	text := fmt.Sprintf("%s is ready: %s/v1/pipelines/%s:infer (%soperations: http://%s); stop with Ctrl-C\n", name, m.URL(), name, docs, ops)
	if line, ok := curl(m.Stages()[0].Spec, m.URL(), name); ok {
		text += line + "\n"
	}
	_, err := io.WriteString(out, text)
	return err
}
