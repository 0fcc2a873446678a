// Package brokerauth is how a process and the mesh's broker know each other: the files
// of a mesh's section nats, for every package that connects.
//
//	options, err := files.Options() // of nats.Connect
//	log.Warn("broker lost", "error", brokerauth.Explain(err))
//
// The files are read when Options is called, so that what is wrong with one is told at
// once, and again each time that the client connects, so that they may be replaced
// while a process runs. Errors name the key of the mesh's file, and what is in a file
// is never in one of them.
//
// Everything here is safe for concurrent use. Tests use mesh/tlstest and a real
// broker.
package brokerauth

import (
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/mesh/secretfile"
)

// Files are what a process shows the broker, and whom it trusts to be the broker.
type Files struct {
	// CredentialsFile holds NATS user credentials, TokenFile a token; empty means
	// none.
	CredentialsFile, TokenFile string
	// CAFile has the certificates, in PEM, that vouch for the broker; with it the
	// broker has to have TLS. Empty means the system's own, where it has TLS.
	CAFile string
	// CertFile and KeyFile hold the process's own certificate and its key.
	CertFile, KeyFile string
}

// Options returns the client's options, or what is wrong with a file.
func (f Files) Options() ([]nats.Option, error) {
	var out []nats.Option
	if f.CredentialsFile != "" {
		if _, err := secretfile.Read(f.CredentialsFile); err != nil {
			return nil, fmt.Errorf("nats.credentials_file: %w", err)
		}
		out = append(out, nats.UserCredentials(f.CredentialsFile))
	}
	if f.TokenFile != "" {
		if _, err := secretfile.Token(f.TokenFile); err != nil {
			return nil, fmt.Errorf("nats.token_file: %w", err)
		}
		out = append(out, nats.TokenHandler(f.token))
	}
	if f.CAFile != "" {
		if _, err := secretfile.Roots(f.CAFile); err != nil {
			return nil, fmt.Errorf("nats.ca_file: %w", err)
		}
		out = append(out, nats.RootCAs(f.CAFile))
	}
	if f.CertFile != "" {
		if _, err := (secretfile.Pair{CertFile: f.CertFile, KeyFile: f.KeyFile}).Load("nats."); err != nil {
			return nil, err
		}
		out = append(out, nats.ClientCert(f.CertFile, f.KeyFile))
	}
	return out, nil
}

// token is asked for each time that the client connects. The broker refuses none
// where the file is gone.
func (f Files) token() string {
	token, _ := secretfile.Token(f.TokenFile)
	return token
}

// Delays before another attempt to connect: what does not mend by itself is not
// hammered at, for the broker logs each attempt.
const (
	delayBase, delayJitter     = 50 * time.Millisecond, 200 * time.Millisecond
	refusedBase, refusedJitter = 1500 * time.Millisecond, time.Second
)

// Delay is how long a client waits before it tries to connect again, after the error
// of the broker's answer to the latest attempt, nil where there was none.
func Delay(err error) time.Duration {
	if Advice(err) != "" {
		return refusedBase + rand.N(refusedJitter)
	}
	return delayBase + rand.N(delayJitter)
}

// Explain returns an error of connecting with what is to be done about it, where it
// does not mend by itself; others stay as they are.
func Explain(err error) error {
	if advice := Advice(err); advice != "" {
		return fmt.Errorf("%w; %s", err, advice)
	}
	return err
}

// Advice says what is to be done about an error of connecting that does not mend by
// itself, and is "" of others.
func Advice(err error) string {
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	var invalid x509.CertificateInvalidError
	switch {
	case err == nil:
		return ""
	case Refused(err):
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

// Refused reports whether an error of the client is that the broker refuses the user.
func Refused(err error) bool {
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

// wantsCertificate reports whether the broker has ended the handshake over this
// process's certificate. The alert that says so has no type that others may know.
func wantsCertificate(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error" && strings.Contains(op.Err.Error(), "certificate")
}
