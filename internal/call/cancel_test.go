package call_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// wait returns when so many items are in the queue, waiting or in flight.
func (b *bed) wait(d pipeline.Durability, items uint64) {
	b.t.Helper()
	testbed.Eventually(b.t, fmt.Sprint(items, " items in the queue"), func() bool {
		info, err := b.host.Queue(b.t.Context(), stage, d)
		return err == nil && info.Items == items
	})
}

// A gateway that has no time left fails the calls that are left.
func TestStopFailsCallsThatAreLeft(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.memoryQueue()
	answer := infer(t.Context(), b.service, ask("waits"))
	b.wait(pipeline.Memory, 1)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("no time")
	cancel(why)
	if err := b.stopsWith[b.service](ctx); !errors.Is(err, why) {
		t.Errorf("Stop returned %v", err)
	}
	fails(t, answer, fault.ShuttingDown)
}

func TestAbandonedItemIsNeverDelivered(t *testing.T) {
	t.Parallel()
	const calls = 400
	sums := &testbed.Counts{}
	b := newBed(t, metered(sums))
	b.memoryQueue()
	ctx, leave := context.WithCancel(t.Context())
	var calling sync.WaitGroup
	for range calls {
		calling.Go(func() {
			response, err := b.service.Infer(ctx, ask("abandoned"))
			if f := fault.From(err); err == nil || f.Reason != fault.Cancelled {
				t.Errorf("got %+v, %v", response, err)
			}
		})
	}
	b.wait(pipeline.Memory, calls)
	leave()
	calling.Wait()
	b.stops[b.service]()
	if got := sums.Of(cancelled("deleted")); got != calls {
		t.Errorf("%d of %d items were deleted: %v", got, calls, sums.All())
	}
	items := b.pulls(pipeline.Memory)
	answer := infer(t.Context(), b.gateway("another"), ask("wanted"))
	item := testbed.Receive(t, "item", items)
	if got := textOf(item.env.Parts); got != "wanted" {
		t.Errorf("item %q was delivered", got)
	}
	b.end(item.env, 1, []byte("done"))
	if got := testbed.Receive(t, "answer", answer); got.err != nil {
		t.Error(got.err)
	}
}

// The acknowledgement may come after the caller has left.
func TestItemIsDeletedThoughItsCallerLeftEarly(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.memoryQueue()
	sent := make(chan struct{}, 1)
	b.published(pipeline.Memory, func(*nats.Msg) { sent <- struct{}{} })
	for range 200 {
		ctx, leave := context.WithCancel(t.Context())
		answer := infer(ctx, b.service, ask("abandoned"))
		testbed.Receive(t, "item on its way", sent)
		leave()
		if got := testbed.Receive(t, "end of the call", answer); fault.From(got.err).Reason != fault.Cancelled {
			t.Errorf("got %+v, %v", got.response, got.err)
		}
	}
	b.wait(pipeline.Memory, 0)
	if items := b.pulls(pipeline.Memory); len(items) > 0 {
		t.Errorf("%d items came", len(items))
	}
}

func TestHostsAreNotifiedOfItemsInFlight(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	items, notices := b.pulls(pipeline.Memory), b.cancelMessages()
	for name, settle := range map[string]func(pulled) error{
		"in flight": func(pulled) error { return nil },
		"forwarded": func(p pulled) error { return p.delivery.Ack() },
	} {
		ctx, leave := context.WithCancel(t.Context())
		answer := infer(ctx, b.service, ask("x"))
		item := testbed.Receive(t, "item", items)
		if err := settle(item); err != nil {
			t.Fatal(err)
		}
		leave()
		testbed.Receive(t, "end of the call", answer)
		notice := testbed.Receive(t, name, notices)
		if notice.Mesh != mesh || notice.RequestID != item.env.RequestID || !notice.Deadline.Equal(item.env.Deadline) {
			t.Errorf("%s: got %+v", name, notice)
		}
	}
}

