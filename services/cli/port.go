package cli

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/mesh/credentials"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// portFlags are the address of a gateway's port, and the credentials for it.
type portFlags struct {
	// flag is the name of the address's, standard the address that it has by itself.
	flag, standard string
	// start is a hint how to start such a port, section its section in a mesh's file.
	start, section string

	address           string
	tokenFile, caFile string
}

func (p *portFlags) add(cmd *cobra.Command, usage string) {
	flags := cmd.Flags()
	flags.StringVarP(&p.address, p.flag, "a", p.standard, usage+", as https:// where it has a certificate")
	flags.StringVar(&p.tokenFile, "token-file", "", "a file with a token of that port, where it wants one; of several lines the first")
	flags.StringVar(&p.caFile, "ca-file", "", "a file with the certificates, in PEM, that vouch for that port; the system's own if empty")
}

// reach calls the function with the parts of a client of the port. Errors about the port
// itself say what to do.
func (p portFlags) reach(ask func(client connect.HTTPClient, address string, options ...connect.ClientOption) error) error {
	address, err := baseURL("--"+p.flag, p.address, p.standard)
	if err != nil {
		return err
	}
	token, err := p.token()
	if err != nil {
		return err
	}
	transport, err := p.transport()
	if err != nil {
		return err
	}
	defer transport.CloseIdleConnections()
	client := &http.Client{
		Transport: noticing{transport},
		// The token is for that port alone.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return p.advise(address, ask(client, address, connect.WithInterceptors(token, patient())))
}

// Bounds on the silence of a port.
const (
	handshakeTime = 10 * time.Second
	// answerTime is for what a gateway answers at once.
	answerTime = 15 * time.Second
)

// errSilent is returned when a port accepts a request and does not answer.
var errSilent = fmt.Errorf("no answer within %s", answerTime)

// patient bounds the wait for each answer, except for inference requests and their
// results, which have timeouts of their own.
func patient() connect.Interceptor {
	return connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
			switch r.Spec().Procedure {
			case inferencev1connect.InferenceServiceInferProcedure, inferencev1connect.InferenceServiceGetResultProcedure:
				return next(ctx, r)
			}
			within, cancel := context.WithTimeoutCause(ctx, answerTime, errSilent)
			defer cancel()
			response, err := next(within, r)
			if err != nil && errors.Is(context.Cause(within), errSilent) {
				return nil, errSilent
			}
			return response, err
		}
	})
}

// baseURL returns the URL that a flag names; who writes host:port means plain
// HTTP.
func baseURL(flag, address, example string) (string, error) {
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", fmt.Errorf("%s: %q is no address such as %s", flag, redacted(address), example)
	}
	return address, nil
}

// redacted is an address without the password that may be in it.
func redacted(address string) string {
	u, err := url.Parse(address)
	switch {
	case err == nil:
		return u.Redacted()
	case !strings.Contains(address, "@"):
		return address
	}
	return "..." + address[strings.LastIndexByte(address, '@')+1:]
}

// maxRefusal bounds an answer that may be a refusal of Go's server, in bytes.
const maxRefusal = 1 << 20

// token returns what adds the token to every request, if there is one.
func (p portFlags) token() (connect.Interceptor, error) {
	var data []byte
	if p.tokenFile != "" {
		var err error
		if data, err = credentials.Read(p.tokenFile); err != nil {
			return nil, fmt.Errorf("--token-file: %w", err)
		}
	}
	token, _, _ := strings.Cut(strings.TrimSpace(string(data)), "\n")
	token = strings.TrimSpace(token)
	if token == "" && p.tokenFile != "" {
		return nil, fmt.Errorf("--token-file: %s: there is no token in it", p.tokenFile)
	}
	return bearer(token), nil
}

// bearer is a token that goes with all that is asked; empty is none.
type bearer string

var _ connect.Interceptor = bearer("")

// WrapUnary implements connect.Interceptor.
func (b bearer) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		b.add(r.Header())
		return next(ctx, r)
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (b bearer) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		out := next(ctx, spec)
		b.add(out.RequestHeader())
		return out
	}
}

