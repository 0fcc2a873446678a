package dispatch

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// endpoint is an HTTP server with a target that points at it.
type endpoint struct {
	t      *testing.T
	server *httptest.Server
	target *httpTarget
}

func newEndpoint(t *testing.T, serve http.HandlerFunc, edits ...func(*HTTPTarget)) *endpoint {
	t.Helper()
	e := &endpoint{t: t, server: httptest.NewServer(serve)}
	t.Cleanup(e.server.Close)
	e.target = newTarget(t, e.server.URL, edits...)
	return e
}

func newTarget(t *testing.T, url string, edits ...func(*HTTPTarget)) *httpTarget {
	t.Helper()
	config := HTTPTarget{URL: url}
	for _, edit := range edits {
		edit(&config)
	}
	if err := config.validate(); err != nil {
		t.Fatal(err)
	}
	out, err := newHTTPTarget(config, 4)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(out.client.CloseIdleConnections)
	return out
}

func callOf(path, contentType string, body []byte) Attempt {
	job := &meshv1.QueuedJob{Payload: &meshv1.QueuedJob_Http{Http: &inferencev1.HttpCall{Path: path, ContentType: contentType, Body: body}}}
	return Attempt{StoredJob: store.StoredJob{ID: pipeline.NewJobID(queue), Tenant: "a\r\nX-Other: b", Job: job}}
}

func (e *endpoint) do(edits ...func(*Attempt)) Answer {
	e.t.Helper()
	a := callOf("/v1/chat/completions?a=b", "application/json", []byte(`{}`))
	for _, edit := range edits {
		edit(&a)
	}
	ctx, cancel := context.WithTimeout(e.t.Context(), testbed.Patience)
	defer cancel()
	return e.target.Do(ctx, a)
}

func TestHTTPTargetSendsTheCall(t *testing.T) {
	t.Parallel()
	token := testbed.SecretFile(t, "secret")
	var got *http.Request
	var body []byte
	e := newEndpoint(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		body, _ = io.ReadAll(r.Body)
		w.Header().Set("Content-Type", "text/plain")
		_, _ = io.WriteString(w, "yes")
	}, func(c *HTTPTarget) {
		c.URL += "/base/"
		c.TokenFile, c.Headers = token, map[string]string{"X-Tenant": "of {tenant}"}
	})
	var id pipeline.JobID
	answer := e.do(func(a *Attempt) { id = a.ID })
	if a := answer.HTTP; answer.Fault != nil || outcomeOf(answer) != succeeded || a.GetStatus() != 200 || a.GetContentType() != "text/plain" || string(a.GetBody()) != "yes" {
		t.Errorf("answer %+v", answer)
	}
	if got.Method != http.MethodPost || got.URL.String() != "/base/v1/chat/completions?a=b" || string(body) != "{}" {
		t.Errorf("%s %s %q", got.Method, got.URL, body)
	}
	want := map[string]string{
		"Idempotency-Key": id.String(), "Content-Type": "application/json", "Authorization": "Bearer secret", "X-Tenant": "of aX-Other: b",
		"Accept-Encoding": "gzip", "User-Agent": "Go-http-client/1.1", "Content-Length": "2",
	}
	for name, value := range want {
		if got.Header.Get(name) != value {
			t.Errorf("%s: %q, want %q", name, got.Header.Get(name), value)
		}
	}
	if len(got.Header) != len(want) {
		t.Errorf("headers %v", got.Header)
	}
	// The token is read each time.
	if err := os.WriteFile(token, []byte("next"), 0o600); err != nil {
		t.Fatal(err)
	}
	if e.do(); got.Header.Get("Authorization") != "Bearer next" {
		t.Errorf("headers %v", got.Header)
	}
	if err := os.Remove(token); err != nil {
		t.Fatal(err)
	}
	if answer := e.do(); outcomeOf(answer) != latched || answer.Fault.Reason != fault.TargetFailed || answer.Fault.Message != "the token for the target cannot be read" {
		t.Errorf("without a token: %+v", answer)
	}
}

