package port_test

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"

	"github.com/stagemesh/stagemesh/gateway/front/port"
	"github.com/stagemesh/stagemesh/internal/transport"
)

func TestFailedHandshakesAreLoggedAtDebug(t *testing.T) {
	t.Parallel()
	for level, want := range map[slog.Level]bool{slog.LevelInfo: false, slog.LevelDebug: true} {
		var log bytes.Buffer
		s := port.NewServer(http.NotFoundHandler(), slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: level})))
		s.ErrorLog.Print("http: TLS handshake error from 127.0.0.1:1: EOF")
		if got := strings.Contains(log.String(), "level=DEBUG"); got != want || !want && log.Len() > 0 {
			t.Errorf("%s: it logs %q", level, log.String())
		}
		s.ErrorLog.Print("http: Accept error")
		if !strings.Contains(log.String(), "level=WARN") {
			t.Errorf("%s: it logs %q", level, log.String())
		}
	}
}

// pipes is a listener whose clients are pipes.
type pipes chan net.Conn

// Accept implements net.Listener.
func (p pipes) Accept() (net.Conn, error) {
	if conn, ok := <-p; ok {
		return conn, nil
	}
	return nil, net.ErrClosed
}

// Close implements net.Listener; the test closes the channel.
func (pipes) Close() error { return nil }

// Addr implements net.Listener.
func (pipes) Addr() net.Addr { return &net.TCPAddr{} }

func TestIdleConnectionAnswersPingsAndIsKept(t *testing.T) {
	t.Parallel()
	for name, serve := range map[string]func(net.Listener) (stop func() error){
		"net/http": func(l net.Listener) func() error {
			server := port.NewServer(http.NotFoundHandler(), slog.New(slog.DiscardHandler))
			go server.Serve(l) //nolint:errcheck // it is closed
			return server.Close
		},
		"grpc-go": func(l net.Listener) func() error {
			server := transport.NewGRPC(transport.GRPCSettings{})
			go server.Serve(l) //nolint:errcheck // it is stopped
			return func() error { server.Stop(); return nil }
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				listener := make(pipes)
				stop := serve(listener)
				client, conn := net.Pipe()
				listener <- conn
				lived := idle(t, client)
				if lived < transport.IdleTimeout || lived > transport.IdleTimeout+transport.PingAfter {
					t.Errorf("the connection is ended after %s, not %s", lived, transport.IdleTimeout)
				}
				_ = client.Close()
				close(listener)
				if err := stop(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// idle keeps a connection of HTTP/2 without requests, as clients do that open it ahead: its
// settings and each of its pings are acknowledged. It returns when the server ends it.
func idle(t *testing.T, client net.Conn) time.Duration {
	t.Helper()
	const pingInterval = 10 * time.Second
	begin, written, stop := time.Now(), make(chan error, 1), make(chan struct{})
	framer, acks := http2.NewFramer(client, client), make(chan [8]byte, 1)
	go func() {
		_, err := io.WriteString(client, http2.ClientPreface)
		if err == nil {
			err = framer.WriteSettings()
		}
		for ping := time.NewTicker(pingInterval); err == nil; {
			select {
			case <-ping.C:
				err = framer.WritePing(false, [8]byte{1})
			case data := <-acks:
				err = framer.WritePing(true, data)
			case <-stop:
				ping.Stop()
				written <- nil
				return
			}
		}
		written <- err
	}()
	defer func() {
		close(stop)
		if err := <-written; err != nil {
			t.Errorf("write: %v", err)
		}
	}()
	isSettled, pings := false, 0
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			t.Errorf("after %s: %v", time.Since(begin), err)
			return time.Since(begin)
		}
		switch f := frame.(type) {
		case *http2.SettingsFrame:
			isSettled = isSettled || f.IsAck() && time.Since(begin) == 0
		case *http2.PingFrame:
			if f.IsAck() {
				pings++
			} else {
				acks <- f.Data
			}
		case *http2.GoAwayFrame:
			lived := time.Since(begin)
			if !isSettled || pings < int(lived/pingInterval)-1 || f.ErrCode != http2.ErrCodeNo {
				t.Errorf("settings acknowledged: %t, pings: %d in %s, ended with %s", isSettled, pings, lived, f.ErrCode)
			}
			return lived
		}
	}
}
