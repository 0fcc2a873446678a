package transport_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
)

// tooLong is far longer than what the tests have patience for.
const tooLong = 20 * time.Second

// open asks for an answer and reads nothing of it.
func openResponse(t *testing.T, client *http.Client, url string) io.Reader {
	t.Helper()
	r := testbed.Request(t, http.MethodGet, url, http.NoBody)
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	return response.Body
}

func TestUnreadResponseEnds(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		h2c   bool
		write int
	}{
		"HTTP/1, large writes": {false, 1 << 20}, "HTTP/1, small writes": {false, 1 << 10},
		"HTTP/2, large writes": {true, 1 << 20}, "HTTP/2, small writes": {true, 1 << 10},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ended := make(chan struct{})
			url := fronttest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				defer close(ended)
				_, _ = transport.StallWriter(w, time.Hour).Write(nil) // leaves a timer to those below
				to, data := transport.StallWriter(w, 500*time.Millisecond), make([]byte, test.write)
				for {
					if _, err := to.Write(data); err != nil {
						return
					}
					to.(http.Flusher).Flush()
				}
			}))
			openResponse(t, fronttest.Client(t, test.h2c), url)
			select {
			case <-ended:
			case <-time.After(tooLong):
				t.Fatal("the answer is still being written")
			}
		})
	}
}

// The answer is larger than every buffer on its way, and its writer pauses for
// longer than its patience: only what is written counts.
func TestReadResponseIsWritten(t *testing.T) {
	t.Parallel()
	const size, patience = 32 << 20, 2 * time.Second
	url := fronttest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		to := transport.StallWriter(w, patience)
		if n, err := to.Write(make([]byte, size)); n != size || err != nil {
			t.Errorf("%d bytes written: %v", n, err)
		}
		to.(http.Flusher).Flush()
		<-time.After(patience * 3 / 2)
		_, _ = io.WriteString(to, "end")
	}))
	for name, h2c := range map[string]bool{"HTTP/1": false, "HTTP/2": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			answer := openResponse(t, fronttest.Client(t, h2c), url)
			n, err := io.CopyN(io.Discard, answer, size)
			if err != nil {
				t.Fatalf("%d bytes came: %v", n, err)
			}
			if end, err := io.ReadAll(answer); string(end) != "end" || err != nil {
				t.Errorf("after them came %q, %v", end, err)
			}
		})
	}
}

func TestWritersWithoutDeadlinesWait(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	if got := transport.StallWriter(w, 0); got != http.ResponseWriter(w) {
		t.Errorf("without patience: %T", got)
	}
	if _, err := io.Copy(transport.StallWriter(w, time.Nanosecond), strings.NewReader("all of it")); err != nil || w.Body.String() != "all of it" {
		t.Errorf("got %q, %v", w.Body, err)
	}
	if _, err := transport.StallWriter(w, time.Second).Write(nil); err != nil || w.Code != http.StatusOK {
		t.Errorf("nothing: %d, %v", w.Code, err)
	}
}
