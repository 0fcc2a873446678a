// Package tlstest makes the certificates, and other secrets, that a test's servers
// and clients have in files.
//
//	authority := tlstest.New(t)
//	cert, key := authority.Certificate("127.0.0.1")
//	token := tlstest.File(t, "open-sesame\n")
//
// They are made anew for each test, are good for an hour, and end with it. Nothing
// here is for use by several goroutines at once.
package tlstest

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
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Authority vouches for certificates.
type Authority struct {
	// File has its own certificate, in PEM; Roots trust it alone.
	File  string
	Roots *x509.CertPool

	t           testing.TB
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	issued      int64
}

// New returns an authority that nobody else knows.
func New(t testing.TB) *Authority {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the test's authority"},
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
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
	a.File = File(t, block("CERTIFICATE", data))
	return a
}

// Certificate returns the files of a certificate for the names, which may be
// addresses, and of its key.
func (a *Authority) Certificate(names ...string) (certFile, keyFile string) {
	a.t.Helper()
	return a.issue(time.Now().Add(time.Hour), names)
}

// Expired is Certificate of one whose time is over.
func (a *Authority) Expired(names ...string) (certFile, keyFile string) {
	a.t.Helper()
	return a.issue(time.Now().Add(-time.Hour), names)
}

func (a *Authority) issue(notAfter time.Time, names []string) (certFile, keyFile string) {
	a.t.Helper()
	a.issued++
	template := &x509.Certificate{
		SerialNumber: big.NewInt(a.issued), Subject: pkix.Name{CommonName: names[0]}, NotAfter: notAfter,
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
	return File(a.t, block("CERTIFICATE", data)), File(a.t, block("PRIVATE KEY", private))
}

// Server returns how a server shows a certificate for the names.
func (a *Authority) Server(names ...string) *tls.Config {
	a.t.Helper()
	cert, key := a.Certificate(names...)
	return Shown(a.t, cert, key)
}

// Shown returns how a server shows the certificate in the files.
func Shown(t testing.TB, certFile, keyFile string) *tls.Config {
	t.Helper()
	certificate, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}
}

// File returns the path of a file with the text.
func File(t testing.TB, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
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
