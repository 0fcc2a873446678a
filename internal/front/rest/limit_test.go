package rest_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/rest"
	"github.com/stagemesh/stagemesh/internal/transport"
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
	r.ContentLength = fronttest.LimitBytes + 1
	w := httptest.NewRecorder()
	rest.New(&fronttest.Caller{}, nil, transport.Settings{MaxMessageBytes: fronttest.LimitBytes}).ServeHTTP(w, r)
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
		rest.New(&fronttest.Caller{}, nil, transport.Settings{MaxMessageBytes: fronttest.LimitBytes}).ServeHTTP(w, r)
		if w.Code != http.StatusRequestEntityTooLarge || body.n > fronttest.LimitBytes+1 {
			t.Errorf("%s: %d after %d bytes: %s", contentType, w.Code, body.n, w.Body)
		}
	}
}
