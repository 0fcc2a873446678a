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

// ErrHurried is the cause of a Draining context that ended because the process was
// told to stop a second time.
var ErrHurried = errors.New("told to stop at once")

// hurry is the key of a context that ends with the second signal.
type hurry struct{}

// UntilTold returns a context that ends with the first SIGINT or SIGTERM, which
// ask a program to finish what it has in hand. A second one ends the contexts of
// Draining: nothing is waited for any more, and all is cleaned up still. A third
// ends the process at once. Stop gives the signals back.
func UntilTold(ctx context.Context) (told context.Context, stop context.CancelFunc) {
	hurried, hasten := context.WithCancelCause(context.Background())
	told, tell := context.WithCancel(context.WithValue(ctx, hurry{}, hurried))
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	over := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		defer signal.Stop(signals)
		last := func() {
			signal.Stop(signals) // the next one is nobody's
			hasten(ErrHurried)
		}
		for _, heed := range []func(){tell, last} {
			select {
			case <-signals:
				heed()
			case <-over:
				return
			}
		}
	})
	return told, sync.OnceFunc(func() {
		tell()
		close(over)
		watching.Wait()
		hasten(context.Canceled)
	})
}

// Draining returns a context for what is finished after ctx has ended. It ends when
// the time is over, or, with ErrHurried as its cause, when a process whose context
// is that of UntilTold is told to stop a second time.
func Draining(ctx context.Context, patience time.Duration) (context.Context, context.CancelFunc) {
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	hurried, ok := ctx.Value(hurry{}).(context.Context)
	if !ok {
		return drain, cancel
	}
	drain, hasten := context.WithCancelCause(drain)
	patient := context.AfterFunc(hurried, func() { hasten(context.Cause(hurried)) })
	return drain, func() {
		patient()
		hasten(context.Canceled)
		cancel()
	}
}