func TestDeadlineCancelsNothing(t *testing.T) {
	t.Parallel()
	sums := &testbed.Counts{}
	b := newBed(t, metered(sums))
	b.memoryQueue()
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	response, err := b.service.Infer(ctx, ask("x"))
	_ = wantFault(t, response, err, fault.DeadlineExceeded)
	// A caller that gives up at its own deadline may be gone a little before.
	soon, leave := context.WithCancel(t.Context())
	b.published(pipeline.Memory, func(*nats.Msg) { leave() })
	r := ask("x")
	r.Timeout = 90 * time.Millisecond
	if response, err := b.service.Infer(soon, r); err == nil {
		t.Errorf("answered with %+v", response)
	}
	leave()
	b.stops[b.service]()
	for _, how := range []string{"deleted", "notified", "failed"} {
		if n := sums.Of(cancelled(how)); n > 0 {
			t.Errorf("%d %s", n, how)
		}
	}
}

func TestUnreadStreamIsCancelled(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	items, notices := b.pulls(pipeline.Memory), b.cancelMessages()
	ended := make(chan error, 1)
	go func() {
		_, err := b.service.Stream(t.Context(), ask("x"), func(request.Chunk) error { return errors.New("broken pipe") })
		ended <- err
	}()
	item := testbed.Receive(t, "item", items)
	b.chunks(item.env, 1, 1)
	if err := testbed.Receive(t, "end of the stream", ended); fault.From(err).Reason != fault.Cancelled {
		t.Errorf("ended with %v", err)
	}
	if notice := testbed.Receive(t, "notice", notices); notice.RequestID != item.env.RequestID {
		t.Errorf("got %+v", notice)
	}
}

func TestAnyGatewayCancelsARequest(t *testing.T) {
	t.Parallel()
	for _, d := range []pipeline.Durability{pipeline.Memory, pipeline.File} {
		for _, through := range []string{"its own", "another"} {
			t.Run(string(d)+" through "+through, func(t *testing.T) {
				t.Parallel()
				sums := &testbed.Counts{}
				b := newBed(t, metered(sums))
				b.alive()
				b.ensureQueue(d)
				id := make(chan string, 1)
				b.published(d, func(msg *nats.Msg) { id <- string(b.decode(msg).RequestID) })
				asked := b.service
				if through == "another" {
					asked = b.gateway("another")
				}
				r := ask("x")
				r.Durability = d
				answer := infer(t.Context(), b.service, r)
				request := testbed.Receive(t, "item", id)
				if err := asked.Cancel(t.Context(), request); err != nil {
					t.Fatal(err)
				}
				got := testbed.Receive(t, "end of the call", answer)
				if f := wantFault(t, got.response, got.err, fault.Cancelled); f.Metadata["request_id"] != request {
					t.Errorf("got %v", f)
				}
				b.wait(d, 0)
				testbed.Eventually(t, "it is counted", func() bool { return sums.Of(cancelled("deleted")) == 1 })
				response, err := asked.Result(t.Context(), request, 0)
				if d == pipeline.Memory {
					_ = wantFault(t, response, err, fault.NotFound)
					return
				}
				_ = wantFault(t, response, err, fault.Cancelled)
			})
		}
	}
}

func TestCancelIsItsTenantsOnly(t *testing.T) {
	t.Parallel()
	for name, through := range map[string]func(*bed) *call.Service{
		"its gateway": func(b *bed) *call.Service { return b.service },
		"another":     func(b *bed) *call.Service { return b.gateway("another") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			b.alive()
			items, asked := b.pulls(pipeline.Memory), through(b)
			mine, others := budget.WithTenant(t.Context(), "mine"), budget.WithTenant(t.Context(), "other")
			kept := infer(mine, b.service, ask("kept"))
			item := testbed.Receive(t, "item", items)
			fence := infer(mine, b.service, ask("fence"))
			fenced := testbed.Receive(t, "item", items).env.RequestID
			// Cancel messages arrive in order.
			for _, of := range []context.Context{others, t.Context()} {
				if err := asked.Cancel(of, string(item.env.RequestID)); err != nil {
					t.Fatal(err)
				}
			}
			if err := asked.Cancel(mine, string(fenced)); err != nil {
				t.Fatal(err)
			}
			fails(t, fence, fault.Cancelled)
			b.end(item.env, 1, []byte("done"))
			if got := testbed.Receive(t, "answer", kept); got.err != nil {
				t.Error(got.err)
			}
		})
	}
}

