package transport_test

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

func TestReadBodyReturnsBodyWithinLimit(t *testing.T) {
	t.Parallel()
	for _, size := range []int{0, 1, 511, 512, 513, 1 << 20} {
		want := bytes.Repeat([]byte{7}, size)
		for _, declared := range []int64{-1, 0, int64(size), int64(size) / 2, 10 * int64(size)} {
			got, err := transport.ReadBody(iotest.HalfReader(bytes.NewReader(want)), declared, 1<<20)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d declared as %d: %d bytes, %v", size, declared, len(got), err)
			}
		}
	}
}

func TestReadBodyAllocatesAsItReads(t *testing.T) {
	t.Parallel()
	got, err := transport.ReadBody(strings.NewReader("short"), 1<<40, 1<<40)
	if err != nil || cap(got) > 1<<20 {
		t.Errorf("%d bytes of room for %q: %v", cap(got), got, err)
	}
}

// The last buffer is twice what has come at most, however much is declared, and has the
// declared size where that comes: with the buffers before it, three times that.
func TestReadBodyAllocatesTwiceWhatArrives(t *testing.T) {
	t.Parallel()
	const first = 8 << 10
	for _, size := range []int{100, 1 << 17, 1 << 20, 3 << 20, 1<<24 + 1, 1 << 26} {
		for came, most := range map[int]int{size: 3*size + first, size / 100: 4*size/100 + first} {
			from := &watched{from: bytes.NewReader(make([]byte, came))}
			got, err := transport.ReadBody(from, int64(size), 1<<40)
			if err != nil || len(got) != came || from.room > most+64 || cap(got) > max(2*came, first)+64 || cap(got) > size+64 {
				t.Errorf("of %d bytes %d come: %d are allocated, not %d, of which %d last: %v", size, came, from.room, most, cap(got), err)
			}
		}
	}
}

// watched adds up the buffers that it is to read into.
type watched struct {
	from io.Reader
	last *byte
	read int
	room int
}

func (w *watched) Read(buf []byte) (int, error) {
	// A buffer that is read into for the first time has its end elsewhere.
	if end := &buf[len(buf)-1]; end != w.last {
		w.last, w.room = end, w.room+len(buf)+w.read
	}
	n, err := w.from.Read(buf)
	w.read += n
	return n, err
}

func TestReadBodyErrorsHaveReasons(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		from   io.Reader
		reason fault.Reason
	}{
		"too large":         {strings.NewReader("12345"), fault.PayloadTooLarge},
		"too large, by net": {iotest.ErrReader(&http.MaxBytesError{Limit: 4}), fault.PayloadTooLarge},
		"stalled":           {iotest.ErrReader(transport.Stalled(time.Second)), fault.DeadlineExceeded},
		"torn":              {iotest.ErrReader(io.ErrUnexpectedEOF), fault.Cancelled},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := transport.ReadBody(row.from, -1, 4); fault.From(err).Reason != row.reason {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestTooLargeNamesTheLimit(t *testing.T) {
	t.Parallel()
	f := transport.TooLarge(1234)
	if !strings.Contains(f.Message, "1234 bytes") || f.Metadata["limit_bytes"] != "1234" {
		t.Errorf("got %v %v", f, f.Metadata)
	}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", strings.NewReader("12345"))
	if transport.CheckLength(r, 5) != nil || fault.From(transport.CheckLength(r, 4)).Reason != fault.PayloadTooLarge {
		t.Error("Content-Length is not looked at")
	}
}

// TestStallTimeoutEndsWithBody sends a body, lets more time than the patience
// pass, and expects that the caller still is there: the deadline must not
// outlive the body.
func TestStallTimeoutEndsWithBody(t *testing.T) {
	t.Parallel()
	const patience = 20 * time.Millisecond
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		from := transport.StallReader(w, r, transport.Settings{StallTimeout: patience})
		data, err := io.ReadAll(from)
		select {
		case <-r.Context().Done():
			err = errors.Join(err, r.Context().Err())
		case <-time.After(5 * patience):
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = w.Write(data)
	})
	url := fronttest.Serve(t, handler)
	for name, h2c := range map[string]bool{"HTTP/1": false, "HTTP/2": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client := fronttest.Client(t, h2c)
			for range 2 {
				if got := post(t, client, url, strings.NewReader("all of it")); got != "all of it" {
					t.Errorf("got %q", got)
				}
			}
		})
	}
}

// A caller that sends a byte now and then must not hold what it has sent.
func TestDribbledBodyIsRejected(t *testing.T) {
	t.Parallel()
	for name, h2c := range map[string]bool{"HTTP/1": false, "HTTP/2": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ended := make(chan error, 1)
			url := fronttest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, err := io.ReadAll(transport.StallReader(w, r, transport.Settings{StallTimeout: 300 * time.Millisecond}))
				ended <- err
			}))
			dribble, stop := io.Pipe()
			t.Cleanup(func() { _ = stop.Close() })
			r := testbed.Request(t, http.MethodPost, url, dribble)
			go func() {
				response, err := fronttest.Client(t, h2c).Do(r)
				if err == nil {
					_ = response.Body.Close()
				}
			}()
			ticks := time.NewTicker(10 * time.Millisecond)
			defer ticks.Stop()
			for begin := time.Now(); time.Since(begin) < tooLong; {
				select {
				case err := <-ended:
					if fault.From(err).Reason != fault.DeadlineExceeded {
						t.Errorf("got %v", err)
					}
					return
				case <-ticks.C:
					go func() { _, _ = stop.Write([]byte("x")) }()
				}
			}
			t.Error("the body is still being read")
		})
	}
}

func TestSlowBodyIsReadToItsEnd(t *testing.T) {
	t.Parallel()
	const patience = time.Second
	url := fronttest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, _ := io.ReadAll(transport.StallReader(w, r, transport.Settings{StallTimeout: patience}))
		_, _ = w.Write(data)
	}))
	slow := iotest.OneByteReader(strings.NewReader("byte by byte"))
	if got := post(t, fronttest.Client(t, true), url, slow); got != "byte by byte" {
		t.Errorf("got %q", got)
	}
}

func TestZeroStallTimeoutWaitsForever(t *testing.T) {
	t.Parallel()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", strings.NewReader("x"))
	if got := transport.StallReader(httptest.NewRecorder(), r, transport.Settings{}); got != r.Body {
		t.Errorf("got %T", got)
	}
	data, err := io.ReadAll(transport.StallReader(httptest.NewRecorder(), r, transport.Settings{StallTimeout: time.Second}))
	if err != nil || string(data) != "x" {
		t.Errorf("without deadlines: %q, %v", data, err)
	}
}

func post(t *testing.T, client *http.Client, url string, from io.Reader) string {
	t.Helper()
	r := testbed.Request(t, http.MethodPost, url, from)
	return do(t, client, r)
}

func do(t *testing.T, client *http.Client, r *http.Request) string {
	t.Helper()
	_, data := testbed.Do(t, client, r)
	return string(data)
}
