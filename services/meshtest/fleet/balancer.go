package fleet

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"
)

// Balancer is who chooses the gateway of each request.
type Balancer int

// The balancers. All but Nobody send only to gateways whose /readyz says so, and
// go on to the next where a connection is refused.
const (
	// Nobody: the gateways get the requests in turn, whatever they say.
	Nobody Balancer = iota
	// Requests are distributed one by one, as by a proxy.
	Requests
	// Connections are distributed, and kept for as long as the gateway keeps
	// them, as by a virtual address.
	Connections
)

// String names it.
func (b Balancer) String() string { return [...]string{"nobody", "requests", "connections"}[b] }

// LookEvery is how often a balancer looks at each gateway.
const LookEvery = 50 * time.Millisecond

// UnusedFor is for how long callers keep a connection that they do not use. The drain
// delay of a gateway is longer.
const UnusedFor = 2 * LookEvery

// readiness is what a balancer knows of the gateways.
type readiness struct {
	fleet *Fleet

	mu    sync.Mutex
	addrs []string
	turn  int
}

func (r *readiness) watch(ctx context.Context) {
	tick := time.NewTicker(LookEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			r.look()
		case <-ctx.Done():
			return
		}
	}
}

func (r *readiness) look() {
	var ready []string
	for _, addr := range r.fleet.gatewayAddrs() {
		if status, _ := r.fleet.get("http://" + addr + "/readyz"); status == http.StatusOK {
			ready = append(ready, addr)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.addrs = ready
}

// inTurn returns the gateways that are ready, another one first each time.
func (r *readiness) inTurn() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for i := range r.addrs {
		out = append(out, r.addrs[(r.turn+i)%len(r.addrs)])
	}
	r.turn++
	return out
}

var errNoGateway = errors.New("no gateway is ready")

// through asks the gateway that the balancer chooses. With Connections it is
// chosen by dial.
func (r *readiness) through(b Balancer, i int, ask func(addr string) error) error {
	switch b {
	case Nobody:
		addrs := r.fleet.gatewayAddrs()
		return ask(addrs[i%len(addrs)])
	case Connections:
		return ask("balanced")
	}
	err := errNoGateway
	for _, addr := range r.inTurn() {
		if err = ask(addr); !errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
	}
	return err
}

func (r *readiness) dial(ctx context.Context, network, _ string) (net.Conn, error) {
	err := errNoGateway
	for _, addr := range r.inTurn() {
		var conn net.Conn
		if conn, err = (&net.Dialer{}).DialContext(ctx, network, addr); !errors.Is(err, syscall.ECONNREFUSED) {
			return conn, err
		}
	}
	return nil, err
}
