package gateway

import (
	"crypto/tls"
	"errors"
	"fmt"

	"github.com/stagemesh/stagemesh/gateway/front/port"
)

// Access is how a port shows its callers who it is, and what it asks of them. The
// files are read when the gateway starts.
type Access struct {
	// TokenFile holds the tokens that callers have to know one of, one a line;
	// without it they need none.
	TokenFile string
	// CertFile and KeyFile hold a certificate chain and its key, in PEM; without
	// them the port is plain HTTP.
	CertFile, KeyFile string
}

// Validate checks what can be told without reading the files. Errors begin with
// the key that they are about.
func (a Access) Validate() error {
	var errs []error
	if a.CertFile != "" && a.KeyFile == "" {
		errs = append(errs, errors.New("cert_file: has no key; name its file in key_file"))
	}
	if a.KeyFile != "" && a.CertFile == "" {
		errs = append(errs, errors.New("key_file: has no certificate; name its file in cert_file"))
	}
	return errors.Join(errs...)
}

// scheme is what URLs of the port begin with.
func (a Access) scheme() string {
	if a.CertFile != "" {
		return "https://"
	}
	return "http://"
}

// tls is nil where the port is plain.
func (a Access) tls() (*tls.Config, error) {
	if a.CertFile == "" {
		return nil, nil
	}
	certificate, err := tls.LoadX509KeyPair(a.CertFile, a.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("cert_file: %w", err)
	}
	return &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}, nil
}

// tokens are none where callers need none.
func (a Access) tokens() (port.Tokens, error) {
	if a.TokenFile == "" {
		return port.Tokens{}, nil
	}
	tokens, err := port.ReadTokens(a.TokenFile)
	if err != nil {
		return port.Tokens{}, fmt.Errorf("token_file: %w", err)
	}
	return tokens, nil
}

// keyed puts the section that errors are about before each of them.
func keyed(section string, err error) error {
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		var errs []error
		for _, one := range several.Unwrap() {
			errs = append(errs, keyed(section, one))
		}
		return errors.Join(errs...)
	}
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s.%w", section, err)
}
