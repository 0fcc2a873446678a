package discoverytest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
)

// key returns a key that is this test's alone.
func (u suite) key(t testing.TB, segments ...string) discovery.Key {
	return discovery.KeyOf(append([]string{u.run, t.Name()}, segments...)...)
}

func commit(t testing.TB, c Client, changes ...discovery.Operation) discovery.Revision {
	t.Helper()
	revision, err := c.Commit(t.Context(), changes...)
	if err != nil {
		t.Fatal(err)
	}
	return revision
}

func refused(t testing.TB, c Client, want error, changes ...discovery.Operation) {
	t.Helper()
	if _, err := c.Commit(t.Context(), changes...); !errors.Is(err, want) {
		t.Errorf("a commit of %d changes is answered with %v, want %v", len(changes), err, want)
	}
}

func (u suite) testRevisionsGuardEntries(t *testing.T, s Store) {
	c, k := s.Client(t), u.key(t, "k")
	if _, err := c.Get(t.Context(), k); !errors.Is(err, discovery.ErrNotFound) {
		t.Errorf("what is not there is %v", err)
	}
	refused(t, c, discovery.ErrConflict, discovery.Put(k, []byte("x"), 1<<40))
	refused(t, c, discovery.ErrConflict, discovery.Delete(k, 1<<40))
	first := commit(t, c, discovery.Put(k, []byte("one"), 0))
	refused(t, c, discovery.ErrConflict, discovery.Put(k, []byte("again"), 0))
	second := commit(t, c, discovery.Put(k, []byte("two"), first))
	if second <= first {
		t.Errorf("revision %d came after %d", second, first)
	}
	refused(t, c, discovery.ErrConflict, discovery.Put(k, []byte("late"), first))
	refused(t, c, discovery.ErrConflict, discovery.Delete(k, first))
	got, err := s.Client(t).Get(t.Context(), k)
	if err != nil || string(got.Value) != "two" || got.Revision != second || got.Key != k {
		t.Errorf("it is %+v, %v", got, err)
	}
	commit(t, c, discovery.Delete(k, second))
	if _, err := c.Get(t.Context(), k); !errors.Is(err, discovery.ErrNotFound) {
		t.Errorf("what was deleted is %v", err)
	}
	refused(t, c, discovery.ErrConflict, discovery.Put(k, []byte("late"), second))
	if third := commit(t, c, discovery.Put(k, nil, 0)); third <= second {
		t.Errorf("revision %d came after %d", third, second)
	}
	if got, err := c.Get(t.Context(), k); err != nil || len(got.Value) != 0 {
		t.Errorf("an empty value is %q, %v", got.Value, err)
	}
}

func (u suite) testKeysAreAnyText(t *testing.T, s Store) {
	c := s.Client(t)
	var want []discovery.Key
	for _, name := range []string{"a", "A", "a b", "ä/ö", "a.b", "*", ">", "$", "a:b@c", "\x00\xff", "..", ".", "%2F", "=61"} {
		k := u.key(t, name, "leaf")
		commit(t, c, discovery.Put(k, []byte(name), 0))
		want = append(want, k)
	}
	commit(t, c, discovery.Put(discovery.KeyOf(u.run, t.Name()+"2", "beside"), nil, 0))
	deep, room := u.key(t), discovery.MaxKey-len(u.key(t))
	deep += discovery.Key(strings.Repeat("/a", room/2-3)) + "/leaf"
	long := u.key(t, strings.Repeat("\x00", discovery.MaxSegment), "leaf")
	for _, k := range []discovery.Key{deep, long} {
		segments, err := k.Segments()
		if err != nil {
			t.Fatal(err)
		}
		commit(t, c, discovery.Put(k, []byte(segments[len(segments)-2]), 0))
		want = append(want, k)
	}
	slices.Sort(want)
	entries, err := c.List(t.Context(), u.key(t))
	if err != nil || len(entries) != len(want) {
		t.Fatalf("%d entries, want %d: %v", len(entries), len(want), err)
	}
	for i, e := range entries {
		segments, err := e.Key.Segments()
		if err != nil || e.Key != want[i] || segments[len(segments)-2] != string(e.Value) {
			t.Errorf("entry %d is %q with %q, want %q: %v", i, e.Key, e.Value, want[i], err)
		}
	}
	if entries, err := c.List(t.Context(), u.key(t, "a", "leaf")); err != nil || len(entries) != 0 {
		t.Errorf("below a leaf are %d entries: %v", len(entries), err)
	}
}

