package call

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

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// plenty is more than the calls of a test leave unread.
const plenty = 1 << 30

// register adds a call with a buffer for so many chunks.
func register(t testing.TB, table *table, id string, chunks int, stages ...pipeline.StageName) *pending {
	t.Helper()
	return registerWith(t, table, id, chunkBuffer{chunks, 1 << 20}, stages...)
}

func registerWith(t testing.TB, table *table, id string, buffer chunkBuffer, stages ...pipeline.StageName) *pending {
	t.Helper()
	p := &pending{execution: pipeline.ExecutionID(id), env: requestOf(id), stages: stages}
	if p.env.TakesChunks = buffer != (chunkBuffer{}); p.env.TakesChunks {
		table.limits.replies, table.limits.bytes = buffer.replies, buffer.bytes
	}
	if err := table.register(p); err != nil {
		t.Fatal(err)
	}
	return p
}

// chunkBuffer bounds the unread chunks of a table's calls; the zero one is of a call
// that takes none.
type chunkBuffer struct{ replies, bytes int }

func tableOf(calls, shared int) *table { return newTable(tableLimits{calls: calls, shared: shared}) }

func lenOf(table *table) int {
	calls, _ := table.sizes()
	return calls
}

func reservedOf(table *table) int {
	_, reserved := table.sizes()
	return reserved
}

// requestOf is the request of an execution.
func requestOf(id string) *envelope.Envelope {
	return &envelope.Envelope{RequestID: pipeline.RequestID("request " + id)}
}

// failIf fails the calls that match, and returns how many.
func failIf(table *table, match func(*pending) bool, f *fault.Fault) int {
	n := 0
	table.each(func(p *pending) {
		if match(p) && p.failLocked(f) {
			n++
		}
	})
	return n
}

// unread returns the replies that wait to be read.
func unread(w *pending) []string {
	var out []string
	for {
		select {
		case <-w.ready:
		default:
			return out
		}
		if m := w.next().reply; m != nil {
			out = append(out, string(m.data))
		}
	}
}

// deliver delivers a message that came by the broker.
func deliver(t *table, id pipeline.ExecutionID, isFinal bool, data []byte) meshv1.ReplyDisposition {
	return t.deliver(id, isFinal, message{data: data, size: len(data)})
}

// faultOf returns the fault that ended the call, or nil.
func faultOf(w *pending) *fault.Fault {
	f, _ := w.outcome()
	return f
}

func isCancelled(w *pending) bool {
	_, is := w.outcome()
	return is
}

