package clients

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh/gateway/front/oiptest"
)

// Checked returns the address, host:port, of a proxy that holds every answer of the
// public port's REST form against the protocol. The test fails for one that is not as
// it should be, and where there was none at all.
func (m Mesh) Checked(t *testing.T) string {
	t.Helper()
	protocol, answers := oiptest.New(t), &atomic.Int64{}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: m.Address()})
	transport := http.DefaultTransport.(*http.Transport).Clone()
	proxy.Transport = transport
	proxy.ModifyResponse = func(answer *http.Response) error {
		answers.Add(1)
		said, err := io.ReadAll(answer.Body)
		if err != nil {
			return err
		}
		answer.Body = io.NopCloser(bytes.NewReader(said))
		asked, _ := answer.Request.Context().Value(askedKey{}).([]byte)
		if err := protocol.Check(answer.Request, asked, answer.StatusCode, answer.Header, said); err != nil {
			t.Error(err)
		}
		return nil
	}
	server := httptest.NewServer(remembering(proxy))
	t.Cleanup(func() {
		server.Close()
		transport.CloseIdleConnections()
		if answers.Load() == 0 {
			t.Error("nothing was asked through the proxy")
		}
	})
	return strings.TrimPrefix(server.URL, "http://")
}

// askedKey is where a request's context has its body.
type askedKey struct{}

// remembering keeps the body of a request for who checks its answer.
func remembering(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		r = r.WithContext(context.WithValue(r.Context(), askedKey{}, body))
		r.Body = io.NopCloser(bytes.NewReader(body))
		next.ServeHTTP(w, r)
	})
}
