package correlate_test

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/gateway/correlate"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// plenty is more than the calls of a test leave unread.
const plenty = 1 << 30

// register adds a call with a buffer for so many chunks.
func register(t testing.TB, table *correlate.Table, id string, chunks int, stages ...pipeline.StageName) *correlate.Pending {
	t.Helper()
	return registerWith(t, table, id, correlate.Buffer{Replies: chunks, Bytes: 1 << 20}, stages...)
}

func registerWith(t testing.TB, table *correlate.Table, id string, buffer correlate.Buffer, stages ...pipeline.StageName) *correlate.Pending {
	t.Helper()
	w, err := table.Register(correlate.Call{Execution: pipeline.ExecutionID(id), Request: requestOf(id), Stages: stages, Buffer: buffer})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// requestOf is the request of an execution.
func requestOf(id string) pipeline.RequestID { return pipeline.RequestID("request " + id) }

// failIf fails the calls that match, and returns how many.
func failIf(table *correlate.Table, match func(*correlate.Pending) bool, f *fault.Fault) int {
	n := 0
	table.Each(func(p *correlate.Pending) {
		if match(p) && p.Fail(f) {
			n++
		}
	})
	return n
}

// unread returns the replies that wait to be read.
func unread(w *correlate.Pending) []string {
	var out []string
	for {
		select {
		case <-w.Ready():
		default:
			return out
		}
		if data, ok := w.Next(); ok {
			out = append(out, string(data))
		}
	}
}

// failed returns the fault that the call has got, or nil.
func failed(w *correlate.Pending) *fault.Fault {
	select {
	case f := <-w.Failed():
		return f
	default:
		return nil
	}
}

func TestEveryCallGetsItsOwnReply(t *testing.T) {
	t.Parallel()
	const calls = 500
	table := correlate.New(calls, plenty)
	waiters := make([]*correlate.Pending, calls)
	for i := range waiters {
		waiters[i] = register(t, table, strconv.Itoa(i), 1)
	}
	for i := calls - 1; i >= 0; i-- {
		id := strconv.Itoa(i)
		if got := table.Deliver(pipeline.ExecutionID(id), true, []byte(id)); got != correlate.Delivered {
			t.Fatalf("call %d: %v", i, got)
		}
	}
	for i, w := range waiters {
		if got := unread(w); !slices.Equal(got, []string{strconv.Itoa(i)}) {
			t.Errorf("call %d got %q", i, got)
		}
	}
}

func TestChunksComeInOrderBeforeTheFinalReply(t *testing.T) {
	t.Parallel()
	table := correlate.New(1, plenty)
	w := register(t, table, "a", 4)
	for i, text := range []string{"1", "2", "3"} {
		if got := table.Deliver("a", i == 2, []byte(text)); got != correlate.Delivered {
			t.Fatalf("message %s: %v", text, got)
		}
	}
	if got := unread(w); !slices.Equal(got, []string{"1", "2", "3"}) {
		t.Errorf("got %q", got)
	}
}

func TestReplyWithoutACallIsUnknown(t *testing.T) {
	t.Parallel()
	table := correlate.New(1, plenty)
	if got := table.Deliver("never", true, nil); got != correlate.Unknown {
		t.Errorf("before any call: %v", got)
	}
	register(t, table, "late", 1).Forget()
	if got := table.Deliver("late", true, nil); got != correlate.Unknown {
		t.Errorf("after the call: %v", got)
	}
}

func TestSecondFinalReplyIsADuplicate(t *testing.T) {
	t.Parallel()
	for name, terminal := range map[string]bool{"another end": true, "a chunk after the end": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			table := correlate.New(1, plenty)
			w := register(t, table, "a", 4)
			table.Deliver("a", true, []byte("first"))
			if got := table.Deliver("a", terminal, []byte("second")); got != correlate.Duplicate {
				t.Errorf("got %v", got)
			}
			if got := unread(w); !slices.Equal(got, []string{"first"}) {
				t.Errorf("the call got %q", got)
			}
		})
	}
}