func TestEveryCallGetsItsOwnReply(t *testing.T) {
	t.Parallel()
	const calls = 500
	table := tableOf(calls, plenty)
	waiters := make([]*pending, calls)
	for i := range waiters {
		waiters[i] = register(t, table, strconv.Itoa(i), 1)
	}
	for i := calls - 1; i >= 0; i-- {
		id := strconv.Itoa(i)
		if got := deliver(table, pipeline.ExecutionID(id), true, []byte(id)); got != delivered {
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
	table := tableOf(1, plenty)
	w := register(t, table, "a", 4)
	for i, text := range []string{"1", "2", "3"} {
		if got := deliver(table, "a", i == 2, []byte(text)); got != delivered {
			t.Fatalf("message %s: %v", text, got)
		}
	}
	if got := unread(w); !slices.Equal(got, []string{"1", "2", "3"}) {
		t.Errorf("got %q", got)
	}
}

func TestReplyWithoutACallIsUnknown(t *testing.T) {
	t.Parallel()
	table := tableOf(1, plenty)
	if got := deliver(table, "never", true, nil); got != unknown {
		t.Errorf("before any call: %v", got)
	}
	register(t, table, "late", 1).forget()
	if got := deliver(table, "late", true, nil); got != unknown {
		t.Errorf("after the call: %v", got)
	}
}

func TestSecondFinalReplyIsADuplicate(t *testing.T) {
	t.Parallel()
	for name, terminal := range map[string]bool{"another end": true, "a chunk after the end": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			table := tableOf(1, plenty)
			w := register(t, table, "a", 4)
			deliver(table, "a", true, []byte("first"))
			if got := deliver(table, "a", terminal, []byte("second")); got != duplicate {
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
	table := tableOf(2, plenty)
	slow, other := register(t, table, "slow", 2), register(t, table, "other", 2)
	for i, want := range []meshv1.ReplyDisposition{delivered, delivered, overflow, overflow} {
		if got := deliver(table, "slow", false, []byte(strconv.Itoa(i))); got != want {
			t.Fatalf("message %d: %v, want %v", i, got, want)
		}
	}
	if f := faultOf(slow); f == nil || f.Reason != fault.SlowReader {
		t.Errorf("the slow call got %v", f)
	}
	if got := unread(slow); got != nil {
		t.Errorf("the slow call has %q to read", got)
	}
	if got := deliver(table, "slow", true, nil); got != overflow {
		t.Errorf("a failed call's end: %v", got)
	}
	if got := deliver(table, "other", true, []byte("x")); got != delivered || faultOf(other) != nil {
		t.Errorf("the other call's answer: %v", got)
	}
}

func TestCallWithoutBufferGetsTheFinalReply(t *testing.T) {
	t.Parallel()
	table := tableOf(1, plenty)
	w := registerWith(t, table, "a", chunkBuffer{})
	for i := range 1000 {
		if got := deliver(table, "a", false, []byte("chunk")); got != delivered {
			t.Fatalf("chunk %d: %v", i, got)
		}
	}
	if got := deliver(table, "a", true, []byte("answer")); got != delivered || faultOf(w) != nil {
		t.Errorf("the answer: %v", got)
	}
	if got := unread(w); !slices.Equal(got, []string{"answer"}) {
		t.Errorf("the call has %q to read", got)
	}
}

func TestFinalReplyFitsBesideItsChunks(t *testing.T) {
	t.Parallel()
	table := tableOf(1, plenty)
	w := registerWith(t, table, "a", chunkBuffer{2, 8})
	for _, chunk := range []string{"1234", "5678"} {
		deliver(table, "a", false, []byte(chunk))
	}
	if got := deliver(table, "a", true, []byte("answer")); got != delivered {
		t.Errorf("the answer: %v", got)
	}
	if got := unread(w); !slices.Equal(got, []string{"1234", "5678", "answer"}) {
		t.Errorf("the call has %q to read", got)
	}
}

func TestUnreadChunksAreBounded(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		buffer chunkBuffer
		chunks []string
		want   meshv1.ReplyDisposition
	}{
		"as many as may be":        {chunkBuffer{3, 100}, []string{"1", "2", "3"}, delivered},
		"one too many":             {chunkBuffer{3, 100}, []string{"1", "2", "3", "4"}, overflow},
		"as large as may be":       {chunkBuffer{9, 4}, []string{"12", "34"}, delivered},
		"a byte too many":          {chunkBuffer{9, 4}, []string{"12", "345"}, overflow},
		"one of any size":          {chunkBuffer{9, 4}, []string{"12345678"}, delivered},
		"behind one of any size":   {chunkBuffer{9, 4}, []string{"12345678", "9"}, overflow},
		"empty, as many as may be": {chunkBuffer{2, 4}, []string{"", ""}, delivered},
		"empty, one too many":      {chunkBuffer{2, 4}, []string{"", "", ""}, overflow},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			table := tableOf(1, plenty)
			w := registerWith(t, table, "a", test.buffer)
			var got meshv1.ReplyDisposition
			for _, chunk := range test.chunks {
				got = deliver(table, "a", false, []byte(chunk))
			}
			if f := faultOf(w); got != test.want || (f != nil) != (test.want == overflow) {
				t.Errorf("the last chunk: %v, and the call has %v", got, f)
			}
		})
	}
}

// Calls with more unread bytes do not take another call's free unread bytes.
func TestCallsShareABoundOnUnreadBytes(t *testing.T) {
	t.Parallel()
	const shared = 100
	table := tableOf(4, shared)
	buffer := chunkBuffer{9, 1 << 20}
	own, greedy, modest := make([]byte, freeUnreadBytes), registerWith(t, table, "greedy", buffer), registerWith(t, table, "modest", buffer)
	chunk := func(id string, data []byte, want meshv1.ReplyDisposition) {
		t.Helper()
		if got := deliver(table, pipeline.ExecutionID(id), false, data); got != want {
			t.Fatalf("a chunk of %d bytes for the %s call: %v, want %v", len(data), id, got, want)
		}
	}
	chunk("greedy", own, delivered)
	chunk("greedy", make([]byte, shared), delivered)
	if got := reservedOf(table); got != shared {
		t.Errorf("%d bytes are reserved, want %d", got, shared)
	}
	for range 2 {
		chunk("modest", own[:freeUnreadBytes/2], delivered)
	}
	chunk("modest", []byte("x"), overflow)
	if f := faultOf(modest); f == nil || f.Reason != fault.SlowReader {
		t.Errorf("the call that asks for more than there is: %v", f)
	}
	unread(greedy)
	if got := reservedOf(table); got != 0 {
		t.Errorf("%d bytes are reserved after all was read", got)
	}
	registerWith(t, table, "third", buffer)
	chunk("third", own, delivered)
	chunk("third", make([]byte, shared), delivered)
	chunk("greedy", own, delivered)
	chunk("greedy", []byte("x"), overflow)
	if got := reservedOf(table); got != shared {
		t.Errorf("%d bytes are reserved after a call failed, want %d", got, shared)
	}
}

func TestForgetFreesUnreadBytes(t *testing.T) {
	t.Parallel()
	table := tableOf(1, 1<<20)
	w := registerWith(t, table, "a", chunkBuffer{9, 1 << 20})
	for range 3 {
		deliver(table, "a", false, make([]byte, freeUnreadBytes))
	}
	if got := reservedOf(table); got != 2*freeUnreadBytes {
		t.Errorf("%d bytes are reserved", got)
	}
	w.forget()
	if got := reservedOf(table); got != 0 {
		t.Errorf("%d bytes are reserved after the call was forgotten", got)
	}
}

func TestReadingFreesSpace(t *testing.T) {
	t.Parallel()
	table := tableOf(1, plenty)
	w := registerWith(t, table, "a", chunkBuffer{2, 8})
	for i := range 1000 {
		for _, chunk := range []string{"1234", "5678"} {
			if got := deliver(table, "a", false, []byte(chunk)); got != delivered {
				t.Fatalf("round %d: %v", i, got)
			}
		}
		if got := unread(w); !slices.Equal(got, []string{"1234", "5678"}) {
			t.Fatalf("round %d: the call got %q", i, got)
		}
	}
	if m := w.next().reply; m != nil {
		t.Errorf("after all that came: %q", m.data)
	}
}

func TestFailEndsOnlyACallThatWaits(t *testing.T) {
	t.Parallel()
	table := tableOf(4, plenty)
	waits := register(t, table, "waits", 1, "a", "b")
	elsewhere := register(t, table, "elsewhere", 1, "c")
	answered := register(t, table, "answered", 1, "a")
	deliver(table, "answered", true, nil)
	onA := func(p *pending) bool { return slices.Contains(p.stages, "a") }
	lost := fault.New(fault.QueueLost, "lost")
	if n := failIf(table, onA, lost); n != 1 {
		t.Errorf("%d calls failed, want 1", n)
	}
	if f := faultOf(waits); f != lost {
		t.Errorf("the call that waits got %v", f)
	}
	if faultOf(elsewhere) != nil || faultOf(answered) != nil {
		t.Error("another call failed too")
	}
	if n := failIf(table, onA, lost); n != 0 {
		t.Errorf("%d calls failed a second time", n)
	}
	if got := deliver(table, "waits", true, []byte("x")); got == delivered {
		t.Errorf("the failed call still takes its answer: %v", got)
	}
}

func TestCallKnowsSinceWhenItWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		table := tableOf(2, plenty)
		before := register(t, table, "before", 1)
		<-time.After(time.Second)
		created := time.Now()
		<-time.After(time.Second)
		after := register(t, table, "after", 1)
		n := failIf(table, func(p *pending) bool { return p.since.Before(created) }, fault.New(fault.QueueLost, ""))
		if n != 1 || faultOf(before) == nil || faultOf(after) != nil {
			t.Errorf("%d calls failed", n)
		}
	})
}

