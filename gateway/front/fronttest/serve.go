package fronttest

import (
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
)

// Serve serves h with HTTP/1 and cleartext HTTP/2 on one port until the test
// ends, and returns its URL.
func Serve(t testing.TB, h http.Handler) string {
	t.Helper()
	server := httptest.NewUnstartedServer(h)
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetHTTP1(true)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	t.Cleanup(server.Close)
	return server.URL
}

// Client returns a client of cleartext HTTP/2 where h2c is true, and of HTTP/1
// otherwise.
func Client(t testing.TB, h2c bool) *http.Client {
	t.Helper()
	transport := &http.Transport{
		Protocols:          new(http.Protocols),
		DialContext:        new(net.Dialer).DialContext,
		DisableCompression: true,
	}
	transport.Protocols.SetHTTP1(!h2c)
	transport.Protocols.SetUnencryptedHTTP2(h2c)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}
