package target

import (
	"net/http"
	"time"
)

// Bounds on connections.
const (
	handshakeTime = 10 * time.Second
	idleTime      = time.Minute
)

// transport returns connections of HTTP/2, or else of HTTP/1.1.
func (s Settings) transport(two bool) *http.Transport {
	out := &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: s.TLS.Clone(),
		TLSHandshakeTimeout: handshakeTime, IdleConnTimeout: idleTime,
		MaxIdleConnsPerHost: s.connections(), DisableCompression: true,
		Protocols: new(http.Protocols),
	}
	out.Protocols.SetHTTP1(!two)
	out.Protocols.SetHTTP2(two)
	out.Protocols.SetUnencryptedHTTP2(two)
	return out
}

// direct follows nobody elsewhere: the token is for that port alone.
func direct(transport *http.Transport) *http.Client {
	return &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
