package worker

import (
	"context"
	"errors"
	"testing"
	"time"
)

func acquired(t *testing.T, p *pool) *slot {
	t.Helper()
	w, err := p.acquire(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	return &slot{pool: p, of: w}
}

// isBusy reports whether no slot is idle.
func isBusy(t *testing.T, p *pool) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	w, err := p.acquire(ctx, true)
	if err == nil {
		(&slot{pool: p, of: w}).Release()
	}
	return errors.Is(err, context.DeadlineExceeded)
}

// A suspect runs alone, or other items would be blamed for its crash.
func TestSuspectRunsAlone(t *testing.T) {
	t.Parallel()
	p, of := newPool(1, time.Hour), &incarnation{}
	p.offer(0, of, 4)
	first, suspect, third := acquired(t, p), acquired(t, p), acquired(t, p)
	if got, _ := first.begin(false); got != of {
		t.Fatal("the first batch does not begin")
	}
	got, idle := suspect.begin(true)
	if got != nil || idle == nil {
		t.Fatal("the suspect begins beside another batch")
	}
	if got, wait := third.begin(false); got != nil || wait != nil {
		t.Error("a batch begins before the suspect, which waits")
	}
	if !isBusy(t, p) {
		t.Error("a place of the worker is given")
	}
	first.end(false)
	select {
	case <-idle:
	default:
		t.Fatal("the suspect does not notice that it is alone")
	}
	if suspect.beginExclusive(t.Context()) != of {
		t.Fatal("the suspect does not begin")
	}
	if !isBusy(t, p) {
		t.Error("a place of the worker is given beside the suspect")
	}
	suspect.end(true)
	for range 4 {
		if got, _ := acquired(t, p).begin(false); got != of {
			t.Error("a batch does not begin after the suspect")
		}
	}
}

func TestCancelledSuspectBlocksNothing(t *testing.T) {
	t.Parallel()
	p, of := newPool(1, time.Hour), &incarnation{}
	p.offer(0, of, 2)
	first, suspect := acquired(t, p), acquired(t, p)
	if got, _ := first.begin(false); got != of {
		t.Fatal("the first batch does not begin")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got, err := suspect.enter(ctx, true); got != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("the suspect entered with %v, %v", got, err)
	}
	first.end(false)
	for range 2 {
		acquired(t, p)
	}
}
