package worker_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/worker"
)

func TestSourcesStayBelowTheirFolder(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	root := filepath.Join(folder, "models")
	err := os.MkdirAll(filepath.Join(root, "deep"), 0o700)
	for _, path := range []string{"models/a.json", "models/deep/b.json", "secret", "models-of-others"} {
		err = errors.Join(err, os.WriteFile(filepath.Join(folder, path), nil, 0o600))
	}
	err = errors.Join(err, os.Symlink("../secret", filepath.Join(root, "link")), os.Symlink("..", filepath.Join(root, "up")), os.Symlink("deep", filepath.Join(root, "inner")))
	if err != nil {
		t.Fatal(err)
	}
	for source, inside := range map[string]bool{
		"a.json": true, "deep/b.json": true, "deep/../a.json": true, "inner/b.json": true, "deep": true,
		"../secret": false, "deep/../../secret": false, "../models-of-others": false, filepath.Join(root, "a.json"): false,
		"link": false, "up/secret": false, "missing.json": false, "": false,
	} {
		path, err := worker.Below(root, source)
		if _, missing := os.Stat(path); inside && (err != nil || missing != nil) || !inside && !errors.Is(err, worker.ErrInvalidModel) {
			t.Errorf("%q: %q, %v", source, path, err)
		}
	}
	if _, err := worker.Below(filepath.Join(folder, "none"), "a.json"); err == nil || errors.Is(err, worker.ErrInvalidModel) {
		t.Errorf("a root that does not exist: %v", err)
	}
}

// welcomeModels greets a worker that loads models, and waits until it is ready.
func (h *host) welcomeModels() *frame.Ready {
	h.t.Helper()
	h.accept()
	receiveAs[*frame.Hello](h)
	h.send(&frame.Welcome{Protocol: 1, MaxFrame: 1 << 20, Capabilities: []string{frame.Models}, Memory: frame.Memory{Host: 5}}, nil)
	ready, _ := receiveAs[*frame.Ready](h)
	return ready
}

func TestUnloadCancelsLoad(t *testing.T) {
	t.Parallel()
	for name, stop := range map[string]error{"the load stops": errors.New("stopped"), "the load goes on": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := listen(t)
			served := h.serve(t.Context(), worker.Settings{Predict: double, Models: &worker.Models{Load: func(ctx context.Context, _ *worker.Model) error {
				<-ctx.Done()
				return stop
			}}})
			h.welcomeModels()
			h.send(&frame.Load{Load: 1, Model: "a"}, nil)
			h.send(&frame.Unload{Load: frame.Load{Load: 2, Model: "a"}}, nil)
			if stop == nil {
				m, _ := receiveAs[*frame.Loaded](h)
				equal(t, m.Load, uint64(1))
			} else {
				m, _ := receiveAs[*frame.Error](h)
				equal(t, m.Kind, frame.Cancelled)
				equal(t, *m.Load, uint64(1))
			}
			m, _ := receiveAs[*frame.Unloaded](h)
			equal(t, m.Answer().Load, uint64(2))
			h.send(&frame.Predict{Batch: 1, Model: &frame.Model{ID: "a"}, Items: items(1), Parts: []frame.Part{}}, nil)
			gone, _ := receiveAs[*frame.Error](h)
			equal(t, gone.Kind, frame.InvalidModel)
			h.ask(served)
		})
	}
}

func TestWorkerThatLeavesCancelsItsLoads(t *testing.T) {
	t.Parallel()
	h := listen(t)
	served := h.serve(t.Context(), worker.Settings{
		Predict: double,
		Setup: func(_ context.Context, start *worker.Start) error {
			equal(t, start.Memory, worker.Memory{Host: 5})
			return nil
		},
		Models: &worker.Models{
			Limits: worker.ModelLimits{LoadSlots: 3},
			Load: func(ctx context.Context, m *worker.Model) error {
				equal(t, []any{m.ID, m.Type, m.Source, m.Options}, []any{"a", "linear", "a.json", map[string]string{"b": "c"}})
				<-ctx.Done()
				return ctx.Err()
			},
		},
	})
	equal(t, h.welcomeModels().Models, &frame.ModelLimits{LoadSlots: 3})
	h.send(&frame.Load{Load: 1, Model: "a", ModelType: "linear", Source: "a.json", Options: map[string]string{"b": "c"}}, nil)
	h.send(&frame.Size{Load: frame.Load{Load: 2, Model: "a"}}, nil)
	m, _ := receiveAs[*frame.Sized](h)
	equal(t, m.Answer().Size, frame.Memory{})
	h.send(&frame.Stop{Timeout: patience.Milliseconds()}, nil)
	for {
		if m, _, err := frame.Read(h.in, 1<<20); err != nil {
			break
		} else if e, ok := m.(*frame.Error); ok {
			equal(t, e.Kind, frame.Cancelled)
		}
	}
	if err := outcome(t, served); err != nil {
		t.Error(err)
	}
}

// A model that cannot be described to the host is not loaded.
func TestPanicsAndImpossibleModelsFailTheirLoads(t *testing.T) {
	t.Parallel()
	h := listen(t)
	unloaded := make(chan string, 3)
	unload := func(_ context.Context, m *worker.Model) error {
		unloaded <- m.ID
		return nil
	}
	served := h.serve(t.Context(), worker.Settings{Predict: double, Models: &worker.Models{Unload: unload, Load: func(_ context.Context, m *worker.Model) error {
		switch m.ID {
		case "panic":
			panic("no such device")
		case "size":
			m.Size.Host = -1
		case "spec":
			m.Spec = &worker.Spec{Outputs: []worker.PartSpec{{Name: "y", Shape: make([]int64, 99)}}}
		}
		return nil
	}}})
	h.welcomeModels()
	for i, id := range []string{"panic", "size", "spec"} {
		h.send(&frame.Load{Load: uint64(i), Model: id}, nil)
		m, _ := receiveAs[*frame.Error](h)
		equal(t, m.Kind, frame.Exception)
		equal(t, *m.Load, uint64(i))
		equal(t, m.Traceback != "", id == "panic")
		h.send(&frame.Predict{Batch: uint64(i), Model: &frame.Model{ID: id}, Items: items(1), Parts: []frame.Part{}}, nil)
		gone, _ := receiveAs[*frame.Error](h)
		equal(t, gone.Kind, frame.InvalidModel)
	}
	equal(t, []string{<-unloaded, <-unloaded}, []string{"size", "spec"})
	h.ask(served)
}