func TestSlowReaderFailsAlone(t *testing.T) {
	t.Parallel()
	table := correlate.New(2, plenty)
	slow, other := register(t, table, "slow", 2), register(t, table, "other", 2)
	for i, want := range []correlate.Disposition{correlate.Delivered, correlate.Delivered, correlate.Overflow, correlate.Overflow} {
		if got := table.Deliver("slow", false, []byte(strconv.Itoa(i))); got != want {
			t.Fatalf("message %d: %v, want %v", i, got, want)
		}
	}
	if f := failed(slow); f == nil || f.Reason != fault.SlowReader {
		t.Errorf("the slow call got %v", f)
	}
	if f := failed(slow); f != nil {
		t.Errorf("the slow call failed twice: %v", f)
	}
	if got := unread(slow); got != nil {
		t.Errorf("the slow call has %q to read", got)
	}
	if got := table.Deliver("slow", true, nil); got != correlate.Overflow {
		t.Errorf("a failed call's end: %v", got)
	}
	if got := table.Deliver("other", true, []byte("x")); got != correlate.Delivered || failed(other) != nil {
		t.Errorf("the other call's answer: %v", got)
	}
}

func TestCallWithoutBufferGetsTheFinalReply(t *testing.T) {
	t.Parallel()
	table := correlate.New(1, plenty)
	w := registerWith(t, table, "a", correlate.Buffer{})
	for i := range 1000 {
		if got := table.Deliver("a", false, []byte("chunk")); got != correlate.Delivered {
			t.Fatalf("chunk %d: %v", i, got)
		}
	}
	if got := table.Deliver("a", true, []byte("answer")); got != correlate.Delivered || failed(w) != nil {
		t.Errorf("the answer: %v", got)
	}
	if got := unread(w); !slices.Equal(got, []string{"answer"}) {
		t.Errorf("the call has %q to read", got)
	}
}

func TestFinalReplyFitsBesideItsChunks(t *testing.T) {
	t.Parallel()
	table := correlate.New(1, plenty)
	w := registerWith(t, table, "a", correlate.Buffer{Replies: 2, Bytes: 8})
	for _, chunk := range []string{"1234", "5678"} {
		table.Deliver("a", false, []byte(chunk))
	}
	if got := table.Deliver("a", true, []byte("answer")); got != correlate.Delivered {
		t.Errorf("the answer: %v", got)
	}
	if got := unread(w); !slices.Equal(got, []string{"1234", "5678", "answer"}) {
		t.Errorf("the call has %q to read", got)
	}
}

func TestUnreadChunksAreBounded(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		buffer correlate.Buffer
		chunks []string
		want   correlate.Disposition
	}{
		"as many as may be":        {correlate.Buffer{Replies: 3, Bytes: 100}, []string{"1", "2", "3"}, correlate.Delivered},
		"one too many":             {correlate.Buffer{Replies: 3, Bytes: 100}, []string{"1", "2", "3", "4"}, correlate.Overflow},
		"as large as may be":       {correlate.Buffer{Replies: 9, Bytes: 4}, []string{"12", "34"}, correlate.Delivered},
		"a byte too many":          {correlate.Buffer{Replies: 9, Bytes: 4}, []string{"12", "345"}, correlate.Overflow},
		"one of any size":          {correlate.Buffer{Replies: 9, Bytes: 4}, []string{"12345678"}, correlate.Delivered},
		"behind one of any size":   {correlate.Buffer{Replies: 9, Bytes: 4}, []string{"12345678", "9"}, correlate.Overflow},
		"empty, as many as may be": {correlate.Buffer{Replies: 2, Bytes: 4}, []string{"", ""}, correlate.Delivered},
		"empty, one too many":      {correlate.Buffer{Replies: 2, Bytes: 4}, []string{"", "", ""}, correlate.Overflow},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			table := correlate.New(1, plenty)
			w := registerWith(t, table, "a", test.buffer)
			var got correlate.Disposition
			for _, chunk := range test.chunks {
				got = table.Deliver("a", false, []byte(chunk))
			}
			if f := failed(w); got != test.want || (f != nil) != (test.want == correlate.Overflow) {
				t.Errorf("the last chunk: %v, and the call has %v", got, f)
			}
		})
	}
}

