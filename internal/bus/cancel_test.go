package bus_test

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func deleteQueued(t *testing.T, b *bus.Bus, m bus.Message, seq uint64) bool {
	t.Helper()
	was, err := b.DeleteQueued(t.Context(), m, seq)
	if err != nil {
		t.Fatalf("delete: %v", err)
	}
	return was
}

func TestDeletedQueuedItemsAreNeverDelivered(t *testing.T) {
	t.Parallel()
	b, s := testbed.StartBroker(t).Connect(mesh), queue()
	info := ensure(t, b, s)
	for i := range 100 {
		m := message(t, b, item(strconv.Itoa(i)))
		receipt, err := send(t, b, m)
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 && !deleteQueued(t, b, m, receipt.Seq) {
			t.Errorf("item %d was not there", i)
		}
	}
	h := pull(t, b, s, 8)
	h.Use(info.Epoch)
	for i := 1; i < 100; i += 2 {
		d := h.next(t)
		if got := text(t, d.Data); got != strconv.Itoa(i) {
			t.Errorf("item %s came, want %d", got, i)
		}
		h.ack(t, d)
	}
	awaitItems(t, b, s, 0)
}

func TestDeleteQueuedDeletesOnlyItsItem(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, s := broker.Connect(mesh), queue()
	mine := message(t, b, item("mine"))
	if _, err := b.DeleteQueued(t.Context(), mine, 1); err != nil {
		t.Errorf("without a queue: %v", err)
	}
	ensure(t, b, s)
	if deleteQueued(t, b, mine, 1) {
		t.Error("an item was there that nobody sent")
	}
	receipt, err := send(t, b, message(t, b, item("another's")))
	if err != nil {
		t.Fatal(err)
	}
	if deleteQueued(t, b, mine, receipt.Seq) {
		t.Error("another's item was taken")
	}
	if n := items(t, b, s); n != 1 {
		t.Errorf("%d items are left, want the one of another", n)
	}
	sent, err := send(t, b, mine)
	if err != nil {
		t.Fatal(err)
	}
	if !deleteQueued(t, b, mine, sent.Seq) || deleteQueued(t, b, mine, sent.Seq) {
		t.Error("an item is not deleted exactly once")
	}
}

func TestCancelNoticesReachTheWholeMeshOnly(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	received := make(chan string, 8)
	for i, name := range []string{"test", "test", "other"} {
		stop, err := broker.Connect(mesh, func(s *bus.Settings) {
			if name == "other" {
				s.Mesh = "other"
			}
		}).ServeCancels(func(data []byte) {
			c, err := envelope.DecodeCancel(data)
			if err != nil {
				t.Error(err)
				return
			}
			received <- fmt.Sprint(i, c.Mesh, c.RequestID, c.Deadline.Unix())
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := stop(); err != nil {
				t.Error(err)
			}
		})
	}
	e := item("")
	if err := broker.Connect(mesh).Cancel(&envelope.Cancel{Mesh: mesh, RequestID: e.RequestID, Deadline: time.Unix(1000, 0)}); err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{testbed.Receive(t, "notice", received): true, testbed.Receive(t, "notice", received): true}
	for i := range 2 {
		if want := fmt.Sprint(i, mesh, e.RequestID, 1000); !got[want] {
			t.Errorf("received %v, want %s", got, want)
		}
	}
}
