package credentials

import (
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// Broker names the files of a mesh's section nats, by which a process and the
// broker authenticate each other, for every package that connects.
//
// Options reads the files, so that a bad one is reported at once; the client reads
// them again each time that it connects, so they may be replaced while a process
// runs. Errors name the key of the mesh's file, and never a file's content.
type Broker struct {
	// CredentialsFile holds NATS user credentials, TokenFile a token; empty means
	// none.
	CredentialsFile string `yaml:"credentials_file,path"`
	TokenFile       string `yaml:"token_file,path"`
	// CAFile has the certificates, in PEM, that vouch for the broker; with it the
	// broker has to have TLS. Empty means the system's own, where it has TLS.
	CAFile string `yaml:"ca_file,path"`
	// CertFile and KeyFile hold the process's own certificate and its key.
	CertFile string `yaml:"cert_file,path"`
	KeyFile  string `yaml:"key_file,path"`
}

// Options returns the options of nats.Connect, or the error of a bad file.
func (f Broker) Options() ([]nats.Option, error) {
	var out []nats.Option
	if f.CredentialsFile != "" {
		if _, err := Read(f.CredentialsFile); err != nil {
			return nil, fmt.Errorf("nats.credentials_file: %w", err)
		}
		out = append(out, nats.UserCredentials(f.CredentialsFile))
	}
	if f.TokenFile != "" {
		if _, err := Token(f.TokenFile); err != nil {
			return nil, fmt.Errorf("nats.token_file: %w", err)
		}
		out = append(out, nats.TokenHandler(f.token))
	}
	if f.CAFile != "" {
		if _, err := Roots(f.CAFile); err != nil {
			return nil, fmt.Errorf("nats.ca_file: %w", err)
		}
		out = append(out, nats.RootCAs(f.CAFile))
	}
	if f.CertFile != "" {
		if _, err := (Pair{CertFile: f.CertFile, KeyFile: f.KeyFile}).Load("nats."); err != nil {
			return nil, err
		}
		out = append(out, nats.ClientCert(f.CertFile, f.KeyFile))
	}
	return out, nil
}

// token returns the token each time that the client connects. Where the file is
// missing it is empty, and the broker refuses it.
func (f Broker) token() string {
	token, _ := Token(f.TokenFile)
	return token
}

// Delays before the next attempt to connect. They are longer after an error that
// an operator must fix, because the broker logs each attempt.
const (
	delayBase, delayJitter     = 50 * time.Millisecond, 200 * time.Millisecond
	refusedBase, refusedJitter = 1500 * time.Millisecond, time.Second
)

// ReconnectDelay returns the pause before the next attempt to connect, after the
// error of the latest one; nil where there was none.
func ReconnectDelay(err error) time.Duration {
	if Advice(err) != "" {
		return refusedBase + rand.N(refusedJitter)
	}
	return delayBase + rand.N(delayJitter)
}

// Explain adds the Advice on an error of connecting to it, where there is any.
func Explain(err error) error {
	if advice := Advice(err); advice != "" {
		return fmt.Errorf("%w; %s", err, advice)
	}
	return err
}

// Advice returns how an operator can fix an error of connecting, and "" for errors
// that pass by themselves.
func Advice(err error) string {
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	var invalid x509.CertificateInvalidError
	switch {
	case err == nil:
		return ""
	case IsRefused(err):
		return "the broker refuses who this process says it is: see nats.token_file and nats.credentials_file, or the user in nats.url"
	case errors.Is(err, nats.ErrTokenAlreadySet):
		return "there is a token in nats.token_file and another in the broker's URL; leave one out"
	case errors.Is(err, nats.ErrSecureConnWanted):
		return "the broker has no TLS, which nats.ca_file, nats.cert_file and tls:// in its URL ask for"
	case errors.As(err, &unknown):
		return "nats.ca_file names a file with the certificate of who vouches for the broker"
	case errors.As(err, &name):
		return "nats.url has to name the broker as its certificate does"
	case errors.As(err, &invalid):
		return "the broker's certificate, or the one in nats.ca_file that vouches for it, is not good now or not for this: renew it, where the broker is in a process of the mesh in nats.listen_cert_file"
	case wantsCertificate(err):
		return "the broker wants another certificate of this process: nats.cert_file and nats.key_file"
	}
	return ""
}

// IsRefused reports whether the broker refuses the user.
func IsRefused(err error) bool {
	for _, refusal := range []error{
		nats.ErrAuthorization, nats.ErrAuthExpired, nats.ErrAuthRevoked, nats.ErrAccountAuthExpired,
		nats.ErrPermissionViolation, nats.ErrNoUserCB, nats.ErrNkeyButNoSigCB,
	} {
		if errors.Is(err, refusal) {
			return true
		}
	}
	return false
}

// wantsCertificate reports whether the broker has ended the handshake because of
// this process's certificate. The type of that alert is not exported.
func wantsCertificate(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error" && strings.Contains(op.Err.Error(), "certificate")
}
