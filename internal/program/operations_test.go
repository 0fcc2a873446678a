package program_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func settings(address string) program.Settings {
	return program.Settings{Listen: address, Key: "ops.listen", Logger: slog.New(slog.DiscardHandler)}
}

func get(t *testing.T, port *program.Port, path string) (int, string) {
	t.Helper()
	return testbed.Get(t, "http://"+port.Addr().String()+path)
}

func expect(t *testing.T, port *program.Port, path string, status int, text string) {
	t.Helper()
	if got, body := get(t, port, path); got != status || !strings.Contains(body, text) {
		t.Errorf("%s: got %d, %q, want %d, %q", path, got, body, status, text)
	}
}

func TestPortReportsReadinessAndMetrics(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var addr net.Addr
	err := program.Run(ctx, settings("127.0.0.1:0"), func(ctx context.Context, port *program.Port) error {
		addr = port.Addr()
		expect(t, port, "/livez", http.StatusOK, "ok")
		expect(t, port, "/readyz", http.StatusServiceUnavailable, "the program is starting")
		var sick error
		port.Watch(func() (string, error) { return "", sick })
		expect(t, port, "/readyz", http.StatusOK, "ok")
		sick = errors.New("it rains")
		expect(t, port, "/readyz", http.StatusServiceUnavailable, "it rains")
		counter, err := port.Meter().Int64Counter("stagemesh.test.drops")
		if err != nil {
			return err
		}
		counter.Add(ctx, 3)
		expect(t, port, "/metrics", http.StatusOK, "stagemesh_test_drops_total 3")
		// A program that drains is asked too.
		stop()
		<-ctx.Done()
		expect(t, port, "/readyz", http.StatusServiceUnavailable, "it rains")
		return nil
	})
	if err != nil {
		t.Errorf("got %v", err)
	}
	if conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr.String()); err == nil {
		conn.Close()
		t.Error("the port is open after the end")
	}
}

func TestErrorOfTheWorkIsReturned(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	err := program.Run(t.Context(), settings("127.0.0.1:0"), func(context.Context, *program.Port) error { return broken })
	if !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

func TestWorkNeedsThePort(t *testing.T) {
	t.Parallel()
	taken := testbed.Listen(t)
	err := program.Run(t.Context(), settings(taken.Addr().String()), func(context.Context, *program.Port) error {
		t.Error("the work has begun")
		return nil
	})
	if err == nil || !strings.HasPrefix(err.Error(), "ops.listen: listen tcp ") {
		t.Errorf("got %v", err)
	}
}