func TestHTTPStatusSaysWhatIsNext(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]outcome{
		200: succeeded, 204: succeeded, 302: failed, 307: failed, 400: failed, 401: failed, 404: failed, 408: retried, 413: failed, 425: retried, 429: latched,
		500: retried, 501: failed, 502: retried, 503: latched, 504: retried, 505: failed,
	} {
		e := newEndpoint(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "/elsewhere")
			w.Header().Set("Retry-After", "7")
			w.WriteHeader(status)
		})
		answer := e.do()
		if outcomeOf(answer) != want || int(answer.HTTP.GetStatus()) != status {
			t.Errorf("%d: %+v", status, answer)
		}
		if isFault := want != succeeded; isFault != (answer.Fault != nil) || isFault && (answer.Fault.Reason != fault.TargetFailed || answer.Fault.RetryAfter != 7*time.Second) {
			t.Errorf("%d: fault %+v", status, answer.Fault)
		}
	}
}

// serveRaw answers every request with the bytes, and keeps the connection open.
func serveRaw(t *testing.T, answer string) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		t.Cleanup(func() { _ = conn.Close() })
		_, _ = io.WriteString(conn, answer)
	}))
	t.Cleanup(server.Close)
	return server
}

const switchingProtocols = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"

func TestStatusThatIsNoAnswerFailsTheAttempt(t *testing.T) {
	t.Parallel()
	for status, raw := range map[string]string{"101": switchingProtocols, "42": "HTTP/1.1 042 x\r\nContent-Length: 0\r\n\r\n"} {
		e := &endpoint{t: t, target: newTarget(t, serveRaw(t, raw).URL)}
		if answer := e.do(); outcomeOf(answer) != failed || answer.Fault.Reason != fault.TargetFailed || answer.HTTP != nil {
			t.Errorf("%s: %+v", status, answer)
		}
	}
}

func TestHTTPTargetThatIsNotReachedLatches(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.NotFoundHandler())
	server.Close()
	secure := httptest.NewTLSServer(http.NotFoundHandler())
	defer secure.Close()
	secure.Config.ErrorLog = log.New(io.Discard, "", 0)
	for name, url := range map[string]string{"refused": server.URL, "certificate of strangers": secure.URL} {
		e := &endpoint{t: t, target: newTarget(t, url)}
		if answer := e.do(); outcomeOf(answer) != latched || answer.Fault.Reason != fault.TargetFailed || answer.Fault.Message != "the target did not answer: no connection, or a broken one" || !strings.Contains(errors.Unwrap(answer.Fault).Error(), "127.0.0.1") {
			t.Errorf("%s: %+v", name, answer)
		}
	}
}

func TestBrokenHTTPAnswerIsAnAttempt(t *testing.T) {
	t.Parallel()
	for name, serve := range map[string]http.HandlerFunc{
		"reset": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"midway": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "9")
			_, _ = w.Write([]byte("x"))
		},
	} {
		if answer := newEndpoint(t, serve).do(); outcomeOf(answer) != retried || answer.Fault.Reason != fault.TargetFailed || answer.HTTP != nil {
			t.Errorf("%s: %+v", name, answer)
		}
	}
}

func TestSlowHTTPAnswerEndsWithTheAttempt(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil { // a byte at a time, for ever
			_, _ = w.Write([]byte("x"))
			_ = http.NewResponseController(w).Flush()
			select {
			case <-r.Context().Done():
			case <-time.After(time.Millisecond):
			}
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if answer := e.target.Do(ctx, callOf("/", "", nil)); outcomeOf(answer) != retried || answer.Fault.Reason != fault.TargetFailed {
		t.Errorf("%+v", answer)
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	if answer := e.target.Do(ctx, callOf("/", "", nil)); answer.Fault.Reason != fault.Cancelled {
		t.Errorf("cancelled: %+v", answer)
	}
}

func TestEndlessHTTPAnswerIsCut(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]outcome{200: failed, 500: retried, 503: latched} {
		e := newEndpoint(t, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			for part := make([]byte, 64<<10); ; {
				if _, err := w.Write(part); err != nil {
					return
				}
			}
		})
		if answer := e.do(); outcomeOf(answer) != want || answer.HTTP != nil || want == failed && answer.Fault.Reason != fault.OutputTooLarge {
			t.Errorf("%d: %+v", status, answer)
		}
	}
}

