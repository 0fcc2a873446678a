// Package process starts the parts of a program in order and stops them in
// reverse.
//
//	g := process.New(log, broker, host, gateway)
//	err := g.Start(ctx)   // each part is ready before the next starts
//	err = g.Wait(ctx)     // until the context ends or a part fails
//	err = g.Stop()        // the last part first, each to its end
//
// A part is a function that runs until its context ends and then finishes what
// it has in hand. Every part that was started is stopped and waited for, also
// when a later one does not start. A Group is used by one goroutine.
package process

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
)

// Part is a part of a program.
type Part struct {
	Name string
	// Run works until the context ends, finishes, and returns nil; or returns
	// early with the reason.
	Run func(ctx context.Context) error
	// Ready, where set, returns when the part is ready for the next to start.
	Ready func(ctx context.Context) error
}

// Group is the parts of a program.
type Group struct {
	log     *slog.Logger
	parts   []Part
	running []*running
	// ended gets each part that ends before it is told to.
	ended chan *running
}

type running struct {
	name   string
	cancel context.CancelFunc
	done   chan struct{}
	// err is there once done is closed.
	err error
	// told says that the caller knows of err.
	told bool
}

// New returns a group of the parts, in the order of their start.
func New(log *slog.Logger, parts ...Part) *Group {
	return &Group{log: log, parts: parts, ended: make(chan *running, len(parts))}
}

// ErrEnded says that a part ended though nobody told it to.
var ErrEnded = errors.New("ended by itself")

// Start starts the parts. When one fails, or the context ends, those that run
// are stopped.
func (g *Group) Start(ctx context.Context) error {
	for _, part := range g.parts {
		if err := g.start(ctx, part); err != nil {
			return errors.Join(err, g.Stop())
		}
	}
	return nil
}

func (g *Group) start(ctx context.Context, part Part) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s: %w", part.Name, err)
	}
	// A part outlives the context of the start; Stop ends it.
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	r := &running{name: part.Name, cancel: cancel, done: make(chan struct{})}
	g.running = append(g.running, r)
	go func() {
		defer close(r.done)
		r.err = part.Run(own)
		if own.Err() == nil {
			g.ended <- r
		}
	}()
	if part.Ready == nil {
		return nil
	}
	return g.await(ctx, part)
}

// await waits for the part to be ready, or for any part to end: a part may need
// an earlier one to get ready.
func (g *Group) await(ctx context.Context, part Part) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	isReady := make(chan error, 1)
	go func() { isReady <- part.Ready(ctx) }()
	select {
	case err := <-isReady:
		if err != nil {
			return fmt.Errorf("%s: %w", part.Name, err)
		}
		return nil
	case r := <-g.ended:
		cancel()
		<-isReady //nolint:errcheck // why a part ended says more than that another is not ready
		return r.tell()
	}
}

// tell returns why a part ended by itself. The part has sent itself to ended
// last.
func (r *running) tell() error {
	r.told = true
	if r.err == nil {
		return fmt.Errorf("%s: %w", r.name, ErrEnded)
	}
	return fmt.Errorf("%s: %w: %w", r.name, ErrEnded, r.err)
}

// Wait returns nil when the context ends, and the reason when a part ends
// before.
func (g *Group) Wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case r := <-g.ended:
		return r.tell()
	}
}

// Stop stops the parts in reverse order, each to its end before the one before
// it, and returns what they failed with, but for what Start or Wait has said
// already.
func (g *Group) Stop() error {
	var errs []error
	for i := len(g.running) - 1; i >= 0; i-- {
		r := g.running[i]
		g.log.Debug("stopping", "part", r.name)
		r.cancel()
		<-r.done
		if r.err != nil && !r.told {
			errs = append(errs, fmt.Errorf("%s: %w", r.name, r.err))
		}
	}
	g.running = nil
	return errors.Join(errs...)
}
