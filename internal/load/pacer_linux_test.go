package load

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"
)

// The context may end at any moment of the wait.
func TestFineWaitEndsWithContext(t *testing.T) {
	t.Parallel()
	for i := range 2000 {
		ctx, cancel := context.WithCancel(t.Context())
		p, err := newFinePacer(ctx)
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- p.until(ctx, time.Now().Add(time.Hour)) }()
		for at := time.Now().Add(time.Duration(i%50) * time.Microsecond); time.Now().Before(at); {
			runtime.Gosched()
		}
		cancel()
		select {
		case err = <-ended:
		case <-time.After(time.Minute):
			t.Fatal("the wait did not end")
		}
		p.stop()
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("got %v", err)
		}
	}
}
