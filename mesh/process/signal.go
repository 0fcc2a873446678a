package process

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

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
// signal where ctx is that of SignalContext.
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
