package testbed

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"testing"
	"time"
)

// Authority issues certificates that are valid for an hour, and end with the test.
type Authority struct {
	// File has its own certificate, in PEM; Roots trust only this one.
	File  string
	Roots *x509.CertPool

	t           testing.TB
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	issued      int64
}

// NewAuthority returns a new authority.
func NewAuthority(t testing.TB) *Authority {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the test's authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	a := &Authority{t: t, Roots: x509.NewCertPool(), key: newKey(t), issued: 1}
	data, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.certificate, err = x509.ParseCertificate(data); err != nil {
		t.Fatal(err)
	}
	a.Roots.AddCert(a.certificate)
	a.File = SecretFile(t, block("CERTIFICATE", data))
	return a
}

// Certificate returns the files of a certificate for the names, which may be
// addresses, and of its key.
func (a *Authority) Certificate(names ...string) (certFile, keyFile string) {
	a.t.Helper()
	return a.issue(time.Now().Add(time.Hour), names)
}

// Expired returns the files of an expired certificate, as Certificate does.
func (a *Authority) Expired(names ...string) (certFile, keyFile string) {
	a.t.Helper()
	return a.issue(time.Now().Add(-time.Hour), names)
}

func (a *Authority) issue(notAfter time.Time, names []string) (certFile, keyFile string) {
	a.t.Helper()
	a.issued++
	template := &x509.Certificate{
		SerialNumber: big.NewInt(a.issued), Subject: pkix.Name{CommonName: names[0]},
		NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: notAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	key := newKey(a.t)
	data, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	return SecretFile(a.t, block("CERTIFICATE", data)), SecretFile(a.t, block("PRIVATE KEY", private))
}

// Server returns the TLS configuration of a server with a certificate for the names.
func (a *Authority) Server(names ...string) *tls.Config {
	a.t.Helper()
	cert, key := a.Certificate(names...)
	return ServerTLS(a.t, cert, key)
}

// ServerTLS returns the TLS configuration of a server with the certificate of the files.
func ServerTLS(t testing.TB, certFile, keyFile string) *tls.Config {
	t.Helper()
	certificate, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func block(kind string, data []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data}))
}
