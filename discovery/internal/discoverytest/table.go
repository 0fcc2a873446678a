package discoverytest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// key returns a key that only this test uses.
func (u suite) key(t testing.TB, segments ...string) discovery.Key {
	return discovery.KeyOf(append([]string{u.run, t.Name()}, segments...)...)
}

func put(t testing.TB, c discovery.Registry, k discovery.Key, value string, expect discovery.Revision) discovery.Revision {
	t.Helper()
	revision, err := c.Put(t.Context(), k, []byte(value), expect)
	if err != nil {
		t.Fatal(err)
	}
	return revision
}

func remove(t testing.TB, c discovery.Registry, k discovery.Key, expect discovery.Revision) {
	t.Helper()
	if err := c.Delete(t.Context(), k, expect); err != nil {
		t.Fatal(err)
	}
}

// revisionOf returns the revision of an entry, 0 if there is none.
func revisionOf(t testing.TB, c discovery.Registry, k discovery.Key) discovery.Revision {
	t.Helper()
	e, err := c.Get(t.Context(), k)
	if err != nil && !errors.Is(err, discovery.ErrNotFound) && !errors.Is(err, discovery.ErrUnavailable) {
		t.Fatal(err)
	}
	return e.Revision
}

func (u suite) testRevisionsGuardEntries(t *testing.T, s Store) {
	c, k := s.Client(t), u.key(t, "k")
	conflicts := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, discovery.ErrConflict) {
			t.Errorf("%s: %v", what, err)
		}
	}
	putConflicts := func(what string, expect discovery.Revision) {
		t.Helper()
		_, err := c.Put(t.Context(), k, []byte("x"), expect)
		conflicts(what, err)
	}
	missing := func() {
		t.Helper()
		if _, err := c.Get(t.Context(), k); !errors.Is(err, discovery.ErrNotFound) {
			t.Errorf("Get without an entry: %v", err)
		}
	}
	missing()
	putConflicts("a put without an entry", 1<<40)
	conflicts("a delete without an entry", c.Delete(t.Context(), k, 1<<40))
	first := put(t, c, k, "one", 0)
	putConflicts("a second put that expects no entry", 0)
	second := put(t, c, k, "two", first)
	if second <= first {
		t.Errorf("revision %d follows %d", second, first)
	}
	putConflicts("a put of an old revision", first)
	conflicts("a delete of an old revision", c.Delete(t.Context(), k, first))
	got, err := s.Client(t).Get(t.Context(), k)
	if err != nil || string(got.Value) != "two" || got.Revision != second || got.Key != k {
		t.Errorf("Get returns %+v, %v", got, err)
	}
	remove(t, c, k, second)
	missing()
	putConflicts("a put of a deleted revision", second)
	conflicts("a second delete", c.Delete(t.Context(), k, second))
	if third := put(t, c, k, "", 0); third <= second {
		t.Errorf("revision %d follows %d", third, second)
	}
	if got, err := c.Get(t.Context(), k); err != nil || len(got.Value) != 0 {
		t.Errorf("an empty value is %q, %v", got.Value, err)
	}
}

func (u suite) testKeysAreAnyText(t *testing.T, s Store) {
	c := s.Client(t)
	want := map[discovery.Key]string{}
	for _, name := range []string{"a", "A", "a b", "ä/ö", "a.b", "*", ">", "$", "a:b@c", "\x00\xff", "..", ".", "%2F", "=61"} {
		want[u.key(t, name, "leaf")] = name
	}
	put(t, c, discovery.KeyOf(u.run, t.Name()+"2", "beside"), "", 0)
	space := discovery.MaxKey - len(u.key(t))
	want[u.key(t)+discovery.Key(strings.Repeat("/a", space/2-3))+"/leaf"] = "deep"
	want[u.key(t, strings.Repeat("\x00", discovery.MaxSegment), "leaf")] = "long"
	for k, value := range want {
		put(t, c, k, value, 0)
	}
	observe(t, c, u.key(t)).awaitValues(t, testbed.Patience, want)
	observe(t, c, u.key(t, "a", "leaf")).awaitValues(t, testbed.Patience, nil)
}