// WrapStreamingHandler implements connect.Interceptor; the command serves nothing.
func (bearer) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

func (b bearer) add(h http.Header) {
	if b != "" {
		h.Set("Authorization", "Bearer "+string(b))
	}
}

func (p portFlags) transport() (*http.Transport, error) {
	out := &http.Transport{Proxy: http.ProxyFromEnvironment, TLSHandshakeTimeout: handshakeTime}
	if p.caFile == "" {
		return out, nil
	}
	roots, err := credentials.Roots(p.caFile)
	if err != nil {
		return nil, fmt.Errorf("--ca-file: %w", err)
	}
	out.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	return out, nil
}

// advise adds what to do to an error about the port itself. Other errors are unchanged.
func (p portFlags) advise(address string, err error) error {
	switch {
	case isDial(err):
		return fmt.Errorf("nobody answers at %s: %w; %s, --%s names that of another", redacted(address), err, p.start, p.flag)
	case errors.Is(err, errSilent):
		return fmt.Errorf("%s: %w", redacted(address), err)
	case errors.Is(err, errSpeaksTLS), errors.Is(err, http.ErrSchemeMismatch):
		return fmt.Errorf("%w; it has TLS where %s.cert_file says so: give --%s as https:// then, else as http://", err, p.section, p.flag)
	case isA[x509.UnknownAuthorityError](err):
		return fmt.Errorf("%w; --ca-file names a file with the certificate of who vouches for it", err)
	case isA[x509.HostnameError](err):
		return fmt.Errorf("%w; --%s has to name the port as its certificate does, which is %s.cert_file", err, p.flag, p.section)
	case refused(err) && p.tokenFile == "":
		return fmt.Errorf("%w; give it with --token-file", err)
	case refused(err):
		return fmt.Errorf("%w; the one in --token-file %s is another", err, p.tokenFile)
	}
	return err
}

// hopeless reports whether an error is about the port, so that every request to it
// fails alike.
func hopeless(err error) bool {
	return isDial(err) || errors.Is(err, errSilent) || errors.Is(err, errSpeaksTLS) || errors.Is(err, http.ErrSchemeMismatch) || isA[*tls.CertificateVerificationError](err) || refused(err)
}

// isDial reports whether nothing listens at the address.
func isDial(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial"
}

func isA[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

// refused reports whether the port rejects the token, or the lack of one.
func refused(err error) bool {
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok || rpc.Code() != connect.CodeUnauthenticated {
		return false
	}
	// A stage may use the code for its own inputs, and a proxy gives no details.
	info := infoOf(rpc)
	return info == nil || info.GetReason() == string(fault.Unauthenticated)
}

// errSpeaksTLS is returned when a port with TLS is asked without TLS.
var errSpeaksTLS = errors.New("the port speaks TLS, and was asked without")

// noticing turns the answer of Go's server to a request without TLS into errSpeaksTLS.
type noticing struct{ *http.Transport }

const wantsTLS = "Client sent an HTTP request to an HTTPS server."

// cutOff explains a reset connection: Go's server resets connections without TLS, and its
// answer may be lost.
func cutOff(r *http.Request, err error) error {
	if r.URL.Scheme != "http" || !errors.Is(err, syscall.ECONNRESET) {
		return err
	}
	return fmt.Errorf("the connection was cut off; perhaps %w: %w", errSpeaksTLS, err)
}

// RoundTrip implements http.RoundTripper.
func (n noticing) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := n.Transport.RoundTrip(r)
	if err = cutOff(r, err); err != nil || response.StatusCode != http.StatusBadRequest || response.ProtoMinor != 0 || response.Header.Get("Content-Type") != "" {
		return response, err
	}
	defer response.Body.Close() //nolint:errcheck // it was only read
	text, err := io.ReadAll(io.LimitReader(response.Body, maxRefusal))
	if err = cutOff(r, err); err != nil {
		return nil, err
	}
	if strings.HasPrefix(string(text), wantsTLS) {
		return nil, errSpeaksTLS
	}
	response.Body = io.NopCloser(bytes.NewReader(text))
	return response, nil
}