// Calls with more unread bytes do not take another call's allowance.
func TestCallsShareABoundOnUnreadBytes(t *testing.T) {
	t.Parallel()
	const shared = 100
	table := correlate.New(4, shared)
	buffer := correlate.Buffer{Replies: 9, Bytes: 1 << 20}
	own, greedy, modest := make([]byte, correlate.Allowance), registerWith(t, table, "greedy", buffer), registerWith(t, table, "modest", buffer)
	deliver := func(id string, chunk []byte, want correlate.Disposition) {
		t.Helper()
		if got := table.Deliver(pipeline.ExecutionID(id), false, chunk); got != want {
			t.Fatalf("a chunk of %d bytes for the %s call: %v, want %v", len(chunk), id, got, want)
		}
	}
	deliver("greedy", own, correlate.Delivered)
	deliver("greedy", make([]byte, shared), correlate.Delivered)
	if got := table.Unread(); got != shared {
		t.Errorf("%d bytes are booked, want %d", got, shared)
	}
	for range 2 {
		deliver("modest", own[:correlate.Allowance/2], correlate.Delivered)
	}
	deliver("modest", []byte("x"), correlate.Overflow)
	if f := failed(modest); f == nil || f.Reason != fault.SlowReader {
		t.Errorf("the call that asks for more than there is: %v", f)
	}
	unread(greedy)
	if got := table.Unread(); got != 0 {
		t.Errorf("%d bytes are booked after all was read", got)
	}
	registerWith(t, table, "third", buffer)
	deliver("third", own, correlate.Delivered)
	deliver("third", make([]byte, shared), correlate.Delivered)
	deliver("greedy", own, correlate.Delivered)
	deliver("greedy", []byte("x"), correlate.Overflow)
	if got := table.Unread(); got != shared {
		t.Errorf("%d bytes are booked after a call failed, want %d", got, shared)
	}
}

func TestForgetFreesUnreadBytes(t *testing.T) {
	t.Parallel()
	table := correlate.New(1, 1<<20)
	w := registerWith(t, table, "a", correlate.Buffer{Replies: 9, Bytes: 1 << 20})
	for range 3 {
		table.Deliver("a", false, make([]byte, correlate.Allowance))
	}
	if got := table.Unread(); got != 2*correlate.Allowance {
		t.Errorf("%d bytes are booked", got)
	}
	w.Forget()
	if got := table.Unread(); got != 0 {
		t.Errorf("%d bytes are booked after the call was forgotten", got)
	}
}

func TestReadingFreesSpace(t *testing.T) {
	t.Parallel()
	table := correlate.New(1, plenty)
	w := registerWith(t, table, "a", correlate.Buffer{Replies: 2, Bytes: 8})
	for i := range 1000 {
		for _, chunk := range []string{"1234", "5678"} {
			if got := table.Deliver("a", false, []byte(chunk)); got != correlate.Delivered {
				t.Fatalf("round %d: %v", i, got)
			}
		}
		if got := unread(w); !slices.Equal(got, []string{"1234", "5678"}) {
			t.Fatalf("round %d: the call got %q", i, got)
		}
	}
	if data, ok := w.Next(); ok {
		t.Errorf("after all that came: %q", data)
	}
}

func TestFailEndsOnlyACallThatWaits(t *testing.T) {
	t.Parallel()
	table := correlate.New(4, plenty)
	waits := register(t, table, "waits", 1, "a", "b")
	elsewhere := register(t, table, "elsewhere", 1, "c")
	answered := register(t, table, "answered", 1, "a")
	table.Deliver("answered", true, nil)
	onA := func(p *correlate.Pending) bool { return slices.Contains(p.Stages, "a") }
	lost := fault.New(fault.QueueLost, "lost")
	if n := failIf(table, onA, lost); n != 1 {
		t.Errorf("%d calls failed, want 1", n)
	}
	if f := failed(waits); f != lost {
		t.Errorf("the call that waits got %v", f)
	}
	if failed(elsewhere) != nil || failed(answered) != nil {
		t.Error("another call failed too")
	}
	if n := failIf(table, onA, lost); n != 0 {
		t.Errorf("%d calls failed a second time", n)
	}
	if got := table.Deliver("waits", true, nil); got == correlate.Delivered {
		t.Errorf("the failed call still takes its answer: %v", got)
	}
}

func TestCallKnowsSinceWhenItWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		table := correlate.New(2, plenty)
		before := register(t, table, "before", 1)
		<-time.After(time.Second)
		created := time.Now()
		<-time.After(time.Second)
		after := register(t, table, "after", 1)
		n := failIf(table, func(p *correlate.Pending) bool { return p.Since.Before(created) }, fault.New(fault.QueueLost, ""))
		if n != 1 || failed(before) == nil || failed(after) != nil {
			t.Errorf("%d calls failed", n)
		}
	})
}

func TestTableIsBoundedInCalls(t *testing.T) {
	t.Parallel()
	table := correlate.New(2, plenty)
	first := register(t, table, "1", 1)
	register(t, table, "2", 1)
	if w, err := table.Register(correlate.Call{Execution: "3"}); !errors.Is(err, correlate.ErrFull) || w != nil || table.Len() != 2 {
		t.Fatalf("got %v, %v with %d calls", w, err, table.Len())
	}
	first.Forget()
	register(t, table, "3", 1)
	if got := table.Len(); got != 2 {
		t.Errorf("%d calls wait", got)
	}
}

