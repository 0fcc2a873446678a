package process_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/internal/process"
)

var errBad = errors.New("bad")

// diary is what happened, in order.
type diary struct {
	mu      sync.Mutex
	entries []string
}

func (d *diary) add(entry string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.entries = append(d.entries, entry)
}

func (d *diary) check(t *testing.T, want ...string) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if !slices.Equal(d.entries, want) {
		t.Errorf("got  %q\nwant %q", d.entries, want)
	}
}

// part runs until it is stopped, and takes a second to start and another
// to stop.
func (d *diary) part(name string) process.Part {
	return process.Part{
		Name: name,
		Run: func(ctx context.Context) error {
			d.add(name + " runs")
			<-ctx.Done()
			d.add(name + " is stopped")
			<-time.After(time.Second)
			d.add(name + " ends")
			return nil
		},
		Ready: func(ctx context.Context) error {
			select {
			case <-time.After(time.Second):
				d.add(name + " is ready")
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		},
	}
}

// group is the parts in a bubble of their own time.
func group(t *testing.T, test func(t *testing.T, d *diary, start func(...process.Part) *process.Group)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		test(t, &diary{}, func(parts ...process.Part) *process.Group {
			return process.New(slog.New(slog.DiscardHandler), parts...)
		})
	})
}

func TestPartsStartInOrderAndStopInReverse(t *testing.T) {
	t.Parallel()
	group(t, func(t *testing.T, d *diary, of func(...process.Part) *process.Group) {
		g := of(d.part("a"), d.part("b"))
		if err := g.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := g.Stop(); err != nil {
			t.Error(err)
		}
		d.check(t, "a runs", "a is ready", "b runs", "b is ready", "b is stopped", "b ends", "a is stopped", "a ends")
		if err := g.Stop(); err != nil {
			t.Errorf("a second stop: %v", err)
		}
	})
}

func TestPartsOutliveTheContextOfTheirStart(t *testing.T) {
	t.Parallel()
	group(t, func(t *testing.T, d *diary, of func(...process.Part) *process.Group) {
		g := of(d.part("a"))
		ctx, cancel := context.WithCancel(t.Context())
		if err := g.Start(ctx); err != nil {
			t.Fatal(err)
		}
		cancel()
		synctest.Wait()
		d.check(t, "a runs", "a is ready")
		if err := g.Stop(); err != nil {
			t.Error(err)
		}
	})
}

func TestAPartThatIsNotReadyStopsThoseBefore(t *testing.T) {
	t.Parallel()
	group(t, func(t *testing.T, d *diary, of func(...process.Part) *process.Group) {
		b := d.part("b")
		b.Ready = func(context.Context) error { return errBad }
		err := of(d.part("a"), b, d.part("c")).Start(t.Context())
		if !errors.Is(err, errBad) || err.Error() != "b: bad" {
			t.Errorf("got %v", err)
		}
		d.check(t, "a runs", "a is ready", "b runs", "b is stopped", "b ends", "a is stopped", "a ends")
	})
}

func TestAPartThatEndsDuringTheStartStopsTheOthers(t *testing.T) {
	t.Parallel()
	// after makes a part end by itself after a time.
	after := func(p process.Part, pause time.Duration, err error) process.Part {
		p.Run = func(ctx context.Context) error {
			select {
			case <-time.After(pause):
				return err
			case <-ctx.Done():
				return nil
			}
		}
		return p
	}
	tests := map[string]struct {
		parts func(d *diary) []process.Part
		says  string
		want  []string
	}{
		"itself, while it gets ready": {
			func(d *diary) []process.Part {
				return []process.Part{d.part("a"), after(d.part("b"), time.Millisecond, errBad)}
			},
			"bad",
			[]string{"a runs", "a is ready", "a is stopped", "a ends"},
		},
		"an earlier one, while a later one gets ready": {
			func(d *diary) []process.Part {
				return []process.Part{after(d.part("a"), 1500*time.Millisecond, errBad), d.part("b")}
			},
			"bad",
			[]string{"a is ready", "b runs", "b is stopped", "b ends"},
		},
		"without a reason": {
			func(d *diary) []process.Part {
				return []process.Part{after(d.part("a"), time.Millisecond, nil)}
			},
			"a: ended by itself",
			nil,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			group(t, func(t *testing.T, d *diary, of func(...process.Part) *process.Group) {
				begin := time.Now()
				err := of(test.parts(d)...).Start(t.Context())
				if err == nil || err.Error() != test.says {
					t.Errorf("got %v, want %q", err, test.says)
				}
				if took := time.Since(begin); took > 3*time.Second {
					t.Errorf("it took %s", took)
				}
				d.check(t, test.want...)
			})
		})
	}
}

