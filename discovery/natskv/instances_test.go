package natskv

import (
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

// watched is a follower with a clock, and what it reports.
type watched struct {
	*serviceFollower
	clock     time.Time
	snapshots []discovery.Snapshot
	lost      int
}

func newWatched() *watched {
	w := &watched{clock: time.Unix(1000, 0)}
	w.serviceFollower = &serviceFollower{
		service: "s", members: map[string]member{}, now: func() time.Time { return w.clock },
		update:      func(s discovery.Snapshot) { w.snapshots = append(w.snapshots, s) },
		disconnects: disconnects{report: func(error) { w.lost++ }},
	}
	return w
}

func (w *watched) renew(id, data string, sequence uint64) {
	w.take(&nats.Msg{Subject: "mesh.instances.s." + id, Data: []byte(data)}, sequence)
}

func (w *watched) expire(id string, sequence uint64) {
	w.take(&nats.Msg{Subject: "mesh.instances.s." + id, Header: nats.Header{jetstream.MarkerReasonHeader: {"MaxAge"}}}, sequence)
}

// check checks who is healthy after so many snapshots.
func (w *watched) check(t *testing.T, snapshots int, ids ...string) {
	t.Helper()
	w.flush()
	if len(w.snapshots) != snapshots {
		t.Fatalf("there were %d snapshots, want %d: %+v", len(w.snapshots), snapshots, w.snapshots)
	}
	var got []string
	for _, i := range w.snapshots[snapshots-1].Instances {
		got = append(got, i.ID)
	}
	if !slices.Equal(got, ids) {
		t.Fatalf("%v are healthy, want %v", got, ids)
	}
}

const serving = `{"serving":true}`

func stream(created int64, last uint64) *jetstream.StreamInfo {
	return &jetstream.StreamInfo{Created: time.Unix(created, 0), State: jetstream.StreamState{LastSeq: last}}
}

func TestOnlyChangesMakeSnapshots(t *testing.T) {
	t.Parallel()
	w := newWatched()
	w.begin(stream(1, 0))
	w.check(t, 1)
	w.renew("b", serving, 1)
	w.renew("a", serving, 2)
	w.check(t, 2, "a", "b")
	w.renew("a", serving, 3)
	w.renew("c", `{"serving":false}`, 4)
	w.check(t, 2, "a", "b")
	w.renew("a", `{"serving":false}`, 5)
	w.check(t, 3, "b")
	w.expire("b", 6)
	w.expire("c", 7)
	w.check(t, 4)
	w.renew("d", "no record", 8)
	w.renew("e", `{"serving":true,"address":"nowhere"}`, 9)
	w.check(t, 4)
}

func TestInstancesOutliveTheirStreamBriefly(t *testing.T) {
	t.Parallel()
	w := newWatched()
	w.begin(stream(1, 0))
	w.renew("a", serving, 1)
	w.renew("b", serving, 2)
	w.renew("c", serving, 3)
	w.check(t, 1, "a", "b", "c")
	w.disconnect(errLost)
	w.disconnect(errLost)
	if w.lost != 1 {
		t.Errorf("a disconnect was reported %d times", w.lost)
	}
	w.begin(stream(2, 100))
	w.check(t, 2, "a", "b", "c")
	w.renew("a", serving, 101)
	w.expire("c", 102)
	w.check(t, 3, "a", "b")
	w.clock = w.clock.Add(keepLost + time.Nanosecond)
	w.check(t, 4, "a")
}

func TestInstancesMissingFromStreamAreDropped(t *testing.T) {
	t.Parallel()
	w := newWatched()
	w.begin(stream(1, 0))
	w.renew("a", serving, 1)
	w.check(t, 1, "a")
	w.begin(stream(1, 2))
	w.check(t, 2)
}

func TestStreamThatGoesBackCountsAsNew(t *testing.T) {
	t.Parallel()
	w := newWatched()
	w.begin(stream(1, 0))
	w.renew("a", serving, 50)
	w.check(t, 1, "a")
	w.begin(stream(1, 10))
	w.check(t, 2, "a")
}
