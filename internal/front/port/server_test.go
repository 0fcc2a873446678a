package port_test

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/testbed"
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

// A stranger whose frames are malformed makes one line, whatever the number of connections.
func TestProtocolErrorsDoNotFillTheLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		server, listener := port.NewServer(http.NotFoundHandler(), slog.New(slog.NewTextHandler(&log, nil))), make(pipes)
		served := make(chan error, 1)
		go func() { served <- server.Serve(listener) }()
		breakOne := func() {
			client, conn := net.Pipe()
			listener <- conn
			go io.Copy(io.Discard, client) //nolint:errcheck // it ends with the connection
			_, err := client.Write([]byte(http2.ClientPreface + "\x00\x00\x03\x04\x00\x00\x00\x00\x00abc"))
			synctest.Wait()
			if err := errors.Join(err, client.Close()); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		lines := func(want int) {
			t.Helper()
			if got := strings.Count(log.String(), "level=WARN"); got != want {
				t.Errorf("%d lines, want %d:\n%s", got, want, log.String())
			}
		}
		for range 5 {
			breakOne()
		}
		lines(1)
		server.ErrorLog.Print("http: panic serving 127.0.0.1:1: oh")
		lines(2)
		<-time.After(time.Minute)
		breakOne()
		lines(3)
		close(listener)
		if err := <-served; !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
		<-time.After(time.Minute) // the connections end
	})
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

// freed is a listener that counts the connections it accepted and that are no longer in memory.
type freed struct {
	net.Listener

	count *atomic.Int64
}

// Accept implements net.Listener.
func (l freed) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	out := &struct{ net.Conn }{conn}
	runtime.AddCleanup(out, func(count *atomic.Int64) { count.Add(1) }, l.count)
	return out, nil
}

func TestConnectionCutWithinAStreamIsFreed(t *testing.T) {
	t.Parallel()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "localhost:0")
	if err != nil {
		t.Fatal(err)
	}
	reads := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) })
	server, count := port.NewServer(reads, slog.New(slog.DiscardHandler)), new(atomic.Int64)
	go server.Serve(transport.NewConnections(8, false).Listen(freed{listener, count})) //nolint:errcheck // it is closed
	t.Cleanup(func() { _ = server.Close() })
	const connections = 5
	for range connections {
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		framer, header := http2.NewFramer(conn, conn), new(bytes.Buffer)
		encoder := hpack.NewEncoder(header)
		for _, f := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", "/"}, {":authority", "localhost"}} {
			_ = encoder.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}) // a buffer takes all
		}
		_, err = io.WriteString(conn, http2.ClientPreface)
		err = errors.Join(err, framer.WriteSettings(), framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: header.Bytes(), EndHeaders: true}), conn.Close())
		if err != nil {
			t.Fatal(err)
		}
	}
	testbed.Eventually(t, "the memory of all connections is freed", func() bool { runtime.GC(); return count.Load() == connections })
}

func TestIdleConnectionAnswersPingsAndIsKept(t *testing.T) {
	t.Parallel()
	for name, serve := range map[string]func(net.Listener) (stop func() error){
		"net/http": func(l net.Listener) func() error {
			server := port.NewServer(http.NotFoundHandler(), slog.New(slog.DiscardHandler))
			go server.Serve(transport.NewConnections(1, false).Listen(l)) //nolint:errcheck // it is closed
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
			for err == nil { // it reads on, and does not leave
				_, err = framer.ReadFrame()
			}
			if stayed := time.Since(begin) - lived; !errors.Is(err, io.EOF) || stayed > transport.PingAfter {
				t.Errorf("%s after it was asked to leave: %v", stayed, err)
			}
			return lived
		}
	}
}

func TestIdleConnectionOfHTTP1Ends(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server, listener := port.NewServer(http.NotFoundHandler(), slog.New(slog.DiscardHandler)), make(pipes)
		go server.Serve(transport.NewConnections(1, false).Listen(listener)) //nolint:errcheck // it is closed
		client, conn := net.Pipe()
		listener <- conn
		begin, answer := time.Now(), bufio.NewReader(client)
		for range 3 {
			if _, err := io.WriteString(client, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			response, err := http.ReadResponse(answer, nil)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, response.Body) // the next answer tells
			_ = response.Body.Close()
			begin = time.Now()
			<-time.After(transport.IdleTimeout - time.Second)
		}
		_, err := answer.ReadByte()
		if lived := time.Since(begin); !errors.Is(err, io.EOF) || lived != transport.IdleTimeout {
			t.Errorf("after %s: %v", lived, err)
		}
		_ = client.Close()
		close(listener)
		_ = server.Close()
	})
}
