package natskv

import (
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

// watched is members with a clock, and what they tell.
type watched struct {
	*members
	clock time.Time
	seen  []discovery.Snapshot
	lost  int
}

func newWatched() *watched {
	w := &watched{clock: time.Unix(1000, 0)}
	w.members = &members{
		service: "s", known: map[string]member{}, now: func() time.Time { return w.clock },
		see:   func(s discovery.Snapshot) { w.seen = append(w.seen, s) },
		downs: downs{lost: func(error) { w.lost++ }},
	}
	return w
}

func (w *watched) beat(id, data string, sequence uint64) {
	w.take(&nats.Msg{Subject: "mesh.instances.s." + id, Data: []byte(data)}, sequence)
}

func (w *watched) expire(id string, sequence uint64) {
	w.take(&nats.Msg{Subject: "mesh.instances.s." + id, Header: nats.Header{jetstream.MarkerReasonHeader: {"MaxAge"}}}, sequence)
}

// sees says who is seen after so many snapshots.
func (w *watched) sees(t *testing.T, snapshots int, ids ...string) {
	t.Helper()
	w.settle()
	if len(w.seen) != snapshots {
		t.Fatalf("there were %d snapshots, want %d: %+v", len(w.seen), snapshots, w.seen)
	}
	var got []string
	for _, i := range w.seen[snapshots-1].Instances {
		got = append(got, i.ID)
	}
	if !slices.Equal(got, ids) {
		t.Fatalf("%v are seen, want %v", got, ids)
	}
}

const serving = `{"serving":true}`

func stream(made int64, last uint64) *jetstream.StreamInfo {
	return &jetstream.StreamInfo{Created: time.Unix(made, 0), State: jetstream.StreamState{LastSeq: last}}
}

func TestOnlyChangesOfInstancesAreTold(t *testing.T) {
	t.Parallel()
	w := newWatched()
	w.begin(stream(1, 0))
	w.sees(t, 1)
	w.beat("b", serving, 1)
	w.beat("a", serving, 2)
	w.sees(t, 2, "a", "b")
	w.beat("a", serving, 3)
	w.beat("c", `{"serving":false}`, 4)
	w.sees(t, 2, "a", "b")
	w.beat("a", `{"serving":false}`, 5)
	w.sees(t, 3, "b")
	w.expire("b", 6)
	w.expire("c", 7)
	w.sees(t, 4)
	w.beat("d", "no record", 8)
	w.beat("e", `{"serving":true,"address":"nowhere"}`, 9)
	w.sees(t, 4)
}

func TestInstancesOfALostStreamAreKeptForAWhile(t *testing.T) {
	t.Parallel()
	w := newWatched()
	w.begin(stream(1, 0))
	w.beat("a", serving, 1)
	w.beat("b", serving, 2)
	w.beat("c", serving, 3)
	w.sees(t, 1, "a", "b", "c")
	w.lose(errLost)
	w.lose(errLost)
	if w.lost != 1 {
		t.Errorf("a loss was told %d times", w.lost)
	}
	w.begin(stream(2, 100))
	w.sees(t, 2, "a", "b", "c")
	w.beat("a", serving, 101)
	w.expire("c", 102)
	w.sees(t, 3, "a", "b")
	w.clock = w.clock.Add(grace + time.Nanosecond)
	w.sees(t, 4, "a")
}

func TestInstancesThatAStreamHasNoMoreAreGone(t *testing.T) {
	t.Parallel()
	w := newWatched()
	w.begin(stream(1, 0))
	w.beat("a", serving, 1)
	w.sees(t, 1, "a")
	w.begin(stream(1, 2))
	w.sees(t, 2)
}

func TestAStreamThatHasGoneBackIsAnother(t *testing.T) {
	t.Parallel()
	w := newWatched()
	w.begin(stream(1, 0))
	w.beat("a", serving, 50)
	w.sees(t, 1, "a")
	w.begin(stream(1, 10))
	w.sees(t, 2, "a")
}
