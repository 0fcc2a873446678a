package admit_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/gateway/admit"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

func TestRefusedCallerIsToldByHowFastOthersLeave(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct{ pause, least, most time.Duration }{
		// A tenth of 20 places, and one.
		"slow": {500 * time.Millisecond, time.Second, 2 * time.Second},
		"fast": {10 * time.Millisecond, 100 * time.Millisecond, 100 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				g := admit.New(20)
				for range 20 {
					enter(t, g)
				}
				for range 10 {
					<-time.After(row.pause)
					g.Leave()
					enter(t, g)
				}
				if f := g.Enter(); f == nil || f.RetryAfter < row.least || f.RetryAfter > row.most {
					t.Errorf("got %v, to be repeated after %s", f, f.RetryAfter)
				}
			})
		})
	}
}

func TestNobodyLeavesMeansASecond(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := admit.New(1)
		enter(t, g)
		g.Leave()
		enter(t, g)
		<-time.After(time.Minute)
		if f := g.Enter(); f == nil || f.RetryAfter != time.Second {
			t.Errorf("got %v", f)
		}
	})
}

func TestNoPipelineHasMoreInFlightThanItMay(t *testing.T) {
	t.Parallel()
	s := admit.NewShares()
	for range 2 {
		if f := s.Enter("a", 2); f != nil {
			t.Fatal(f)
		}
	}
	if f := s.Enter("a", 2); f == nil || f.Reason != fault.Overloaded || f.RetryAfter <= 0 {
		t.Errorf("a third of two: %v", f)
	}
	for range 100 {
		if f := s.Enter("unbounded", 0); f != nil {
			t.Fatal(f)
		}
	}
	if f := s.Enter("b", 1); f != nil {
		t.Errorf("another pipeline: %v", f)
	}
	s.Leave("a", 2)
	if f := s.Enter("a", 2); f != nil {
		t.Errorf("after one has left: %v", f)
	}
	s.Leave("a", 2)
	s.Leave("a", 2)
	s.Leave("unbounded", 0)
	if f := s.Enter("a", 1); f != nil {
		t.Errorf("after all have left: %v", f)
	}
}

func TestBudgetIsNeverExceeded(t *testing.T) {
	t.Parallel()
	b := admit.NewBudget(10)
	if f := b.Take(6); f != nil {
		t.Fatal(f)
	}
	if f := b.Take(5); f == nil || f.Reason != fault.Overloaded || f.RetryAfter <= 0 {
		t.Errorf("11 of 10: %v", f)
	}
	if f := b.Take(4); f != nil {
		t.Errorf("what was refused was taken: %v", f)
	}
	b.Give(10)
	if b.Taken() != 0 {
		t.Errorf("%d are taken", b.Taken())
	}
}