func TestStartEndsWithItsContext(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		// cancelAfter is when, counted from the start.
		cancelAfter time.Duration
		want        []string
	}{
		"before it begins":        {0, nil},
		"while a part gets ready": {500 * time.Millisecond, []string{"a runs", "a is stopped", "a ends"}},
		"while a later part does": {1500 * time.Millisecond, []string{"a runs", "a is ready", "b runs", "b is stopped", "b ends", "a is stopped", "a ends"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			group(t, func(t *testing.T, d *diary, of func(...process.Part) *process.Group) {
				ctx, cancel := context.WithTimeout(t.Context(), test.cancelAfter)
				defer cancel()
				if err := of(d.part("a"), d.part("b"), d.part("c")).Start(ctx); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("got %v", err)
				}
				d.check(t, test.want...)
			})
		})
	}
}

func TestEndedContextStartsNoPart(t *testing.T) {
	t.Parallel()
	group(t, func(t *testing.T, d *diary, of func(...process.Part) *process.Group) {
		quick := d.part("quick")
		quick.Ready = nil
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := of(quick).Start(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		d.check(t)
	})
}

func TestWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	group(t, func(t *testing.T, d *diary, of func(...process.Part) *process.Group) {
		g := of(d.part("a"))
		if err := g.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		begin := time.Now()
		if err := g.Wait(ctx); err != nil || time.Since(begin) != time.Hour {
			t.Errorf("got %v after %s", err, time.Since(begin))
		}
		if err := g.Stop(); err != nil {
			t.Error(err)
		}
	})
}

func TestPartThatEndsByItselfIsReported(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		reason error
		is     error
		says   string
	}{
		"with a reason": {errBad, errBad, "bad"},
		"without one":   {nil, process.ErrEnded, "b: ended by itself"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			group(t, func(t *testing.T, d *diary, of func(...process.Part) *process.Group) {
				b := process.Part{Name: "b", Run: func(context.Context) error {
					<-time.After(time.Minute)
					return test.reason
				}}
				g := of(d.part("a"), b, d.part("c"))
				if err := g.Start(t.Context()); err != nil {
					t.Fatal(err)
				}
				var waiting sync.WaitGroup
				for range 2 {
					waiting.Go(func() {
						if err := g.Wait(t.Context()); !errors.Is(err, test.is) || err.Error() != test.says {
							t.Errorf("wait: got %v", err)
						}
					})
				}
				waiting.Wait()
				// The others run on.
				d.check(t, "a runs", "a is ready", "c runs", "c is ready")
				if err := g.Stop(); !errors.Is(err, test.is) || err.Error() != test.says {
					t.Errorf("stop: got %v", err)
				}
				d.check(t, "a runs", "a is ready", "c runs", "c is ready", "c is stopped", "c ends", "a is stopped", "a ends")
			})
		})
	}
}

func TestStopReturnsTheErrorsOfParts(t *testing.T) {
	t.Parallel()
	group(t, func(t *testing.T, _ *diary, of func(...process.Part) *process.Group) {
		fails := func(name string) process.Part {
			return process.Part{Name: name, Run: func(ctx context.Context) error {
				<-ctx.Done()
				return errBad
			}}
		}
		g := of(fails("a"), fails("b"))
		if err := g.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := g.Stop(); !errors.Is(err, errBad) || err.Error() != "bad\nbad" {
			t.Errorf("got %v", err)
		}
	})
}

// A part may fail while the program is being stopped, so that nobody asks
// Wait any more.
func TestStopReturnsErrorsThatWaitDidNot(t *testing.T) {
	t.Parallel()
	group(t, func(t *testing.T, _ *diary, of func(...process.Part) *process.Group) {
		g := of(process.Part{Name: "a", Run: func(context.Context) error { return errBad }})
		if err := g.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := g.Stop(); !errors.Is(err, errBad) {
			t.Errorf("got %v", err)
		}
	})
}

func TestUnstartedGroupStops(t *testing.T) {
	t.Parallel()
	group(t, func(t *testing.T, d *diary, of func(...process.Part) *process.Group) {
		if err := of(d.part("a")).Stop(); err != nil {
			t.Error(err)
		}
		d.check(t)
	})
}