func TestCallThatIsNoneOfTheTargetFails(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, func(http.ResponseWriter, *http.Request) { t.Error("it is sent") }, func(c *HTTPTarget) { c.URL += "/base" })
	for _, path := range []string{"/../admin", "/a/%2e%2e/b", "@elsewhere/", "", "/%zz", "/a#b"} {
		if answer := e.do(func(a *Attempt) { a.StoredJob = callOf(path, "", nil).StoredJob }); outcomeOf(answer) != failed || answer.Fault.Reason != fault.InvalidRequest {
			t.Errorf("%q: %+v", path, answer)
		}
	}
	if answer := e.do(func(a *Attempt) { a.Job = &meshv1.QueuedJob{} }); outcomeOf(answer) != failed || answer.Fault.Reason != fault.InvalidRequest {
		t.Errorf("no call: %+v", answer)
	}
}

func TestHTTPTargetHasTLS(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, len(r.TLS.PeerCertificates))
	}))
	server.TLS = authority.Server("127.0.0.1")
	server.TLS.ClientAuth = tls.RequireAnyClientCert
	server.StartTLS()
	t.Cleanup(server.Close)
	cert, key := authority.Certificate("dispatcher")
	e := &endpoint{t: t, target: newTarget(t, server.URL, func(c *HTTPTarget) { c.CAFile, c.CertFile, c.KeyFile = authority.File, cert, key })}
	if answer := e.do(); string(answer.HTTP.GetBody()) != "1" {
		t.Errorf("%+v", answer)
	}
}

func TestHTTPTargetConfigNamesWhatIsWrong(t *testing.T) {
	t.Parallel()
	for want, c := range map[string]HTTPTarget{
		"url: must be a URL such as https://host:8000, without user, query and fragment": {},
		"url: must be a URL such as https://host:8000":                                   {URL: "http://a:b:c"},
		"url: has no TLS, which ca_file and cert_file are for; say https://":             {URL: "http://a", CAFile: "ca"},
		"cert_file: has no key; name its file in key_file":                               {URL: "https://a", CertFile: "c"},
		"headers.connection: is set by the dispatcher, or is of one connection only":     {URL: "http://a", Headers: map[string]string{"connection": "close"}},
		"headers.authorization: is set by the dispatcher, or is of one connection only":  {URL: "http://a", TokenFile: "t", Headers: map[string]string{"authorization": "x"}},
		"headers.x: a header is visible ASCII":                                           {URL: "http://a", Headers: map[string]string{"x": "a\nb"}},
	} {
		if err := c.validate(); fmt.Sprint(err) != want {
			t.Errorf("got %v\nwant %s", err, want)
		}
	}
	for want, c := range map[string]HTTPTarget{
		"jobs.pools.main.target.http.token_file: ": {URL: "http://a", TokenFile: "/nowhere"},
		"jobs.pools.main.target.http.ca_file: ":    {URL: "https://a", CAFile: "/nowhere"},
		"jobs.pools.main.target.http.cert_file: ":  {URL: "https://a", CertFile: "/nowhere", KeyFile: "/nowhere"},
	} {
		_, err := New(Settings{Config: Config{Pools: map[string]PoolConfig{"main": {Target: TargetConfig{HTTP: &c}}}}})
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("got %v\nwant %s", err, want)
		}
	}
}

// withEndpoint has the pool of a bed call a server.
func withEndpoint(url string, edits ...func(*HTTPTarget)) func(*Config) {
	return func(c *Config) {
		p := c.Pools["main"]
		p.Target = TargetConfig{HTTP: &HTTPTarget{URL: url}}
		for _, edit := range edits {
			edit(p.Target.HTTP)
		}
		c.Pools["main"] = p
	}
}

func (b *meshBed) submitCall(path string, edits ...func(*store.JobHeader)) pipeline.JobID {
	b.t.Helper()
	h := store.JobHeader{Deadline: time.Now().Add(time.Hour)}
	for _, edit := range edits {
		edit(&h)
	}
	id := pipeline.NewJobID(queue)
	job := &meshv1.QueuedJob{Job: &inferencev1.Job{Id: id.String(), Queue: string(queue)}, Payload: &meshv1.QueuedJob_Http{Http: &inferencev1.HttpCall{Path: path}}}
	if _, added, err := b.jobs.Submit(b.t.Context(), id, "", h, job); err != nil || !added {
		b.t.Fatalf("added %t, %v", added, err)
	}
	return id
}