func (u suite) testLimitsAreEnforced(t *testing.T, s Store) {
	c, k := s.Client(t), u.key(t, "k")
	largest := bytes.Repeat([]byte{0, 0xff, '"', '<'}, discovery.MaxValue/4)
	put(t, c, k, string(largest), 0)
	if got, err := c.Get(t.Context(), k); err != nil || !bytes.Equal(got.Value, largest) {
		t.Errorf("the largest value has %d bytes: %v", len(got.Value), err)
	}
	for name, call := range map[string]func() error{
		"a long value":     func() error { _, err := c.Put(t.Context(), u.key(t, "long"), append(largest, 0), 0); return err },
		"an empty key":     func() error { _, err := c.Put(t.Context(), "", nil, 0); return err },
		"an invalid key":   func() error { _, err := c.Put(t.Context(), "a b", nil, 0); return err },
		"a blind delete":   func() error { return c.Delete(t.Context(), k, 0) },
		"a delete of none": func() error { return c.Delete(t.Context(), "a b", 1) },
		"a get":            func() error { _, err := c.Get(t.Context(), "a b"); return err },
		"an observer":      func() error { return c.Observe(t.Context(), "a b", changes{newRecorder()}) },
	} {
		if err := call(); !errors.Is(err, discovery.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// increment adds one to a counter, however many attempts that takes. known is false if
// the outcome is unknown.
func increment(ctx context.Context, c discovery.Registry, k discovery.Key) (known bool, err error) {
	for {
		e, err := c.Get(ctx, k)
		n := uint64(0)
		switch {
		case err == nil:
			n = binary.BigEndian.Uint64(e.Value)
		case errors.Is(err, discovery.ErrUnavailable):
			continue
		case !errors.Is(err, discovery.ErrNotFound):
			return false, err
		}
		_, err = c.Put(ctx, k, binary.BigEndian.AppendUint64(nil, n+1), e.Revision)
		switch {
		case err == nil:
			return true, nil
		case errors.Is(err, discovery.ErrUnknown):
			return false, nil
		case !errors.Is(err, discovery.ErrConflict):
			return false, err
		}
	}
}

func (u suite) testNoWriterLosesAnUpdate(t *testing.T, s Store) {
	for name, client := range map[string]func(testing.TB) discovery.Registry{"all answers come": s.Client, "answers are lost": s.Lossy} {
		t.Run(name, func(t *testing.T) {
			const writers, each = 8, 25
			k := u.key(t, "counter")
			ctx, cancel := context.WithTimeout(t.Context(), 2*testbed.Patience)
			defer cancel()
			var known, unknown atomic.Uint64
			var writing sync.WaitGroup
			for range writers {
				c := client(t)
				writing.Go(func() {
					for range each {
						made, err := increment(ctx, c, k)
						if err != nil {
							t.Error(err)
							return
						}
						if made {
							known.Add(1)
						} else {
							unknown.Add(1)
						}
					}
				})
			}
			writing.Wait()
			e, err := s.Client(t).Get(t.Context(), k)
			if err != nil {
				t.Fatal(err)
			}
			got := binary.BigEndian.Uint64(e.Value)
			t.Logf("the counter is %d, after %d known and %d unknown updates", got, known.Load(), unknown.Load())
			if got < known.Load() || got > known.Load()+unknown.Load() {
				t.Errorf("the counter is %d, after %d known and %d unknown updates", got, known.Load(), unknown.Load())
			}
			if known.Load() == 0 {
				t.Error("no update is known")
			}
		})
	}
}

func (u suite) testObserverReceivesAllThenChanges(t *testing.T, s Store) {
	c := s.Client(t)
	a, b, beside := u.key(t, "a"), u.key(t, "b", "c"), discovery.KeyOf(u.run, t.Name()+"2", "a")
	first := put(t, c, a, "1", 0)
	put(t, c, beside, "1", 0)
	observer := observe(t, s.Client(t), u.key(t))
	observer.awaitValues(t, testbed.Patience, map[discovery.Key]string{a: "1"})
	put(t, c, b, "2", 0)
	second := put(t, c, a, "3", first)
	observer.awaitValues(t, testbed.Patience, map[discovery.Key]string{a: "3", b: "2"})
	remove(t, c, a, second)
	observer.awaitValues(t, testbed.Patience, map[discovery.Key]string{b: "2"})
	if observer.resets != 1 {
		t.Errorf("there were %d resets", observer.resets)
	}
	observe(t, s.Client(t), u.key(t, "nothing")).awaitValues(t, testbed.Patience, nil)
}

func (u suite) testObserverConvergesAfterOutage(t *testing.T, s Store) {
	c := s.Client(t)
	a, b := u.key(t, "a"), u.key(t, "b")
	first := put(t, c, a, "1", 0)
	observer := observe(t, c, u.key(t))
	observer.awaitValues(t, testbed.Patience, map[discovery.Key]string{a: "1"})

	s.Stop(t)
	observer.await(t, "the observer reports the outage", 10*time.Second, func() bool { return observer.lost != nil })
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if _, err := c.Get(ctx, a); !errors.Is(err, discovery.ErrUnavailable) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Get without a store: %v", err)
	}
	if _, err := c.Put(ctx, b, nil, 0); !errors.Is(err, discovery.ErrUnavailable) && !errors.Is(err, discovery.ErrUnknown) {
		t.Errorf("Put without a store: %v", err)
	}
	s.Start(t)
	other := s.Client(t)
	observer.await(t, "the observer reports that the store is back", 10*time.Second, func() bool { return observer.lost == nil })
	testbed.Eventually(t, "a put after the restart", func() bool {
		_, err := other.Put(t.Context(), a, []byte("2"), first)
		return err == nil
	})
	put(t, other, b, "3", revisionOf(t, other, b))
	observer.awaitValues(t, 10*time.Second, map[discovery.Key]string{a: "2", b: "3"})

	s.Stop(t)
	s.Wipe(t)
	last := s.Client(t)
	testbed.Eventually(t, "a put after the wipe", func() bool {
		_, err := last.Put(t.Context(), b, []byte("4"), revisionOf(t, last, b))
		return err == nil
	})
	observer.awaitValues(t, 10*time.Second, map[discovery.Key]string{b: "4"})
}

func (u suite) testThousandsOfKeys(t *testing.T, s Store) {
	const n, writers = 10_000, 32
	c := s.Client(t)
	observer := observe(t, s.Client(t), u.key(t))
	observer.awaitValues(t, testbed.Patience, nil)
	begin := time.Now()
	var next atomic.Int64
	var writing sync.WaitGroup
	for range writers {
		writing.Go(func() {
			for i := next.Add(1); i <= n; i = next.Add(1) {
				if _, err := c.Put(t.Context(), u.key(t, fmt.Sprintf("%05d", i)), []byte("value"), 0); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	writing.Wait()
	written := time.Since(begin)
	observer.await(t, "the observer has all keys", testbed.Patience, func() bool { return len(observer.entries) == n })
	t.Logf("%d keys written in %s, observed in %d changes", n, written.Round(time.Millisecond), observer.changes)
	late := observe(t, s.Client(t), u.key(t))
	late.await(t, "a late observer has all keys", testbed.Patience, func() bool { return len(late.entries) == n })
}
