package call

import (
	"context"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

func TestACrewIsBoundedAndEndsWithItsOwner(t *testing.T) {
	t.Parallel()
	c := newCrew(2)
	told := make(chan struct{}, 2)
	for range 2 {
		if f := c.start(func(ctx context.Context) {
			<-ctx.Done()
			told <- struct{}{}
		}); f != nil {
			t.Fatal(f)
		}
	}
	if f := c.start(func(context.Context) { t.Error("it works") }); f == nil || f.Reason != fault.Overloaded || f.RetryAfter <= 0 {
		t.Errorf("one more: %v", f)
	}
	c.stop(time.Millisecond)
	if len(told) != 2 {
		t.Errorf("%d have ended", len(told))
	}
	if f := c.start(func(context.Context) { t.Error("it works") }); f == nil || f.Reason != fault.ShuttingDown {
		t.Errorf("after the stop: %v", f)
	}
}

func TestACrewWaitsForThoseThatEndByThemselves(t *testing.T) {
	t.Parallel()
	c := newCrew(1)
	goOn, done := make(chan struct{}), make(chan error, 1)
	if f := c.start(func(ctx context.Context) {
		<-goOn
		done <- ctx.Err()
	}); f != nil {
		t.Fatal(f)
	}
	stopped := make(chan struct{})
	go func() {
		c.stop(bustest.Patience)
		close(stopped)
	}()
	close(goOn)
	bustest.Receive(t, "end of the crew", stopped)
	if err := <-done; err != nil {
		t.Errorf("it was told to end: %v", err)
	}
}