// The first result wins: a host that has the item in flight may be quicker.
func TestCancelKeepsAStoredResult(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.File)
	answer := infer(t.Context(), b.service, durable("x"))
	item := testbed.Receive(t, "item", items)
	b.store(item.env, "stored")
	if err := b.service.Cancel(t.Context(), string(item.env.RequestID)); err != nil {
		t.Fatal(err)
	}
	got := testbed.Receive(t, "end of the call", answer)
	_ = wantFault(t, got.response, got.err, fault.Cancelled)
	b.stops[b.service]()
	response, err := b.gateway("another").Result(t.Context(), string(item.env.RequestID), 0)
	if err != nil || textOf(response.Outputs) != "stored" {
		t.Errorf("the result: %+v, %v", response, err)
	}
}

func TestCancelOfAnUnknownRequestNotifiesHosts(t *testing.T) {
	t.Parallel()
	sums := &testbed.Counts{}
	b := newBed(t, metered(sums))
	notices := b.cancelMessages()
	id := uuid.NewString()
	if err := b.service.Cancel(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	notice := testbed.Receive(t, "notice", notices)
	if string(notice.RequestID) != id || !notice.Deadline.IsZero() {
		t.Errorf("got %+v", notice)
	}
	for _, bad := range []string{"", "x", "urn:uuid:" + id, "{" + id + "}", id[:8] + id[9:13] + id[14:18] + id[19:23] + id[24:], id + "\n", "a.b.>"} {
		err := b.service.Cancel(t.Context(), bad)
		if f := fault.From(err); err == nil || f.Reason != fault.InvalidRequest {
			t.Errorf("%q: %v", bad, err)
		}
		response, err := b.service.Result(t.Context(), bad, 0)
		_ = wantFault(t, response, err, fault.InvalidRequest)
	}
	b.broker.Stop()
	testbed.Eventually(t, "the connection is lost", func() bool { return b.service.Ready() != nil })
	if err := b.service.Cancel(t.Context(), id); fault.From(err).Reason != fault.BrokerUnavailable {
		t.Errorf("without a broker: %v", err)
	}
	if noticed, failed := sums.Of(cancelled("notified")), sums.Of(cancelled("failed")); noticed != 1 || failed != 1 {
		t.Errorf("counted %v", sums.All())
	}
	b.broker.Restore()
}

// A full gateway still cancels its own requests, which makes space.
func TestCancelByIDIsAdmittedLikeARequest(t *testing.T) {
	t.Parallel()
	b := newBed(t, func(s *call.Settings) { s.MaxInFlight = 1 })
	b.alive()
	items := b.pulls(pipeline.Memory)
	answer := infer(t.Context(), b.service, ask("x"))
	item := testbed.Receive(t, "item", items)
	if err := b.service.Cancel(t.Context(), uuid.NewString()); fault.From(err).Reason != fault.Overloaded {
		t.Errorf("another's request: %v", err)
	}
	if err := b.service.Cancel(t.Context(), string(item.env.RequestID)); err != nil {
		t.Error(err)
	}
	fails(t, answer, fault.Cancelled)
}

func TestMalformedCancelIsCountedAndDropped(t *testing.T) {
	t.Parallel()
	sums := &testbed.Counts{}
	b := newBed(t, metered(sums))
	b.alive()
	items := b.pulls(pipeline.Memory)
	answer := infer(t.Context(), b.service, ask("x"))
	item := testbed.Receive(t, "item", items)
	foreign, err := (&envelope.Cancel{Mesh: "other", RequestID: item.env.RequestID, Deadline: time.Now()}).Encode()
	if err != nil {
		t.Fatal(err)
	}
	notices := [][]byte{nil, []byte("garbage"), foreign}
	for _, data := range notices {
		if err := b.nc.Publish(b.host.Subjects.Cancel(), data); err != nil {
			t.Fatal(err)
		}
	}
	testbed.Eventually(t, "they are counted", func() bool {
		return sums.Of("stagemesh.gateway.dropped_replies malformed_cancel") == int64(len(notices))
	})
	b.end(item.env, 1, []byte("done"))
	if got := testbed.Receive(t, "answer", answer); got.err != nil {
		t.Error(got.err)
	}
}
