package bus

import (
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// requester sends messages that somebody acknowledges, many at a time, and
// hands each acknowledgement to the callback that was given with its message.
// One subscription serves all of them.
type requester struct {
	timeout time.Duration
	nc      *nats.Conn
	prefix  string
	next    atomic.Uint64
	shards  [requestShards]requestShard
	quit    chan struct{}
	done    chan struct{}
}

const (
	requestShards = 16
	sweepEvery    = 100 * time.Millisecond
	ackBacklog    = 1 << 16
)

type requestShard struct {
	mu      sync.Mutex
	pending map[uint64]pendingRequest
	closed  bool
}

type pendingRequest struct {
	done  func(*nats.Msg, error)
	until time.Time
}

func newRequester(timeout time.Duration) *requester {
	r := &requester{timeout: timeout, prefix: nats.NewInbox() + ".", quit: make(chan struct{}), done: make(chan struct{})}
	for i := range r.shards {
		r.shards[i].pending = map[uint64]pendingRequest{}
	}
	return r
}

func (r *requester) start(nc *nats.Conn) error {
	r.nc = nc
	sub, err := nc.Subscribe(r.prefix+"*", r.receive)
	if err != nil {
		return err
	}
	if err := sub.SetPendingLimits(ackBacklog, -1); err != nil {
		return err
	}
	go r.sweep()
	return nil
}

// stop ends the sweeper, waits for it and fails what still waits.
func (r *requester) stop() {
	close(r.quit)
	<-r.done
	for i := range r.shards {
		r.shards[i].mu.Lock()
		r.shards[i].closed = true
		r.shards[i].mu.Unlock()
	}
	r.failAll(ErrClosed)
}

// send publishes the message and calls done exactly once: with the answer, or
// with the reason why there is none. It may call done before it returns.
func (r *requester) send(msg *nats.Msg, done func(*nats.Msg, error)) {
	if r.nc.IsReconnecting() {
		// Whoever fails all for the lost connection might find this one before its publish
		// has failed, and call unknown what was never sent.
		done(nil, ErrDisconnected)
		return
	}
	token := r.next.Add(1)
	msg.Reply = r.prefix + strconv.FormatUint(token, 36)
	shard := &r.shards[token%requestShards]
	shard.mu.Lock()
	if shard.closed {
		shard.mu.Unlock()
		done(nil, ErrClosed)
		return
	}
	shard.pending[token] = pendingRequest{done: done, until: time.Now().Add(r.timeout)}
	shard.mu.Unlock()
	if err := r.nc.PublishMsg(msg); err != nil {
		if p, ok := shard.take(token); ok {
			p.done(nil, sendError(err))
		}
	}
}

func (s *requestShard) take(token uint64) (pendingRequest, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.pending[token]
	delete(s.pending, token)
	return p, ok
}

func (r *requester) receive(msg *nats.Msg) {
	token, err := strconv.ParseUint(strings.TrimPrefix(msg.Subject, r.prefix), 36, 64)
	if err != nil {
		return
	}
	if p, ok := r.shards[token%requestShards].take(token); ok {
		p.done(msg, nil)
	}
}

func (r *requester) sweep() {
	defer close(r.done)
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			r.fail(ErrUnknown, func(p pendingRequest) bool { return now.After(p.until) })
		case <-r.quit:
			return
		}
	}
}

func (r *requester) failAll(err error) {
	r.fail(err, func(pendingRequest) bool { return true })
}

func (r *requester) fail(err error, match func(pendingRequest) bool) {
	for i := range r.shards {
		for _, p := range r.shards[i].takeAll(match) {
			p.done(nil, err)
		}
	}
}

func (s *requestShard) takeAll(match func(pendingRequest) bool) []pendingRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []pendingRequest
	for token, p := range s.pending {
		if match(p) {
			out = append(out, p)
			delete(s.pending, token)
		}
	}
	return out
}

// noResponders reports whether the broker says that nobody listens.
func noResponders(msg *nats.Msg) bool {
	return len(msg.Data) == 0 && msg.Header.Get("Status") == "503"
}
