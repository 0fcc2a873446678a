package bed

import (
	"context"
	"errors"
	"log/slog"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/process"
)

// Settings say which mesh is started, and how.
type Settings struct {
	// File is the path of the mesh's file.
	File string
	// Program is the path of the program for the parts of the mesh; empty means that
	// they are in this process.
	Program string
	// Arguments go to the program before those of the part.
	Arguments []string
	// Baseline is the pipeline, or stage:<name>, whose hops a baseline takes that is
	// started beside the mesh, on the same broker and in the same way; empty means none.
	Baseline string
	// Durability is that of the baseline; empty means the pipeline's own.
	Durability pipeline.Durability
	// Logger may be nil: nothing is logged.
	Logger *slog.Logger
}

// Bed is a mesh that runs.
type Bed struct {
	url      string
	baseline string
	stop     func() error
}

// URL is where callers ask it.
func (b *Bed) URL() string { return b.url }

// BaselineURL is where callers ask the baseline; empty where there is none.
func (b *Bed) BaselineURL() string { return b.baseline }

// Stop stops the mesh, and returns what its parts failed with.
func (b *Bed) Stop() error { return b.stop() }

// Start starts a mesh, and returns when it serves. The context is only for the start.
func Start(ctx context.Context, s Settings) (*Bed, error) {
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	if s.Program != "" {
		return startProcesses(ctx, s)
	}
	f, err := read(s.File)
	if err != nil {
		return nil, err
	}
	route, err := s.route(f)
	if err != nil {
		return nil, err
	}
	m, err := stagemesh.FromFile(f, stagemesh.FileSettings{Logger: s.Logger, Version: process.Version()})
	if err != nil {
		return nil, err
	}
	if err := m.Start(ctx); err != nil {
		return nil, err
	}
	b := &Bed{url: m.URL(), stop: m.Stop}
	if route == nil {
		return b, nil
	}
	beside, err := startBaseline(ctx, brokerOf(m), *route, f)
	if err != nil {
		return nil, errors.Join(err, m.Stop())
	}
	b.baseline, b.stop = beside.front.URL(), func() error { return errors.Join(beside.stop(), m.Stop()) }
	return b, nil
}
