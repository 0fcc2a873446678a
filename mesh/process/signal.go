package process

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

// UntilTold returns a context that ends with the first SIGINT or SIGTERM, which
// ask a program to finish what it has in hand. A second one ends the process at
// once, for whoever has no patience with that. Stop gives the signals back.
func UntilTold(ctx context.Context) (told context.Context, stop context.CancelFunc) {
	told, release := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	patient := context.AfterFunc(told, release)
	return told, func() {
		patient()
		release()
	}
}
