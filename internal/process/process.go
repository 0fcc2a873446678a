// Package process is what every program does around its work: it handles signals,
// starts the program's parts in order and stops them in reverse, returns the
// version, reduces garbage collections, and pauses between tries (Sleep).
//
//	ctx, stop := process.SignalContext(ctx)
//	defer stop()
//	g := process.New(log, broker, host, gateway)
//	err := g.Start(ctx)   // each part is ready before the next starts
//	err = g.Wait(ctx)     // until the context ends or a part does
//	err = g.Stop()        // the last part first, each to its end
//
// A part is a function that runs until its context ends and then finishes its
// work in flight. Every part that was started is stopped and waited for, also
// when a later one does not start. Errors come from the parts, unwrapped.
//
// Start and Stop are for one goroutine at a time, and Stop is called when Start
// has returned; Wait is safe for concurrent use.
package process

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Sleep waits, unless the context ends first: then it returns the context's error.
func Sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

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

	// failed is closed when a part has ended by itself; cause is the first one's,
	// and set before.
	failed chan struct{}
	first  sync.Once
	cause  error
}

type running struct {
	name   string
	cancel context.CancelFunc
	done   chan struct{}
	// err is set before done is closed.
	err error
}

// New returns a group of the parts, in the order of their start.
func New(log *slog.Logger, parts ...Part) *Group {
	return &Group{log: log, parts: parts, failed: make(chan struct{})}
}

// ErrEnded says that a part ended before its context, and returned no error.
var ErrEnded = errors.New("ended by itself")

// Start starts the parts. When one fails, or the context ends, those that run
// are stopped, and what Stop returns is part of the error.
func (g *Group) Start(ctx context.Context) error {
	for _, part := range g.parts {
		err := g.start(ctx, part)
		if err == nil {
			continue
		}
		stopped := g.Stop()
		if g.hasFailed() {
			// The part's own error is in stopped, and says more than that
			// another part was not ready.
			return stopped
		}
		return errors.Join(err, stopped)
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
			r.err = g.fail(r)
		}
	}()
	if part.Ready == nil {
		return nil
	}
	return g.await(ctx, part)
}

// fail records that a part has ended by itself, and returns its error.
func (g *Group) fail(r *running) error {
	err := r.err
	if err == nil {
		err = fmt.Errorf("%s: %w", r.name, ErrEnded)
	}
	g.first.Do(func() {
		g.cause = err
		close(g.failed)
	})
	return err
}

func (g *Group) hasFailed() bool {
	select {
	case <-g.failed:
		return true
	default:
		return false
	}
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
	case <-g.failed:
		cancel()
		<-isReady //nolint:errcheck // the error of the part that ended says more
		return g.cause
	}
}

// Wait returns nil when the context ends, and the reason when a part ends
// before: the others run on until Stop.
func (g *Group) Wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-g.failed:
		return g.cause
	}
}

// Stop stops the parts in reverse order, each to its end before the one before
// it, and returns their errors, also those that Wait has returned.
func (g *Group) Stop() error {
	var errs []error
	for i := len(g.running) - 1; i >= 0; i-- {
		r := g.running[i]
		g.log.Debug("stopping", "part", r.name)
		r.cancel()
		<-r.done
		errs = append(errs, r.err)
	}
	g.running = nil
	return errors.Join(errs...)
}

// ErrShutdown is the cause of a drain context that a second signal ended.
var ErrShutdown = errors.New("told to stop at once")

// shutdownKey is the key of a context that ends with the second signal.
type shutdownKey struct{}

// SignalContext returns a context that ends with the first SIGINT or SIGTERM,
// which asks a program to drain. The second signal is the shutdown: it ends the
// contexts of DrainContext, so the program waits for nothing more and still
// cleans up. The third is the force quit: it ends the process at once. Stop
// restores the default handling of both signals.
func SignalContext(ctx context.Context) (drain context.Context, stop context.CancelFunc) {
	shutdown, shutDown := context.WithCancelCause(context.Background())
	drain, startDrain := context.WithCancel(context.WithValue(ctx, shutdownKey{}, shutdown))
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	stopped := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		defer signal.Stop(signals)
		onSecond := func() {
			signal.Stop(signals) // the third has its default effect
			shutDown(ErrShutdown)
		}
		for _, act := range []func(){startDrain, onSecond} {
			select {
			case <-signals:
				act()
			case <-stopped:
				return
			}
		}
	})
	return drain, sync.OnceFunc(func() {
		startDrain()
		close(stopped)
		watching.Wait()
		shutDown(context.Canceled)
	})
}

// DrainContext returns a context for work that is finished after ctx has ended.
// It ends after the timeout, or, with ErrShutdown as its cause, with the second
// signal where ctx comes from SignalContext.
func DrainContext(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	shutdown, ok := ctx.Value(shutdownKey{}).(context.Context)
	if !ok {
		return drain, cancel
	}
	drain, cancelCause := context.WithCancelCause(drain)
	unwatch := context.AfterFunc(shutdown, func() { cancelCause(context.Cause(shutdown)) })
	return drain, func() {
		unwatch()
		cancelCause(context.Canceled)
		cancel()
	}
}

// Ballast is what ReduceCollections adds to the heap, in bytes.
const Ballast = 64 << 20

// ballast is never touched, so it takes address space and no memory, and a
// collection has nothing in it to scan.
var ballast = sync.OnceValue(func() []byte { return make([]byte, Ballast) })

// ReduceCollections has a program with a small heap collect less often: it adds a
// Ballast to the heap, which Go lets grow to twice of what was in use. Parts of a
// mesh use a few megabytes and allocate as much tens of times a second under
// load, and each collection would scan all of it. It changes nothing where the
// environment sets GOGC or GOMEMLIMIT.
func ReduceCollections() {
	for _, name := range []string{"GOGC", "GOMEMLIMIT"} {
		if _, isSet := os.LookupEnv(name); isSet {
			return
		}
	}
	ballast()
}

// These may be set by the linker, for builds that see no repository, such as builds of images.
var version, revision, date string

// Version returns the version of the program: the linker's, or of its build information.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return cmp.Or(version, info.Main.Version, "(devel)")
	}
	return cmp.Or(version, "(devel)")
}

// Origin returns the commit of the program and when that, or the program, was made, as far as they
// are known, in parentheses.
func Origin() string {
	commit, at := revision, date
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				commit = cmp.Or(commit, s.Value)
			case "vcs.time":
				at = cmp.Or(at, s.Value)
			}
		}
	}
	known := strings.TrimSuffix(cmp.Or(commit, "unknown")+", "+at, ", ")
	return "(commit " + known + ")"
}