func TestEveryTryOfAnHTTPJobHasItsKey(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var keys []string
	answers := []int{503, 500, 200}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		w.WriteHeader(answers[min(len(keys), len(answers)-1)])
		keys = append(keys, r.Header.Get("Idempotency-Key"))
		_, _ = io.WriteString(w, "done")
	}))
	t.Cleanup(server.Close)
	b := newMesh(t, withEndpoint(server.URL))
	id := b.submitCall("/")
	b.start(nil)
	r := b.end(id)
	if r.GetJob().GetState() != hasSucceeded || r.GetJob().GetAttempts() != 2 || string(r.GetHttp().GetBody()) != "done" {
		t.Errorf("%v", r)
	}
	if want := id.String(); !slices.Equal(keys, []string{want, want, want}) {
		t.Errorf("keys %v", keys)
	}
}

func TestFailedHTTPJobKeepsItsAnswer(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/large" {
			_, _ = w.Write(bytes.Repeat([]byte("x"), maxAnswer))
			return
		}
		http.Error(w, "no such model", http.StatusNotFound)
	}))
	t.Cleanup(server.Close)
	b := newMesh(t, withEndpoint(server.URL))
	b.start(nil)
	if r := b.end(b.submitCall("/")); r.GetJob().GetState() != hasFailed || r.GetJob().GetReason() != string(fault.TargetFailed) || r.GetHttp().GetStatus() != 404 || string(r.GetHttp().GetBody()) != "no such model\n" {
		t.Errorf("%v", r)
	}
	// The largest answer fits into a message of 8 MiB, or the job fails.
	r := b.end(b.submitCall("/large"))
	if limit := b.conn.MaxPayload(); limit >= 8<<20 && len(r.GetHttp().GetBody()) != maxAnswer || limit < 8<<20 && r.GetJob().GetReason() != string(fault.OutputTooLarge) {
		t.Errorf("a message may have %d bytes: %v", limit, r.GetJob())
	}
}

func TestUnknownHTTPAttemptIsSentAgainUnlessThatIsForbidden(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(server.Close)
	b := newMesh(t, withEndpoint(server.URL))
	id := b.submitCall("/")
	b.leave(id, "first")
	b.start(nil)
	b.wantEnd(id, hasSucceeded, "", 2)

	b = newMesh(t, withEndpoint(server.URL, func(c *HTTPTarget) { c.RepeatUnknown = new(bool) }))
	id = b.submitCall("/")
	b.leave(id, "first")
	b.start(nil)
	b.wantEnd(id, hasFailed, fault.TargetFailed, 1)
}

func TestPoolThatIsGoneLeavesUnknownHTTPAttempts(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(server.Close)
	b := newMesh(t, withEndpoint(server.URL, func(c *HTTPTarget) { c.RepeatUnknown = new(bool) }))
	stop := b.start(nil)
	b.wantEnd(b.submitCall("/"), hasSucceeded, "", 1)
	stop()
	unknown, cancelled := b.submitCall("/"), b.submitCall("/")
	expired := b.submitCall("/", func(h *store.JobHeader) { h.Deadline = time.Now().Add(5 * time.Second) })
	for _, id := range []pipeline.JobID{unknown, cancelled, expired} {
		b.leave(id, "first")
	}
	with := b.config
	b.config.Pools, b.config.Queues = nil, nil
	b.start(&stub{})
	b.wantHold(unknown, "running", 0)
	b.cancel(cancelled)
	b.wantEnd(cancelled, wasCancelled, fault.Cancelled, 1)
	b.wantEnd(expired, hasExpired, fault.DeadlineExceeded, 1)
	b.wantRunning(unknown, "first")
	b.reload(func(c *Config) { *c = with })
	b.wantEnd(unknown, hasFailed, fault.TargetFailed, 1)
}