func TestTableIsBoundedInCalls(t *testing.T) {
	t.Parallel()
	table := tableOf(2, plenty)
	first := register(t, table, "1", 1)
	register(t, table, "2", 1)
	if err := table.register(&pending{execution: "3"}); !errors.Is(err, errTableFull) || lenOf(table) != 2 {
		t.Fatalf("got %v with %d calls", err, lenOf(table))
	}
	first.forget()
	register(t, table, "3", 1)
	if got := lenOf(table); got != 2 {
		t.Errorf("%d calls wait", got)
	}
}

func TestExecutionIsRegisteredOnce(t *testing.T) {
	t.Parallel()
	table := tableOf(2, plenty)
	w := register(t, table, "a", 1)
	if err := table.register(&pending{execution: "a"}); !errors.Is(err, errDuplicateCall) || lenOf(table) != 1 {
		t.Fatalf("got %v with %d calls", err, lenOf(table))
	}
	if got := deliver(table, "a", true, []byte("x")); got != delivered || len(unread(w)) != 1 {
		t.Errorf("the first call lost its entry: %v", got)
	}
}

func TestForgettingTwiceFreesOneEntry(t *testing.T) {
	t.Parallel()
	table := tableOf(2, plenty)
	w := register(t, table, "a", 1)
	w.forget()
	again := register(t, table, "a", 1)
	w.forget()
	if got := lenOf(table); got != 1 {
		t.Errorf("%d calls wait, want 1", got)
	}
	if got := deliver(table, "a", true, []byte("x")); got != delivered || len(unread(again)) != 1 {
		t.Errorf("the call of the same id is gone: %v", got)
	}
}

