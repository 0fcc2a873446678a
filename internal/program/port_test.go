package program

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
)

func isReady() (string, error) { return "", nil }

func metrics() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "some_total 1\n") }) //nolint:errcheck // a recorder takes everything
}

func TestPortAnswersOperators(t *testing.T) {
	t.Parallel()
	starting := func() (string, error) { return "", errors.New("the runner is loading") }
	late := func() (string, error) { return "a batch is late", nil }
	tests := map[string]struct {
		ready  readiness
		method string
		path   string
		status int
		body   string
	}{
		"alive":                     {isReady, "GET", "/livez", 200, "ok"},
		"alive though not ready":    {starting, "GET", "/livez", 200, "ok"},
		"ready":                     {isReady, "GET", "/readyz", 200, "ok"},
		"ready with a remark":       {late, "GET", "/readyz", 200, "ok\na batch is late\n"},
		"not ready":                 {starting, "GET", "/readyz", 503, "the runner is loading"},
		"ready in memory alone":     {isReady, "GET", "/readyz/durable", 503, "the disk is full"},
		"asked by HEAD":             {isReady, "HEAD", "/readyz", 200, ""},
		"metrics":                   {isReady, "GET", "/metrics", 200, "some_total 1"},
		"profiles":                  {isReady, "GET", "/debug/pprof/", 200, "goroutine"},
		"one profile":               {isReady, "GET", "/debug/pprof/goroutine?debug=1", 200, "goroutine profile"},
		"the command line":          {isReady, "GET", "/debug/pprof/cmdline", 200, ""},
		"symbols":                   {isReady, "GET", "/debug/pprof/symbol", 200, "num_symbols"},
		"a change of what is alive": {isReady, "POST", "/livez", 405, ""},
		"what there is":             {starting, "GET", "/", 200, "/debug/pprof/"},
		"anything else":             {isReady, "GET", "/nothing", 404, ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := httptest.NewRecorder()
			r := httptest.NewRequestWithContext(t.Context(), test.method, test.path, nil)
			portHandler(test.ready, func() (string, error) { return "", errors.New("the disk is full") }, metrics()).ServeHTTP(w, r)
			if w.Code != test.status || !strings.Contains(w.Body.String(), test.body) {
				t.Errorf("got %d %q, want %d with %q", w.Code, w.Body, test.status, test.body)
			}
		})
	}
}

func TestPortServesOnItsListener(t *testing.T) {
	t.Parallel()
	var lc net.ListenConfig
	listener, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() {
		served <- servePort(ctx, listener, slog.New(slog.DiscardHandler), portHandler(isReady, isReady, metrics()))
	}()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	request := testbed.Request(t, "GET", "http://"+listener.Addr().String()+"/livez", nil)
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		t.Errorf("got %s", response.Status)
	}
	stop()
	if err := <-served; err != nil {
		t.Errorf("Serve: %v", err)
	}
	if conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", listener.Addr().String()); err == nil {
		conn.Close()
		t.Error("the port is open after the stop")
	}
}

// pipes is a listener of connections in memory, which a bubble can wait for.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), closed: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case conn := <-p.conns:
		return conn, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	close(p.closed)
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "memory", Net: "unix"} }

// ask sends a request and returns where the answer comes from.
func (p *pipes) ask(t *testing.T, headers string) net.Conn {
	t.Helper()
	client, server := net.Pipe()
	p.conns <- server
	if _, err := io.WriteString(client, "GET /livez HTTP/1.1\r\nHost: localhost\r\n"+headers+"\r\n"); err != nil {
		t.Fatal(err)
	}
	return client
}

