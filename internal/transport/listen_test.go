package transport_test

import (
	"errors"
	"net"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
)

func TestKeptListenerKeepsItsPort(t *testing.T) {
	t.Parallel()
	ctx, closeAll := transport.KeepListeners(t.Context())
	first, err := transport.Listen(ctx, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	admin, err := transport.Listen(ctx, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address, adminAddress := first.Addr().String(), admin.Addr().String()
	accepted := make(chan error, 1)
	go func() {
		_, err := first.Accept()
		accepted <- err
	}()
	for _, l := range []net.Listener{admin, first} {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := testbed.Receive(t, "the end of Accept", accepted); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a closed listener accepts with %v", err)
	}
	if l, err := transport.Listen(t.Context(), address); err == nil {
		_ = l.Close()
		t.Error("another can have the port")
	}
	dialled, err := net.Dial("tcp", address) //nolint:noctx // it is local
	if err != nil {
		t.Fatal(err)
	}
	second, err := transport.Listen(ctx, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed again it says %v", err)
	}
	conn, err := second.Accept()
	if err != nil || conn.RemoteAddr().String() != dialled.LocalAddr().String() {
		t.Errorf("%v, %v is accepted, want the connection that came meanwhile", conn, err)
	}
	if admin, err = transport.Listen(ctx, "127.0.0.1:0"); err != nil || admin.Addr().String() != adminAddress {
		t.Errorf("the second port is %v, %v, and was %s", admin.Addr(), err, adminAddress)
	}
	closeAll()
	if _, err := second.Accept(); err == nil {
		t.Error("it accepts after all were closed")
	}
	last, err := transport.Listen(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	_ = last.Close()
}