func TestCancelFindsACallByItsRequest(t *testing.T) {
	t.Parallel()
	table := tableOf(4, plenty)
	waits, other := register(t, table, "waits", 1), register(t, table, "other", 1)
	answered := register(t, table, "answered", 1)
	deliver(table, "answered", true, []byte("x"))
	register(t, table, "forgotten", 1).forget()
	cancelled := fault.New(fault.Cancelled, "cancelled")
	for id, want := range map[string]bool{"waits": true, "answered": true, "forgotten": false, "never": false} {
		for range 2 { // the second one changes nothing
			if got := table.cancel(requestOf(id).RequestID, "", cancelled); got != want {
				t.Errorf("%s: found %t", id, got)
			}
		}
	}
	if f := faultOf(waits); f != cancelled || !isCancelled(waits) {
		t.Errorf("the cancelled call got %v", f)
	}
	if faultOf(other) != nil || isCancelled(other) {
		t.Error("another call was cancelled too")
	}
	if faultOf(answered) != nil || isCancelled(answered) || len(unread(answered)) != 1 {
		t.Error("the answered call lost its answer")
	}
}

func TestRenamedCallGetsRepliesOfItsNewID(t *testing.T) {
	t.Parallel()
	table := tableOf(1, plenty)
	p := register(t, table, "old", 1)
	p.rename("new")
	if got := deliver(table, "old", true, nil); got != unknown {
		t.Errorf("a reply to the old ID: %v", got)
	}
	if got := deliver(table, "new", true, []byte("x")); got != delivered || len(unread(p)) != 1 {
		t.Errorf("a reply to the new ID: %v", got)
	}
	if !table.cancel(requestOf("old").RequestID, "", nil) {
		t.Error("its request is not found")
	}
	p.forget()
	if got := deliver(table, "new", true, nil); got != unknown || lenOf(table) != 0 {
		t.Errorf("after the call: %v with %d calls", got, lenOf(table))
	}
}

func TestEachVisitsPendingCalls(t *testing.T) {
	t.Parallel()
	table := tableOf(3, plenty)
	first, second := register(t, table, "1", 1, "a", "b"), register(t, table, "2", 1, "b", "c")
	register(t, table, "3", 1, "d").forget()
	var got []pipeline.StageName
	table.each(func(p *pending) {
		got = append(got, p.stages...)
		p.signalLocked(signals{hasNoHost: true})
	})
	slices.Sort(got)
	if !slices.Equal(got, []pipeline.StageName{"a", "b", "b", "c"}) {
		t.Errorf("got %v", got)
	}
	for _, p := range []*pending{first, second} {
		<-p.ready
		if e := p.next(); !e.hasNoHost || p.next().hasNoHost {
			t.Errorf("got %v", e)
		}
	}
}