func TestStopWaitsForResponsesWithALimit(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		// takes is how long the answer takes; stopped how long the stop does.
		takes    time.Duration
		answered bool
		atLeast  time.Duration
		atMost   time.Duration
	}{
		"an answer in time":       {3 * time.Second, true, 3 * time.Second, 4 * time.Second},
		"an answer that hangs":    {time.Hour, false, 5 * time.Second, 5 * time.Second},
		"an answer that is there": {0, true, 0, time.Second},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, stop := context.WithCancel(t.Context())
				listener := newPipes()
				served := make(chan error, 1)
				go func() {
					served <- servePort(ctx, listener, slog.New(slog.DiscardHandler), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						select {
						case <-time.After(test.takes):
							w.WriteHeader(http.StatusNoContent)
						case <-r.Context().Done():
						}
					}))
				}()
				conn := listener.ask(t, "")
				defer conn.Close()
				answer := make(chan bool, 1)
				go func() {
					response, err := http.ReadResponse(bufio.NewReader(conn), nil)
					if err == nil {
						response.Body.Close()
					}
					answer <- err == nil && response.StatusCode == http.StatusNoContent
				}()
				synctest.Wait()
				begin := time.Now()
				stop()
				if err := <-served; err != nil {
					t.Errorf("Serve: %v", err)
				}
				if took := time.Since(begin); took < test.atLeast || took > test.atMost {
					t.Errorf("the stop took %s", took)
				}
				if got := <-answer; got != test.answered {
					t.Errorf("answered = %t", got)
				}
			})
		})
	}
}

func TestPrivatePortRejectsOtherHostNames(t *testing.T) {
	t.Parallel()
	for _, e := range []config.Exposure{{}, {Insecure: true}, {AnyHost: true}} {
		e.Listen = "127.0.0.1:9090"
		for host, want := range map[string]int{"127.0.0.1:9090": 200, "localhost": 200, "evil.example:9090": 403} {
			w, r := httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), "GET", "/livez", nil)
			r.Host = host
			checkHost(e, portHandler(isReady, isReady, metrics())).ServeHTTP(w, r)
			if w.Code != want && !e.AnyHost || e.AnyHost && w.Code != 200 {
				t.Errorf("%+v: %s: %d", e, host, w.Code)
			}
		}
	}
}

func TestPortRejectsPagesOfOtherOrigins(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		header, value string
		want          int
	}{
		"a program":                  {"Accept", "*/*", 200},
		"its address in a browser":   {"Sec-Fetch-Site", "none", 200},
		"a page of the port":         {"Sec-Fetch-Site", "same-origin", 200},
		"a foreign page":             {"Sec-Fetch-Site", "cross-site", 403},
		"a page of another port":     {"Sec-Fetch-Site", "same-site", 403},
		"a foreign page, by origin":  {"Origin", "http://evil.example", 403},
		"its own origin":             {"Origin", "http://localhost:9090", 200},
		"a page of no origin at all": {"Origin", "null", 403},
	} {
		for _, path := range []string{"/", "/livez", "/readyz", "/metrics", "/debug/pprof/", "/debug/pprof/profile?seconds=0.001", "/debug/pprof/trace?seconds=0.001"} {
			if test.want == http.StatusOK && strings.Contains(path, "seconds") {
				continue
			}
			for _, method := range []string{http.MethodGet, http.MethodHead} {
				w, r := httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), method, path, nil)
				r.Host = "localhost:9090"
				r.Header.Set(test.header, test.value)
				if portHandler(isReady, isReady, metrics()).ServeHTTP(w, r); w.Code != test.want {
					t.Errorf("%s, %s %s: %d", name, method, path, w.Code)
				}
			}
		}
	}
}

func TestProfilesAreBounded(t *testing.T) {
	t.Parallel()
	handler := portHandler(isReady, isReady, metrics())
	get := func(path string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		return w
	}
	for _, of := range []string{"profile", "trace", "heap", "goroutine"} {
		for _, seconds := range []string{"61", "-1", "1e9", "NaN", "Inf", "x", "99999999999999999999"} {
			if w := get("/debug/pprof/" + of + "?seconds=" + seconds); w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), "from 0 to 60") {
				t.Errorf("%s, %s: %d %s", of, seconds, w.Code, w.Body)
			}
		}
	}
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/debug/pprof/profile", strings.NewReader("seconds=600")))
	if w.Code != http.StatusMethodNotAllowed {
		t.Errorf("a profile by POST: %d", w.Code)
	}
}

func TestOneProfileRunsAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		running, began, end := make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
		profile := func() *httptest.ResponseRecorder {
			w := httptest.NewRecorder()
			serveProfile(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/debug/pprof/profile", nil), running, func(http.ResponseWriter, *http.Request) {
				close(began)
				<-end
			})
			return w
		}
		first := make(chan *httptest.ResponseRecorder)
		go func() { first <- profile() }()
		<-began
		if w := profile(); w.Code != http.StatusTooManyRequests {
			t.Errorf("a second one: %d", w.Code)
		}
		close(end)
		<-first
		if began = make(chan struct{}); profile().Code != http.StatusOK {
			t.Error("none runs, and one is refused")
		}
	})
}

func TestPortClosesConnectionsThatDoNothing(t *testing.T) {
	t.Parallel()
	large := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 1<<20)) })
	for name, test := range map[string]struct {
		handler http.Handler
		send    string
		reads   bool
		within  time.Duration
	}{
		"half a header":      {large, "GET / HTTP/1.1\r\n", true, readHeaderTimeout},
		"nothing":            {large, "", true, readHeaderTimeout},
		"no second request":  {portHandler(isReady, isReady, metrics()), "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", true, transport.IdleTimeout},
		"an answer not read": {large, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", false, writeTimeout},
		"a header too large": {large, "GET / HTTP/1.1\r\nHost: localhost\r\nX: " + strings.Repeat("x", 2*transport.MaxHeaderBytes), true, readHeaderTimeout},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, stop := context.WithCancel(t.Context())
			listener := newPipes()
			served := make(chan error, 1)
			go func() { served <- servePort(ctx, listener, slog.New(slog.DiscardHandler), test.handler) }()
			client, server := net.Pipe()
			watched := &watchedConn{Conn: server, closed: make(chan struct{})}
			listener.conns <- watched
			begin := time.Now()
			go func() { _, _ = io.WriteString(client, test.send) }()
			if test.reads {
				go func() { _, _ = io.Copy(io.Discard, client) }()
			}
			<-watched.closed
			if took := time.Since(begin); took > test.within+time.Second {
				t.Errorf("%s: closed after %s", name, took)
			}
			_ = client.Close()
			stop()
			if err := <-served; err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
}

// watchedConn says when it is closed.
type watchedConn struct {
	net.Conn

	once   sync.Once
	closed chan struct{}
}

func (c *watchedConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

func TestStopEndsConnectionsWithoutARequest(t *testing.T) {
	t.Parallel()
	for name, header := range map[string]string{"silent": "", "half a header": "GET /livez HTTP/1.1\r\n"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, stop := context.WithCancel(t.Context())
				listener := newPipes()
				served := make(chan error, 1)
				go func() { served <- servePort(ctx, listener, slog.New(slog.DiscardHandler), http.NotFoundHandler()) }()
				client, server := net.Pipe()
				defer client.Close()
				listener.conns <- server
				if _, err := io.WriteString(client, header); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				begin := time.Now()
				stop()
				if err := <-served; err != nil || time.Since(begin) > time.Second {
					t.Errorf("Serve: %v after %s", err, time.Since(begin))
				}
			})
		})
	}
}

func TestPortDoesNotWaitForBodies(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		listener := newPipes()
		served := make(chan error, 1)
		go func() {
			served <- servePort(ctx, listener, slog.New(slog.DiscardHandler), portHandler(isReady, isReady, metrics()))
		}()
		conn := listener.ask(t, "Content-Length: 100\r\n")
		defer conn.Close()
		begin := time.Now()
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if took := time.Since(begin); err != nil || response.StatusCode != http.StatusOK || took > 2*time.Second {
			t.Fatalf("got %v, %v after %s", response, err, took)
		}
		response.Body.Close()
		stop()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
}

func TestServePortReturnsWhenItsListenerFails(t *testing.T) {
	t.Parallel()
	listener := newPipes()
	served := make(chan error, 1)
	go func() {
		served <- servePort(t.Context(), &failing{listener}, slog.New(slog.DiscardHandler), http.NotFoundHandler())
	}()
	if err := <-served; !errors.Is(err, errListener) {
		t.Errorf("got %v", err)
	}
}

var errListener = errors.New("too many open files")

type failing struct{ *pipes }

func (*failing) Accept() (net.Conn, error) { return nil, errListener }
