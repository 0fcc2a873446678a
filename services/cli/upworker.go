package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"unicode"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost"
)

// runWorker runs a mesh of one worker until the context ends.
func runWorker(ctx context.Context, flags upFlags, path string, out, errOut io.Writer) error {
	log, err := flags.process.Apply(errOut)
	if err != nil {
		return err
	}
	if isTerminal(errOut) && flags.process.Format == "text" {
		log = slog.New(newTerminalHandler(errOut, log.Handler()))
	}
	file, err := workerFile(path, flags, true)
	if err != nil {
		return err
	}
	ctx, end := context.WithCancel(ctx)
	saved, last := make(chan struct{}, 1), program.VersionOf(path)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer end()
	watching.Go(func() { program.Watch(ctx, path, last, saved) })
	w := watched{path: path, file: file, log: log, out: out, saved: saved}
	return w.run(ctx)
}

// watched is a mesh of one worker that starts again when it is saved.
type watched struct {
	path  string
	file  *meshfile.File
	log   *slog.Logger
	out   io.Writer
	saved <-chan struct{}
}

// errAnew ends a mesh that starts again.
var errAnew = errors.New("the worker's inputs, outputs or concurrency have changed")

func (w *watched) run(ctx context.Context) error {
	// A mesh that starts anew has the same ports.
	ctx, closePorts := transport.KeepListeners(ctx)
	defer closePorts()
	for {
		err := w.once(ctx)
		switch {
		case ctx.Err() != nil:
			return err
		case errors.Is(err, errAnew):
			w.log.Info("starting the mesh anew", "why", err)
			continue
		}
		if _, ok := errors.AsType[*worker.StartError](err); !ok {
			return err
		}
		w.logFailedStart(err)
		select {
		case <-w.saved:
		case <-ctx.Done():
			return nil
		}
	}
}

// logFailedStart logs why the worker does not start. What it wrote was logged before.
func (w *watched) logFailedStart(err error) {
	cause, _, _ := strings.Cut(err.Error(), "; it wrote last:")
	w.log.Error("the worker does not start; save its file when it is mended", "file", w.path, "error", cause)
}

// once runs the mesh until the context ends, or it has to start anew.
func (w *watched) once(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	var restarting sync.WaitGroup
	defer restarting.Wait()
	defer end(nil)
	p := stagemesh.Program{File: w.file, FileSettings: stagemesh.FileSettings{Logger: w.log}, Ready: func(m *stagemesh.Mesh, ops net.Addr) error {
		restarting.Go(func() { w.restartOnSave(ctx, end, m) })
		name, called := nameOf(w.path), nameOf(w.path)
		for _, id := range slices.Sorted(maps.Keys(w.file.Models)) {
			called = "model:" + url.PathEscape(id)
		}
		return printWorker(w.out, m, name, called, docs(w.file, m), ops)
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
		w.logFailedStart(err)
	}
}

// printWorker prints that the worker is ready, its addresses, and how to call it.
func printWorker(out io.Writer, m *stagemesh.Mesh, name, called, docs string, ops net.Addr) error {
	text := fmt.Sprintf("%s is ready: %s/v1/pipelines/%s:infer (%soperations: http://%s); stop with Ctrl-C\n", name, m.URL(), called, docs, ops)
	if line, ok := curl(m.Stages()[0].Spec, m.URL(), called); ok {
		text += line + "\n"
	}
	_, err := io.WriteString(out, text)
	return err
}

// workerFile returns the file that describes a mesh of one stage that runs one worker. One whose start
// fails is started again, unless holdFailed is true.
func workerFile(path string, flags upFlags, holdFailed bool) (*meshfile.File, error) {
	command, err := workerCommand(path)
	if err != nil {
		return nil, err
	}
	if flags.workers < 1 {
		return nil, fmt.Errorf("--workers: %d is not at least 1", flags.workers)
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal([]byte(flags.options), &object); err != nil || object == nil {
		return nil, errors.New("--options: must be a JSON object")
	}
	name := nameOf(path)
	worker := map[string]any{"command": command, "workers": flags.workers, "options": json.RawMessage(flags.options), "hold_failed_starts": holdFailed}
	stage := map[string]any{"runner": map[string]any{"worker": worker}, "expose_errors": stagehost.ExposeMessage}
	registered := map[string]any{}
	for _, text := range flags.models {
		id, source, _ := strings.Cut(text, "=")
		registered[id], stage["models"] = map[string]any{"stage": name, "source": source}, map[string]any{}
	}
	// JSON is YAML, too.
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	err = encoder.Encode(map[string]any{
		"mesh":      name,
		"stages":    map[string]any{name: stage},
		"models":    registered,
		"pipelines": map[string]any{name: map[string]any{"steps": []any{map[string]any{"name": name, "stage": name}}}},
	})
	if err != nil {
		return nil, err
	}
	file, err := meshfile.Parse(path, text.Bytes(), ".", runners.All()...)
	if err == nil {
		flags.exposure.Override(file)
	}
	return file, err
}

// isMeshFile reports whether a file describes a mesh, by its name.
func isMeshFile(path string) bool {
	return slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(path))
}

// workerCommand returns the command that runs a worker: the Python SDK for a Python file,
// else the program itself.
func workerCommand(file string) ([]string, error) {
	path, err := filepath.Abs(file)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w; give the file of a worker", err)
	case info.IsDir():
		return nil, fmt.Errorf("%s is a folder; give the file of a worker", file)
	case filepath.Ext(path) == ".py":
		return []string{"python3", "-m", "stagemesh", path}, nil
	case isMeshFile(path):
		return nil, fmt.Errorf("%s is not a worker; run the mesh of a file with: stagemesh up -c %s", file, file)
	case info.Mode()&0o111 == 0:
		return nil, fmt.Errorf("%s is neither a Python file nor a program; chmod +x makes it one, and -c %s runs a mesh file", file, file)
	}
	return []string{path}, nil
}

// longestName is the most that a name may have.
const longestName = 63

// nameOf makes a stage's name of a file's.
func nameOf(path string) string {
	base := strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))
	name := strings.Map(func(r rune) rune {
		switch r = unicode.ToLower(r); {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		default:
			return '-'
		}
	}, base)
	name = strings.Trim(name[:min(len(name), longestName)], "-")
	if name == "" {
		return "worker"
	}
	return name
}