func TestExecutionIsRegisteredOnce(t *testing.T) {
	t.Parallel()
	table := correlate.New(2, plenty)
	w := register(t, table, "a", 1)
	if again, err := table.Register(correlate.Call{Execution: "a"}); !errors.Is(err, correlate.ErrDuplicate) || again != nil || table.Len() != 1 {
		t.Fatalf("got %v, %v with %d calls", again, err, table.Len())
	}
	if got := table.Deliver("a", true, []byte("x")); got != correlate.Delivered || len(unread(w)) != 1 {
		t.Errorf("the first call lost its entry: %v", got)
	}
}

func TestForgettingTwiceFreesOneEntry(t *testing.T) {
	t.Parallel()
	table := correlate.New(2, plenty)
	w := register(t, table, "a", 1)
	w.Forget()
	again := register(t, table, "a", 1)
	w.Forget()
	if got := table.Len(); got != 1 {
		t.Errorf("%d calls wait, want 1", got)
	}
	if got := table.Deliver("a", true, nil); got != correlate.Delivered || len(unread(again)) != 1 {
		t.Errorf("the call of the same id is gone: %v", got)
	}
}

func TestCancelFindsACallByItsRequest(t *testing.T) {
	t.Parallel()
	table := correlate.New(4, plenty)
	waits, other := register(t, table, "waits", 1), register(t, table, "other", 1)
	answered := register(t, table, "answered", 1)
	table.Deliver("answered", true, []byte("x"))
	register(t, table, "forgotten", 1).Forget()
	cancelled := fault.New(fault.Cancelled, "cancelled")
	for id, want := range map[string]bool{"waits": true, "answered": true, "forgotten": false, "never": false} {
		for range 2 { // the second one changes nothing
			if got := table.Cancel(requestOf(id), cancelled); got != want {
				t.Errorf("%s: found %t", id, got)
			}
		}
	}
	if f := failed(waits); f != cancelled || !waits.IsCancelled() {
		t.Errorf("the cancelled call got %v", f)
	}
	if failed(other) != nil || other.IsCancelled() {
		t.Error("another call was cancelled too")
	}
	if failed(answered) != nil || answered.IsCancelled() || len(unread(answered)) != 1 {
		t.Error("the answered call lost its answer")
	}
}

func TestRenamedCallGetsRepliesOfItsNewID(t *testing.T) {
	t.Parallel()
	table := correlate.New(1, plenty)
	p := register(t, table, "old", 1)
	p.Rename("new")
	if got := table.Deliver("old", true, nil); got != correlate.Unknown {
		t.Errorf("a reply to the old ID: %v", got)
	}
	if got := table.Deliver("new", true, []byte("x")); got != correlate.Delivered || len(unread(p)) != 1 {
		t.Errorf("a reply to the new ID: %v", got)
	}
	if !table.Cancel(requestOf("old"), nil) {
		t.Error("its request is not found")
	}
	p.Forget()
	if got := table.Deliver("new", true, nil); got != correlate.Unknown || table.Len() != 0 {
		t.Errorf("after the call: %v with %d calls", got, table.Len())
	}
}

func TestEachVisitsPendingCalls(t *testing.T) {
	t.Parallel()
	table := correlate.New(3, plenty)
	register(t, table, "1", 1, "a", "b")
	register(t, table, "2", 1, "b", "c")
	register(t, table, "3", 1, "d").Forget()
	var got []pipeline.StageName
	table.Each(func(p *correlate.Pending) {
		got = append(got, p.Stages...)
		p.SignalHostless()
		p.SignalHostless()
		<-p.Hostless()
	})
	slices.Sort(got)
	if !slices.Equal(got, []pipeline.StageName{"a", "b", "b", "c"}) {
		t.Errorf("got %v", got)
	}
}