// Every call ends in exactly one way, whatever happens at the same time: by its
// reply or by a fault.
func TestCallsEndOnceUnderConcurrency(t *testing.T) {
	t.Parallel()
	const callers, rounds = 16, 200
	table := tableOf(callers, plenty)
	var answers, faults, taken, matched atomic.Int64
	ids := make(chan pipeline.ExecutionID, callers)
	var deliverers, others, calls sync.WaitGroup
	for range 4 {
		deliverers.Go(func() {
			for id := range ids {
				for range 2 { // the second one is a duplicate, or too late
					if deliver(table, id, true, []byte(id)) == delivered {
						taken.Add(1)
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
				matched.Add(int64(failIf(table, func(p *pending) bool { return p.stages[0] == "odd" }, fault.New(fault.QueueLost, ""))))
			}
		}
	})
	for caller := range callers {
		calls.Go(func() {
			stage := []pipeline.StageName{"even", "odd"}[caller%2]
			for round := range rounds {
				id := pipeline.ExecutionID(fmt.Sprint(caller, "/", round))
				w := &pending{execution: id, env: requestOf(string(id)), stages: []pipeline.StageName{stage}}
				if err := table.register(w); err != nil {
					t.Error(err)
					return
				}
				ids <- id
				<-w.ready
				if e := w.next(); e.fault == nil {
					answers.Add(1)
					if string(e.reply.data) != string(id) {
						t.Errorf("call %s got the answer of %q", id, e.reply.data)
					}
				} else {
					faults.Add(1)
					if stage == "even" {
						t.Errorf("call %s: %v", id, e.fault)
					}
				}
				w.forget()
			}
		})
	}
	calls.Wait()
	close(ids)
	deliverers.Wait()
	close(done)
	others.Wait()
	if answers.Load() != taken.Load() || faults.Load() != matched.Load() || answers.Load()+faults.Load() != callers*rounds {
		t.Errorf("%d answers of %d delivered, %d faults of %d, for %d calls", answers.Load(), taken.Load(), faults.Load(), matched.Load(), callers*rounds)
	}
	if got := lenOf(table); got != 0 {
		t.Errorf("%d calls are left", got)
	}
}

func BenchmarkRegisterDeliverForget(b *testing.B) {
	table := tableOf(1<<20, plenty)
	stages := []pipeline.StageName{"a"}
	data := []byte("answer")
	var callers atomic.Int64
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		id := pipeline.ExecutionID(fmt.Sprint("01890a5d-ac96-774b-bcce-", callers.Add(1)))
		request := requestOf(string(id))
		for pb.Next() {
			w := &pending{execution: id, env: request, stages: stages}
			if err := table.register(w); err != nil {
				b.Error(err)
				return
			}
			if got := deliver(table, id, true, data); got != delivered {
				b.Errorf("got %v", got)
			}
			<-w.ready
			if w.next().reply == nil {
				b.Error("ready, and nothing to read")
			}
			w.forget()
		}
	})
}

// Final replies are no chunks: they leave the shared bytes to the streams.
func TestFinalRepliesTakeNoSharedBytes(t *testing.T) {
	t.Parallel()
	table := tableOf(3, 100)
	buffer := chunkBuffer{9, 1 << 20}
	whole, stream := registerWith(t, table, "whole", chunkBuffer{}), registerWith(t, table, "stream", buffer)
	deliver(table, "whole", true, make([]byte, 2*freeUnreadBytes))
	deliver(table, "stream", false, make([]byte, freeUnreadBytes))
	deliver(table, "stream", true, make([]byte, 2*freeUnreadBytes))
	if got := reservedOf(table); got != 0 {
		t.Errorf("%d bytes are reserved", got)
	}
	unread(whole)
	unread(stream)
	if got := reservedOf(table); got != 0 {
		t.Errorf("%d bytes are reserved after all was read", got)
	}
}

// A single chunk is reserved too, or a thousand calls could have one each.
func TestSingleLargeChunkTakesSharedBytes(t *testing.T) {
	t.Parallel()
	table := tableOf(2, freeUnreadBytes)
	registerWith(t, table, "first", chunkBuffer{9, 1})
	registerWith(t, table, "second", chunkBuffer{9, 1})
	if got := deliver(table, "first", false, make([]byte, 2*freeUnreadBytes)); got != delivered {
		t.Errorf("the chunk of the first call: %v", got)
	}
	if got := deliver(table, "second", false, make([]byte, 2*freeUnreadBytes)); got != overflow {
		t.Errorf("the chunk of the second call: %v", got)
	}
	if got := reservedOf(table); got != freeUnreadBytes {
		t.Errorf("%d bytes are reserved", got)
	}
}
