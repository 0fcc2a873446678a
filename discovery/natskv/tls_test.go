package natskv_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/natskv"
)

// certificate returns one for this machine, and who trusts it.
func certificate(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA: true, BasicConstraintsValid: true,
	}
	data, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(data)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{data}, PrivateKey: key}, pool
}

func TestACertificateThatIsNotTrustedIsSaid(t *testing.T) {
	t.Parallel()
	own, trusted := certificate(t)
	b := broker(t, func(o *server.Options) {
		o.TLSConfig = &tls.Config{Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS13}
		o.TLSTimeout = 5
	})
	with := func(config *tls.Config) *natskv.Store {
		return client(t, settings(b.ClientURL(), func(s *natskv.Settings) { s.TLS = config }))
	}
	if _, err := with(&tls.Config{RootCAs: trusted}).List(t.Context(), ""); err != nil {
		t.Errorf("one that is trusted: %v", err)
	}
	for name, config := range map[string]*tls.Config{"no TLS": nil, "others trusted": {RootCAs: x509.NewCertPool()}} {
		_, err := with(config).List(t.Context(), "")
		if !errors.Is(err, discovery.ErrUnavailable) || !strings.Contains(err.Error(), "certificate") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