// Every call ends in exactly one way, whatever happens at the same time: by its
// reply or by a fault.
func TestCallsEndOnceUnderConcurrency(t *testing.T) {
	t.Parallel()
	const callers, rounds = 16, 200
	table := correlate.New(callers, plenty)
	var answers, faults, delivered, matched atomic.Int64
	ids := make(chan pipeline.ExecutionID, callers)
	var deliverers, others, calls sync.WaitGroup
	for range 4 {
		deliverers.Go(func() {
			for id := range ids {
				for range 2 { // the second one is a duplicate, or too late
					if table.Deliver(id, true, []byte(id)) == correlate.Delivered {
						delivered.Add(1)
					}
				}
			}
		})
	}
	done := make(chan struct{})
	others.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				matched.Add(int64(failIf(table, func(p *correlate.Pending) bool { return p.Stages[0] == "odd" }, fault.New(fault.QueueLost, ""))))
			}
		}
	})
	for caller := range callers {
		calls.Go(func() {
			stage := []pipeline.StageName{"even", "odd"}[caller%2]
			for round := range rounds {
				id := pipeline.ExecutionID(fmt.Sprint(caller, "/", round))
				w, err := table.Register(correlate.Call{Execution: id, Request: requestOf(string(id)), Stages: []pipeline.StageName{stage}})
				if err != nil {
					t.Error(err)
					return
				}
				ids <- id
				select {
				case <-w.Ready():
					answers.Add(1)
					if data, ok := w.Next(); !ok || string(data) != string(id) {
						t.Errorf("call %s got the answer of %q", id, data)
					}
				case f := <-w.Failed():
					faults.Add(1)
					if stage == "even" {
						t.Errorf("call %s: %v", id, f)
					}
				}
				w.Forget()
			}
		})
	}
	calls.Wait()
	close(ids)
	deliverers.Wait()
	close(done)
	others.Wait()
	if answers.Load() != delivered.Load() || faults.Load() != matched.Load() || answers.Load()+faults.Load() != callers*rounds {
		t.Errorf("%d answers of %d delivered, %d faults of %d, for %d calls", answers.Load(), delivered.Load(), faults.Load(), matched.Load(), callers*rounds)
	}
	if got := table.Len(); got != 0 {
		t.Errorf("%d calls are left", got)
	}
}

func BenchmarkRegisterDeliverForget(b *testing.B) {
	table := correlate.New(1<<20, plenty)
	stages := []pipeline.StageName{"a"}
	data := []byte("answer")
	var callers atomic.Int64
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		id := pipeline.ExecutionID(fmt.Sprint("01890a5d-ac96-774b-bcce-", callers.Add(1)))
		request := requestOf(string(id))
		for pb.Next() {
			w, err := table.Register(correlate.Call{Execution: id, Request: request, Stages: stages})
			if err != nil {
				b.Error(err)
				return
			}
			if got := table.Deliver(id, true, data); got != correlate.Delivered {
				b.Errorf("got %v", got)
			}
			<-w.Ready()
			if _, ok := w.Next(); !ok {
				b.Error("ready, and nothing to read")
			}
			w.Forget()
		}
	})
}

// Final replies are no chunks: they leave the shared bytes to the streams.
func TestFinalRepliesTakeNoSharedBytes(t *testing.T) {
	t.Parallel()
	table := correlate.New(3, 100)
	buffer := correlate.Buffer{Replies: 9, Bytes: 1 << 20}
	whole, stream := registerWith(t, table, "whole", correlate.Buffer{}), registerWith(t, table, "stream", buffer)
	table.Deliver("whole", true, make([]byte, 2*correlate.Allowance))
	table.Deliver("stream", false, make([]byte, correlate.Allowance))
	table.Deliver("stream", true, make([]byte, 2*correlate.Allowance))
	if got := table.Unread(); got != 0 {
		t.Errorf("%d bytes are booked", got)
	}
	unread(whole)
	unread(stream)
	if got := table.Unread(); got != 0 {
		t.Errorf("%d bytes are booked after all was read", got)
	}
}

// A single chunk is booked too, or a thousand calls could have one each.
func TestSingleLargeChunkTakesSharedBytes(t *testing.T) {
	t.Parallel()
	table := correlate.New(2, correlate.Allowance)
	registerWith(t, table, "first", correlate.Buffer{Replies: 9, Bytes: 1})
	registerWith(t, table, "second", correlate.Buffer{Replies: 9, Bytes: 1})
	if got := table.Deliver("first", false, make([]byte, 2*correlate.Allowance)); got != correlate.Delivered {
		t.Errorf("the chunk of the first call: %v", got)
	}
	if got := table.Deliver("second", false, make([]byte, 2*correlate.Allowance)); got != correlate.Overflow {
		t.Errorf("the chunk of the second call: %v", got)
	}
	if got := table.Unread(); got != correlate.Allowance {
		t.Errorf("%d bytes are booked", got)
	}
}
