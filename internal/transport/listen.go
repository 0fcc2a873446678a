package transport

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

type keeperKey struct{}

// keeper has the listeners of a context, in the order in which they were opened.
type keeper struct {
	mu   sync.Mutex
	kept []*keptListener
}

// KeepListeners returns a context with which Listen keeps what it opens, until closeAll. A server
// that closes its listeners, and listens on the same addresses in the same order, gets them again,
// with the connections that came meanwhile: also on port 0.
func KeepListeners(ctx context.Context) (_ context.Context, closeAll func()) {
	k := &keeper{}
	return context.WithValue(ctx, keeperKey{}, k), func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		for _, l := range k.kept {
			_ = l.TCPListener.Close()
		}
	}
}

// Listen listens on a TCP address.
func Listen(ctx context.Context, address string) (net.Listener, error) {
	k, _ := ctx.Value(keeperKey{}).(*keeper)
	if k == nil {
		return new(net.ListenConfig).Listen(ctx, "tcp", address)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, l := range k.kept {
		if l.address == address && l.isClosed.Load() {
			k.kept[i] = &keptListener{TCPListener: l.TCPListener, of: k, address: address}
			return k.kept[i], l.SetDeadline(time.Time{})
		}
	}
	opened, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	l := &keptListener{TCPListener: opened.(*net.TCPListener), of: k, address: address} //nolint:forcetypeassert // the network is tcp
	k.kept = append(k.kept, l)
	return l, nil
}

// keptListener is one use of a listener, which stays open.
type keptListener struct {
	*net.TCPListener

	of *keeper
	// address is what was asked for.
	address  string
	isClosed atomic.Bool
}

// Accept implements net.Listener.
func (l *keptListener) Accept() (net.Conn, error) {
	conn, err := l.TCPListener.Accept()
	if err != nil && l.isClosed.Load() {
		return nil, net.ErrClosed
	}
	return conn, err
}

// Close implements net.Listener. It ends Accept.
func (l *keptListener) Close() error {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	if l.isClosed.Swap(true) {
		return net.ErrClosed // somebody else may use the listener
	}
	return l.SetDeadline(time.Now())
}
