package gateway

import (
	"crypto/tls"
	"errors"
	"fmt"

	"github.com/stagemesh/stagemesh/gateway/front/port"
	"github.com/stagemesh/stagemesh/mesh/credentials"
)

// Access configures a port's TLS and tokens. ReadFiles reads the files.
type Access struct {
	// TokenFile holds the tokens that callers authenticate with, one a line. Without
	// it callers need no token.
	TokenFile string `yaml:"token_file,path"`
	// CertFile and KeyFile hold a certificate chain and its key, in PEM. Without them
	// the port is plain HTTP.
	CertFile string `yaml:"cert_file,path"`
	KeyFile  string `yaml:"key_file,path"`
}

// Validate checks the settings without reading the files. Errors begin with the key
// that they are about.
func (a Access) Validate() error {
	return a.pair().Check("")
}

func (a Access) pair() credentials.Pair {
	return credentials.Pair{CertFile: a.CertFile, KeyFile: a.KeyFile}
}

// scheme is the start of the port's URLs.
func (a Access) scheme() string {
	if a.CertFile != "" {
		return "https://"
	}
	return "http://"
}

// secrets are the contents of a port's files.
type secrets struct {
	// tls is nil for a port of plain HTTP.
	tls *tls.Config
	// tokens are empty where callers need none.
	tokens port.Tokens
}

func (a Access) read() (s secrets, err error) {
	if s.tls, err = a.pair().Server(""); err != nil {
		return secrets{}, err
	}
	if a.TokenFile == "" {
		return s, nil
	}
	if s.tokens, err = port.ReadTokens(a.TokenFile); err != nil {
		return secrets{}, fmt.Errorf("token_file: %w", err)
	}
	return s, nil
}

// inSection prefixes the key that each error begins with by the section.
func inSection(section string, err error) error {
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		var errs []error
		for _, one := range several.Unwrap() {
			errs = append(errs, inSection(section, one))
		}
		return errors.Join(errs...)
	}
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s.%w", section, err)
}
