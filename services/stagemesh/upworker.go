package stagemesh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/services/local"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker"
)

// check says what does not fit of arguments and flags.
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
	for _, addr := range []struct{ flag, value string }{{"listen", f.listen}, {"ops", f.ops}, {"admin", f.admin}} {
		if addr.value == "" {
			continue
		}
		if err := meshfile.ValidAddress(addr.value); err != nil {
			return misused(cmd, fmt.Errorf("--%s: %w", addr.flag, err))
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
	for {
		w := watched{path: path, log: log}
		if err := w.run(ctx, file, out); err != nil || !w.anew || ctx.Err() != nil {
			return err
		}
		log.Info("the worker's inputs or outputs have changed; starting the mesh anew")
	}
}

// watched is a mesh of one worker that starts again when it is saved.
type watched struct {
	path string
	log  *slog.Logger
	// anew says that the mesh ended to start once more.
	anew bool
}

func (w *watched) run(ctx context.Context, file *meshfile.File, out io.Writer) error {
	ctx, end := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer end()
	return Up(ctx, Run{File: file, Logger: w.log, Ready: func(m *local.Mesh, ops net.Addr) error {
		// The addresses are kept where the mesh starts anew.
		file.Gateway.Listen, file.Gateway.Admin.Listen, file.Ops.Listen = m.Addr().String(), m.AdminAddr().String(), ops.String()
		watching.Go(func() { w.restartOnSave(ctx, end, m) })
		return sayWorker(out, m, nameOf(w.path), ops)
	}})
}

func (w *watched) restartOnSave(ctx context.Context, end func(), m *local.Mesh) {
	err := onSave(ctx, w.path, w.log, func(ctx context.Context) {
		w.log.Info("the worker was saved; starting it again", "file", w.path)
		switch err := m.Restart(ctx); {
		case err == nil || ctx.Err() != nil:
		case errors.Is(err, worker.ErrSpecChanged):
			w.anew = true
			end()
		default:
			w.log.Error("the worker that was saved does not start; save it again when it is mended", "error", err)
		}
	})
	if err != nil {
		w.log.Warn("the worker is not started again when it is saved", "error", err)
	}
}

// sayWorker says that the worker is served, where, and how to call it.
func sayWorker(out io.Writer, m *local.Mesh, name string, ops net.Addr) error {
	text := fmt.Sprintf("%s is ready: http://%s/v1/pipelines/%s:infer (operations: http://%s); stop with Ctrl-C\n", name, m.Addr(), name, ops)
	if line, ok := curl(m.Stages()[0].Spec, m.Addr(), name); ok {
		text += line + "\n"
	}
	_, err := io.WriteString(out, text)
	return err
}
