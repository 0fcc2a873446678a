// Package secretfile reads the files that hold tokens and certificates.
//
//	token, err := secretfile.Token("/etc/mesh/token")
//	err = secretfile.Pair{CertFile: cert, KeyFile: key}.Check("nats.")
//	certificate, err := secretfile.Pair{CertFile: cert, KeyFile: key}.Load("nats.")
//
// Files are bounded, and what is in one is never in an error. Everything here is safe
// for concurrent use. Tests use mesh/tlstest.
package secretfile

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"os"
	"strings"
)

// maxBytes bounds a file, in bytes.
const maxBytes = 1 << 20

// Read returns what is in a file. Errors begin with its path, or with what was done
// with it.
func Read(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close() //nolint:errcheck // it was only read
	data, err := io.ReadAll(io.LimitReader(file, maxBytes+1))
	if err == nil && len(data) > maxBytes {
		err = fmt.Errorf("larger than %d bytes", maxBytes)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return data, nil
}

// Token reads a token from a file, without the white space around it: one word of
// visible ASCII.
func Token(path string) (string, error) {
	data, err := Read(path)
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(string(data))
	if token == "" {
		return "", fmt.Errorf("%s: there is no token in it", path)
	}
	if strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fmt.Errorf("%s: a token is one word of visible ASCII", path)
	}
	return token, nil
}

// Roots reads the certificates of those who vouch for others, in PEM.
func Roots(path string) (*x509.CertPool, error) {
	data, err := Read(path)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(data) {
		return nil, fmt.Errorf("%s: there is no certificate in it", path)
	}
	return roots, nil
}

// Pair are the files of a certificate chain and of its key, in PEM; empty ones mean
// that there is none.
type Pair struct{ CertFile, KeyFile string }

// Check reports a certificate without a key, or a key without a certificate. The
// prefix is what comes before cert_file and key_file where they are written down.
func (p Pair) Check(prefix string) error {
	switch {
	case p.CertFile != "" && p.KeyFile == "":
		return fmt.Errorf("%scert_file: has no key; name its file in %[1]skey_file", prefix)
	case p.CertFile == "" && p.KeyFile != "":
		return fmt.Errorf("%skey_file: has no certificate; name its file in %[1]scert_file", prefix)
	}
	return nil
}

// Load reads the pair. Errors begin with the key that they are about, after the
// prefix.
func (p Pair) Load(prefix string) (tls.Certificate, error) {
	cert, err := Read(p.CertFile)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("%scert_file: %w", prefix, err)
	}
	key, err := Read(p.KeyFile)
	if err == nil && !holdsKey(key) {
		err = fmt.Errorf("%s: there is no private key in it", p.KeyFile)
	}
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("%skey_file: %w", prefix, err)
	}
	certificate, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("%scert_file: %w", prefix, err)
	}
	return certificate, nil
}

// Server returns how a server shows the pair, nil where there is none.
func (p Pair) Server(prefix string) (*tls.Config, error) {
	if p.CertFile == "" {
		return nil, nil
	}
	certificate, err := p.Load(prefix)
	if err != nil {
		return nil, err
	}
	return &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}, nil
}

func holdsKey(data []byte) bool {
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		if strings.HasSuffix(block.Type, "PRIVATE KEY") {
			return true
		}
	}
	return false
}
