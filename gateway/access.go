package gateway

import (
	"crypto/tls"
	"errors"
	"fmt"

	"github.com/stagemesh/stagemesh/gateway/front/port"
	"github.com/stagemesh/stagemesh/mesh/credentials"
)

// Access is how a port shows its callers who it is, and what it asks of them. The
// files are read by ReadFiles.
type Access struct {
	// TokenFile holds the tokens that callers have to know one of, one a line;
	// without it they need none.
	TokenFile string `yaml:"token_file,path"`
	// CertFile and KeyFile hold a certificate chain and its key, in PEM; without
	// them the port is plain HTTP.
	CertFile string `yaml:"cert_file,path"`
	KeyFile  string `yaml:"key_file,path"`
}

// Validate checks what can be told without reading the files. Errors begin with
// the key that they are about.
func (a Access) Validate() error {
	return a.pair().Check("")
}

func (a Access) pair() credentials.Pair {
	return credentials.Pair{CertFile: a.CertFile, KeyFile: a.KeyFile}
}

// scheme is what URLs of the port begin with.
func (a Access) scheme() string {
	if a.CertFile != "" {
		return "https://"
	}
	return "http://"
}

// door is what was in the files.
type door struct {
	// tls is nil where the port is plain.
	tls *tls.Config
	// tokens are none where callers need none.
	tokens port.Tokens
}

func (a Access) read() (d door, err error) {
	if d.tls, err = a.pair().Server(""); err != nil {
		return door{}, err
	}
	if a.TokenFile == "" {
		return d, nil
	}
	if d.tokens, err = port.ReadTokens(a.TokenFile); err != nil {
		return door{}, fmt.Errorf("token_file: %w", err)
	}
	return d, nil
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
