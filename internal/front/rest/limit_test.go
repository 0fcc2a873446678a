package rest_test

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/transport"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/rest"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// unread is a body that must stay so.
type unread struct{ t *testing.T }

func (u unread) Read([]byte) (int, error) {
	u.t.Error("the body was read")
	return 0, io.EOF
}

func TestDeclaredSizeOverTheLimitIsRejectedUnread(t *testing.T) {
	t.Parallel()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/pipelines/photos:infer", unread{t})
	r.ContentLength = limitBytes + 1
	w := httptest.NewRecorder()
	rest.New(&fronttest.Caller{}, nil, transport.Settings{MaxMessageBytes: limitBytes}).ServeHTTP(w, r)
	if w.Code != http.StatusRequestEntityTooLarge || !strings.Contains(w.Body.String(), "65536 bytes") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// formHead starts the first part of a form.
const formHead = "--b\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\n"

// counted counts what is read of an endless body.
type counted struct {
	head io.Reader
	n    int
}

func (c *counted) Read(buf []byte) (int, error) {
	n, err := c.head.Read(buf)
	if err != nil {
		n = len(buf)
	}
	c.n += n
	return n, nil
}

func TestNoMoreThanOneByteOverTheLimitIsRead(t *testing.T) {
	t.Parallel()
	for contentType, head := range map[string]string{"image/png": "", "application/json": "", "multipart/form-data; boundary=b": formHead} {
		body := &counted{head: strings.NewReader(head)}
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/pipelines/photos:infer", body)
		r.Header.Set("Content-Type", contentType)
		w := httptest.NewRecorder()
		rest.New(&fronttest.Caller{}, nil, transport.Settings{MaxMessageBytes: limitBytes}).ServeHTTP(w, r)
		if w.Code != http.StatusRequestEntityTooLarge || body.n > limitBytes+1 {
			t.Errorf("%s: %d after %d bytes: %s", contentType, w.Code, body.n, w.Body)
		}
	}
}

func TestBodyOverTheLimitIsTooLarge(t *testing.T) {
	t.Parallel()
	for name, h2c := range map[string]bool{"HTTP/1": false, "HTTP/2": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := fronttest.Serve(t, rest.New(&fronttest.Caller{}, nil, transport.Settings{MaxMessageBytes: limitBytes}))
			for _, size := range []int{limitBytes + 1, 50 * limitBytes} {
				data := strings.Repeat("x", size)
				post("image/png", data).at(t, url, h2c).wantFailure(t, 413, fault.PayloadTooLarge, "65536 bytes")
				post("multipart/form-data; boundary=b", formHead+data).at(t, url, h2c).wantFailure(t, 413, fault.PayloadTooLarge, "65536 bytes")
				chunked := post("image/png", "")
				chunked.body = struct{ io.Reader }{strings.NewReader(data)}
				chunked.at(t, url, h2c).wantFailure(t, 413, fault.PayloadTooLarge, "65536 bytes")
			}
			if got := post("image/png", strings.Repeat("x", limitBytes)).at(t, url, h2c); got.status != 200 || len(got.body) != limitBytes {
				t.Errorf("at the limit: %d, %d bytes", got.status, len(got.body))
			}
		})
	}
}

func TestStalledBodyFails(t *testing.T) {
	t.Parallel()
	for name, h2c := range map[string]bool{"HTTP/1": false, "HTTP/2": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := fronttest.Serve(t, rest.New(&fronttest.Caller{}, nil, transport.Settings{StallTimeout: 50 * time.Millisecond}))
			out, in := io.Pipe()
			t.Cleanup(func() { _ = in.Close() })
			go func() { _, _ = in.Write([]byte("some")) }()
			request := post("image/png", "")
			request.body = out
			request.at(t, url, h2c).wantFailure(t, 504, fault.DeadlineExceeded, "50ms")
		})
	}
}

func TestTornBodyReachesNoCaller(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{}
	ctx, cancel := context.WithCancel(t.Context())
	r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/v1/pipelines/photos:infer", io.MultiReader(bytes.NewReader([]byte("x")), torn{}))
	cancel()
	w := httptest.NewRecorder()
	rest.New(caller, nil, transport.Settings{}).ServeHTTP(w, r)
	if w.Code != 499 || caller.Last() != nil {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

type torn struct{}

func (torn) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// The first answer takes all of the connection's window and is never read, so
// that no byte of a later one can be sent.
func TestUnreadSmallResponseEnds(t *testing.T) {
	t.Parallel()
	const window = 64 << 10
	url := fronttest.Serve(t, rest.New(&fronttest.Caller{}, nil, transport.Settings{StallTimeout: 300 * time.Millisecond}))
	client := fronttest.Client(t, true)
	client.Transport.(*http.Transport).HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerConnection: window, MaxReceiveBufferPerStream: 2 * window}
	_ = unreadAnswer(t, client, url+"/v1/pipelines/echo:infer", strings.Repeat("x", 2*window))
	for _, path := range []string{"/v1/pipelines/echo:infer", "/v1/nothing"} {
		for cut := false; !cut; { // one may come before all of the window is taken
			answer, ended := unreadAnswer(t, client, url+path, "small"), make(chan error, 1)
			go func() {
				_, err := io.ReadAll(answer)
				ended <- err
			}()
			select {
			case err := <-ended:
				cut = err != nil
			case <-time.After(20 * time.Second):
				t.Fatalf("%s: the answer is still being sent", path)
			}
		}
	}
}

// unreadAnswer returns the body of an answer whose head has come.
func unreadAnswer(t *testing.T, client *http.Client, url, body string) io.Reader {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "image/png")
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	return response.Body
}
