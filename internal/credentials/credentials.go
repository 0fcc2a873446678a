// Package credentials reads the files that hold tokens and certificates, and makes
// the options by which a process authenticates to the broker.
//
//	token, err := credentials.Token("/etc/mesh/token")
//	tokens, err := credentials.ReadTokens("/etc/mesh/tokens", log) // of callers, one a line
//	tokens, err := credentials.ReadOperatorTokens("/etc/mesh/operators", log) // they may have a role
//	err = credentials.Pair{CertFile: cert, KeyFile: key}.Check("nats.")
//	certificate, err := credentials.Pair{CertFile: cert, KeyFile: key}.Load("nats.")
//	options, err := broker.Options() // of nats.Connect
//	log.Warn("broker lost", "error", credentials.Explain(err))
//
// Files are bounded, and no error has a file's content. Everything here is safe for
// concurrent use. Tests use internal/testbed, with a real broker.
package credentials

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
)

// maxBytes bounds a file, in bytes.
const maxBytes = 1 << 20

// Read returns a file's content. Errors begin with the path, or with the failed
// operation.
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

// WarnOfReaders logs the files that others than their owner can read or change.
func WarnOfReaders(log *slog.Logger, files []string) {
	for _, path := range files {
		info, err := os.Stat(path)
		if err != nil { // who needs the file reports that
			continue
		}
		if mode := info.Mode().Perm(); mode&0o077 != 0 {
			log.Warn("other users of this machine have access to a file with a secret", "file", path, "mode", fmt.Sprintf("%04o", mode), "fix", "chmod 600 "+path)
		}
	}
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

// Roots reads the certificates of authorities, in PEM.
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

// Pair names the files of a certificate chain and of its key, in PEM. Both empty
// means no certificate.
type Pair struct{ CertFile, KeyFile string }

// Check reports a certificate without a key, or a key without a certificate. The
// prefix precedes cert_file and key_file in the operator's file.
func (p Pair) Check(prefix string) error {
	switch {
	case p.CertFile != "" && p.KeyFile == "":
		return fmt.Errorf("%scert_file: has no key; name its file in %[1]skey_file", prefix)
	case p.CertFile == "" && p.KeyFile != "":
		return fmt.Errorf("%skey_file: has no certificate; name its file in %[1]scert_file", prefix)
	}
	return nil
}

// Load reads the pair. Errors begin with the prefix and the key.
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

// Server returns the TLS configuration of a server with the pair; nil without one. The files are read
// again when they change, which is logged.
func (p Pair) Server(prefix string, log *slog.Logger) (*tls.Config, error) {
	if p.CertFile == "" {
		return nil, nil
	}
	files, err := newReloaded(log, func() (*tls.Certificate, error) {
		certificate, err := p.Load(prefix)
		return &certificate, err
	}, p.CertFile, p.KeyFile)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return files.get(), nil },
		MinVersion:     tls.VersionTLS12,
	}, nil
}

func holdsKey(data []byte) bool {
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		if strings.HasSuffix(block.Type, "PRIVATE KEY") {
			return true
		}
	}
	return false
}