func (u suite) testBoundsAreToldBeforeTheStore(t *testing.T, s Store) {
	c, k := s.Client(t), u.key(t, "k")
	largest := bytes.Repeat([]byte{0, 0xff, '"', '<'}, discovery.MaxValue/4)
	commit(t, c, discovery.Put(k, largest, 0))
	if got, err := c.Get(t.Context(), k); err != nil || !bytes.Equal(got.Value, largest) {
		t.Errorf("the largest value has %d bytes: %v", len(got.Value), err)
	}
	many := make([]discovery.Operation, discovery.MaxOperations+1)
	for i := range many {
		many[i] = discovery.Put(u.key(t, "many", fmt.Sprint(i)), nil, 0)
	}
	for name, changes := range map[string][]discovery.Operation{
		"none":           nil,
		"a long value":   {discovery.Put(u.key(t, "long"), append(largest, 0), 0)},
		"too many":       many,
		"a key twice":    {discovery.Put(u.key(t, "x"), nil, 0), discovery.Put(u.key(t, "x"), nil, 0)},
		"no key":         {discovery.Put("", nil, 0)},
		"no such key":    {discovery.Put("a b", nil, 0)},
		"a blind delete": {discovery.Delete(u.key(t, "x"), 0)},
		"too much":       {discovery.Put(u.key(t, "x"), largest, 0), discovery.Put(u.key(t, "y"), largest, 0)},
	} {
		if _, err := c.Commit(t.Context(), changes...); !errors.Is(err, discovery.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.Get(t.Context(), "a b"); !errors.Is(err, discovery.ErrInvalid) {
		t.Errorf("Get of no key: %v", err)
	}
}

func (u suite) testACommitIsMadeWholeOrNotAtAll(t *testing.T, s Store) {
	c := s.Client(t)
	observer := observe(t, c, u.key(t))
	changes := make([]discovery.Operation, discovery.MaxOperations)
	for i := range changes {
		changes[i] = discovery.Put(u.key(t, fmt.Sprintf("%02d", i)), []byte("one"), 0)
	}
	revision := commit(t, c, changes...)
	want := map[discovery.Key]string{}
	for i := range changes {
		e, err := c.Get(t.Context(), changes[i].Key)
		if err != nil || e.Revision == 0 || e.Revision > revision {
			t.Fatalf("entry %d is of revision %d, the commit of %d: %v", i, e.Revision, revision, err)
		}
		changes[i] = discovery.Put(changes[i].Key, []byte("two"), e.Revision)
		want[changes[i].Key] = "one"
	}
	observer.holds(t, patience, want)
	changes[0] = discovery.Delete(changes[0].Key, changes[0].Expect)
	for _, spoilt := range []int{0, len(changes) / 2, len(changes) - 1} {
		right := changes[spoilt].Expect
		changes[spoilt].Expect = right + 1<<40
		refused(t, c, discovery.ErrConflict, changes...)
		changes[spoilt].Expect = right
	}
	entries, err := c.List(t.Context(), u.key(t))
	if err != nil || len(entries) != len(changes) {
		t.Fatalf("%d entries: %v", len(entries), err)
	}
	for _, e := range entries {
		if string(e.Value) != "one" {
			t.Fatalf("%s is %q after a commit that was refused", e.Key, e.Value)
		}
	}
	commit(t, c, changes...)
	delete(want, changes[0].Key)
	for k := range want {
		want[k] = "two"
	}
	observer.holds(t, patience, want)
}

// One that writes changes all entries at once, one that lists finds them all the same.
func (u suite) testAListHasCommitsWhole(t *testing.T, s Store) {
	const keys, rounds = 16, 100
	c := s.Client(t)
	changes := make([]discovery.Operation, keys)
	for i := range changes {
		changes[i] = discovery.Put(u.key(t, fmt.Sprint(i)), nil, 0)
	}
	commit(t, c, changes...)
	var lists atomic.Int64
	writing := make(chan struct{})
	var reading sync.WaitGroup
	defer func() {
		close(writing)
		reading.Wait()
		t.Logf("%d lists were whole", lists.Load())
	}()
	other := s.Client(t)
	reading.Go(func() {
		for {
			entries, err := other.List(t.Context(), u.key(t))
			if err != nil || len(entries) != keys {
				t.Errorf("%d entries: %v", len(entries), err)
				return
			}
			if !slices.ContainsFunc(entries, func(e discovery.Entry) bool { return !bytes.Equal(e.Value, entries[0].Value) }) {
				lists.Add(1)
			} else {
				t.Error("a list has a part of a commit")
			}
			select {
			case <-writing:
				return
			default:
			}
		}
	})
	for round := range rounds {
		entries, err := c.List(t.Context(), u.key(t))
		if err != nil || len(entries) != keys {
			t.Errorf("%d entries: %v", len(entries), err)
			break
		}
		for i, e := range entries {
			changes[i] = discovery.Put(e.Key, fmt.Append(nil, round), e.Revision)
		}
		commit(t, c, changes...)
	}
}

// count adds one to a counter, however often that takes, and reports whether it
// knows that it has; sure is false where that is not known.
func count(ctx context.Context, c Client, k discovery.Key) (sure bool, err error) {
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
		_, err = c.Commit(ctx, discovery.Put(k, binary.BigEndian.AppendUint64(nil, n+1), e.Revision))
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
	for name, client := range map[string]func(testing.TB) Client{"all answers come": s.Client, "answers are lost": s.Lossy} {
		t.Run(name, func(t *testing.T) {
			const writers, each = 8, 25
			k := u.key(t, "counter")
			ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
			defer cancel()
			var known, unknown atomic.Uint64
			var writing sync.WaitGroup
			for range writers {
				c := client(t)
				writing.Go(func() {
					for range each {
						sure, err := count(ctx, c, k)
						if err != nil {
							t.Error(err)
							return
						}
						if sure {
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
			t.Logf("the counter is %d, after %d updates that were made and %d that may have been", got, known.Load(), unknown.Load())
			if got < known.Load() || got > known.Load()+unknown.Load() {
				t.Errorf("the counter is %d, after %d updates that were made and %d that may have been", got, known.Load(), unknown.Load())
			}
			if known.Load() == 0 {
				t.Error("no update was made")
			}
		})
	}
}

func (u suite) testAnObserverIsToldAllAndThenChanges(t *testing.T, s Store) {
	c := s.Client(t)
	a, b, beside := u.key(t, "a"), u.key(t, "b", "c"), discovery.KeyOf(u.run, t.Name()+"2", "a")
	first := commit(t, c, discovery.Put(a, []byte("1"), 0))
	commit(t, c, discovery.Put(beside, []byte("1"), 0))
	observer := observe(t, s.Client(t), u.key(t))
	observer.holds(t, patience, map[discovery.Key]string{a: "1"})
	commit(t, c, discovery.Put(b, []byte("2"), 0))
	second := commit(t, c, discovery.Put(a, []byte("3"), first))
	observer.holds(t, patience, map[discovery.Key]string{a: "3", b: "2"})
	commit(t, c, discovery.Delete(a, second))
	observer.holds(t, patience, map[discovery.Key]string{b: "2"})
	if observer.resets != 1 {
		t.Errorf("it began %d times", observer.resets)
	}
	empty := observe(t, s.Client(t), u.key(t, "nothing"))
	empty.holds(t, patience, map[discovery.Key]string{})
}

func (u suite) testAnObserverConvergesAfterTheStoreIsBack(t *testing.T, s Store) {
	c := s.Client(t)
	a, b := u.key(t, "a"), u.key(t, "b")
	first := commit(t, c, discovery.Put(a, []byte("1"), 0))
	observer := observe(t, c, u.key(t))
	observer.holds(t, patience, map[discovery.Key]string{a: "1"})

	s.Stop(t)
	observer.wait(t, "it says that the store is gone", 10*time.Second, func() bool { return observer.lost != nil })
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if _, err := c.Get(ctx, a); !errors.Is(err, discovery.ErrUnavailable) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Get without a store: %v", err)
	}
	if _, err := c.Commit(ctx, discovery.Put(b, nil, 0)); !errors.Is(err, discovery.ErrUnavailable) && !errors.Is(err, discovery.ErrUnknown) {
		t.Errorf("Commit without a store: %v", err)
	}
	s.Start(t)
	other := s.Client(t)
	observer.wait(t, "it says that the store is back", 10*time.Second, func() bool { return observer.lost == nil })
	await(t, "a commit after the return", func() bool {
		_, err := other.Commit(t.Context(), discovery.Put(a, []byte("2"), first))
		return err == nil
	})
	commit(t, other, discovery.Put(b, []byte("3"), current(t, other, b)))
	observer.holds(t, 10*time.Second, map[discovery.Key]string{a: "2", b: "3"})

	s.Stop(t)
	s.Wipe(t)
	last := s.Client(t)
	await(t, "a commit after the wipe", func() bool {
		_, err := last.Commit(t.Context(), discovery.Put(b, []byte("4"), current(t, last, b)))
		return err == nil
	})
	observer.holds(t, 10*time.Second, map[discovery.Key]string{b: "4"})
}

// current returns the revision of an entry, 0 where there is none.
func current(t testing.TB, c Client, k discovery.Key) discovery.Revision {
	t.Helper()
	e, err := c.Get(t.Context(), k)
	if err != nil && !errors.Is(err, discovery.ErrNotFound) && !errors.Is(err, discovery.ErrUnavailable) {
		t.Fatal(err)
	}
	return e.Revision
}

// await asks every now and then.
func await(t testing.TB, what string, done func() bool) {
	t.Helper()
	late := after(patience)
	for pause := time.Millisecond; !done(); pause = min(2*pause, 100*time.Millisecond) {
		select {
		case <-after(pause):
		case <-late:
			t.Fatalf("not yet: %s", what)
		}
	}
}

func (u suite) testTenThousandKeys(t *testing.T, s Store) {
	const n = 10_000
	c := s.Client(t)
	observer := observe(t, s.Client(t), u.key(t))
	observer.holds(t, patience, map[discovery.Key]string{})
	begin := time.Now()
	for from := 0; from < n; from += discovery.MaxOperations {
		var changes []discovery.Operation
		for i := from; i < min(n, from+discovery.MaxOperations); i++ {
			changes = append(changes, discovery.Put(u.key(t, fmt.Sprintf("%05d", i)), []byte("value"), 0))
		}
		commit(t, c, changes...)
	}
	written := time.Since(begin)
	observer.wait(t, "all keys are seen", patience, func() bool { return len(observer.entries) == n })
	begin = time.Now()
	entries, err := c.List(t.Context(), u.key(t))
	if err != nil || len(entries) != n {
		t.Fatalf("%d entries are listed: %v", len(entries), err)
	}
	t.Logf("%d keys: written in %s, listed in %s, seen in %d changes", n, written.Round(time.Millisecond), time.Since(begin).Round(time.Millisecond), len(observer.changes))
	late := observe(t, s.Client(t), u.key(t))
	late.wait(t, "a late observer sees all keys", patience, func() bool { return len(late.entries) == n })
}
