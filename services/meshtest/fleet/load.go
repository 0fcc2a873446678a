package fleet

import (
	"context"
	"math"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// LoadSpec says what a client sends.
type LoadSpec struct {
	Pipeline string
	// Requests is how many there are; 0 means as many as come until Enough.
	Requests int
	// InFlight requests are under way at once.
	InFlight int
	// Every is the time from one request to the next, as long as so many are not
	// under way; 0 is none.
	Every time.Duration
	// Prefix is what the texts begin with: Hold, or what sets them apart.
	Prefix string
	// Durable requests are stored, and so are their answers.
	Durable bool
	// Timeout is each request's; 0 leaves it to the gateway.
	Timeout time.Duration
	// Chunks is how many come before each answer; more than 0 asks for a stream.
	Chunks int
	// Through says who chooses the gateways.
	Through Balancer
	// HTTP2 sends many requests over one connection.
	HTTP2 bool
}

// Load is a client that sends requests, each with a text of its own, and knows
// what comes back.
type Load struct {
	fleet  *Fleet
	spec   LoadSpec
	client *http.Client
	ready  *readiness
	ticks  <-chan time.Time
	next   atomic.Int64
	limit  atomic.Int64
	done   chan struct{}

	// staying ends when the callers leave.
	staying context.Context
	leave   context.CancelFunc

	mu    sync.Mutex
	tally Tally
	last  time.Time
}

// Load starts to send.
func (f *Fleet) Load(s LoadSpec) *Load {
	l := &Load{
		fleet: f, spec: s, done: make(chan struct{}), ready: &readiness{fleet: f},
		tally: Tally{Refused: map[string]int{}}, last: time.Now(),
	}
	l.limit.Store(int64(s.Requests))
	if s.Requests == 0 {
		l.limit.Store(math.MaxInt64)
	}
	l.staying, l.leave = context.WithCancel(f.t.Context())
	transport := l.transport()
	l.client = &http.Client{Transport: transport}
	release := l.pace()
	go func() {
		defer close(l.done)
		l.run()
		release()
		l.leave()
		transport.CloseIdleConnections()
	}()
	return l
}

func (l *Load) transport() *http.Transport {
	transport := &http.Transport{MaxIdleConnsPerHost: l.spec.InFlight}
	if l.spec.HTTP2 {
		transport.Protocols = new(http.Protocols)
		transport.Protocols.SetUnencryptedHTTP2(true)
	} else {
		transport.MaxConnsPerHost = l.spec.InFlight
	}
	if l.spec.Through == Connections {
		transport.DialContext = l.ready.dial
		// A gateway that leaves closes what nobody used while it served on, and over HTTP/1
		// a request that is sent at that moment is lost.
		transport.IdleConnTimeout = UnusedFor
	}
	return transport
}

// pace makes the ticks, where there are any.
func (l *Load) pace() (release func()) {
	if l.spec.Every == 0 {
		return func() {}
	}
	ticker := time.NewTicker(l.spec.Every)
	l.ticks = ticker.C
	return ticker.Stop
}

func (l *Load) run() {
	begin := time.Now()
	stop := l.watch()
	defer stop()
	var senders sync.WaitGroup
	for range l.spec.InFlight {
		senders.Go(l.send)
	}
	senders.Wait()
	l.tally.Elapsed = time.Since(begin)
}

// watch looks at the gateways for as long as somebody chooses among them.
func (l *Load) watch() (stop func()) {
	if l.spec.Through == Nobody {
		return func() {}
	}
	ctx, cancel := context.WithCancel(l.fleet.t.Context())
	l.ready.look()
	var watching sync.WaitGroup
	watching.Go(func() { l.ready.watch(ctx) })
	return func() {
		cancel()
		watching.Wait()
	}
}

// Enough has nothing more sent, waits until what was sent has its answer, and
// returns what became of all.
func (l *Load) Enough() *Tally {
	l.limit.Store(0)
	return l.Wait()
}

// Leave has all callers give up, and nobody send any more.
func (l *Load) Leave() { l.leave() }

// Done is closed when every request has its answer.
func (l *Load) Done() <-chan struct{} { return l.done }

// Over reports whether every request has its answer.
func (l *Load) Over() bool {
	select {
	case <-l.done:
		return true
	default:
		return false
	}
}

// Choice returns how many gateways the balancer has to choose from, until the
// load is over.
func (l *Load) Choice() int { return len(l.ready.inTurn()) }

// Answered returns how many requests have an answer so far.
func (l *Load) Answered() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.tally.ended()
}

// Wait returns what became of all requests.
func (l *Load) Wait() *Tally {
	<-l.done
	return &l.tally
}

func (l *Load) send() {
	for l.turn() {
		i := l.next.Add(1) - 1
		if i >= l.limit.Load() {
			return
		}
		l.one(int(i))
	}
}

// turn waits for when the next request is due; false says that there is none.
func (l *Load) turn() bool {
	if l.ticks == nil {
		return l.staying.Err() == nil
	}
	if l.next.Load() >= l.limit.Load() {
		return false
	}
	select {
	case <-l.ticks:
		return true
	case <-l.staying.Done():
		return false
	}
}

func (l *Load) one(i int) {
	text := l.spec.Prefix + strconv.Itoa(i)
	begin := time.Now()
	h := l.ask(i, text)
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tally.Stall = max(l.tally.Stall, now.Sub(l.last))
	l.last = now
	l.tally.book(Answer{Text: text, Request: h.request, Body: h.body, Reason: h.reason, Took: now.Sub(begin), At: now}, h)
}
