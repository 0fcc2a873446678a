package stagemesh

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"

	"github.com/stagemesh/stagemesh/services/meshfile"
)

// adminFlags name the admin port to ask, and what it is asked with.
type adminFlags struct {
	address           string
	tokenFile, caFile string
}

func (a *adminFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVarP(&a.address, "admin", "a", "http://"+meshfile.DefaultAdmin, "the address of a gateway's admin port")
	flags.StringVar(&a.tokenFile, "token-file", "", "a file with the token of that port, where it has one")
	flags.StringVar(&a.caFile, "ca-file", "", "a file with the certificates, in PEM, that vouch for that port; the system's own if empty")
}

// with hands the function a client of the dead letters.
func (a adminFlags) with(ask func(adminv1connect.DeadLetterServiceClient) error) error {
	return a.reach(func(client connect.HTTPClient, address string, options ...connect.ClientOption) error {
		return ask(adminv1connect.NewDeadLetterServiceClient(client, address, options...))
	})
}

// reach hands the function what a client of the admin port is made of. An error says
// what to do where nobody listens there, or where the port is another.
func (a adminFlags) reach(ask func(client connect.HTTPClient, address string, options ...connect.ClientOption) error) error {
	address, err := baseURL("--admin", a.address, "http://"+meshfile.DefaultAdmin)
	if err != nil {
		return err
	}
	token, err := a.token()
	if err != nil {
		return err
	}
	transport, err := a.transport()
	if err != nil {
		return err
	}
	defer transport.CloseIdleConnections()
	asked := ask(&http.Client{Transport: transport}, address, connect.WithInterceptors(token))
	return a.advise(unreachable(address, "a gateway serves it at gateway.admin.listen, --admin names that of another", asked))
}

// maxSecret bounds a file with a token or with certificates, in bytes.
const maxSecret = 1 << 20

// token returns what adds the token to every request, if there is one.
func (a adminFlags) token() (connect.Interceptor, error) {
	data, err := a.read("--token-file", a.tokenFile)
	if err != nil {
		return nil, err
	}
	token := strings.TrimSpace(string(data))
	if token == "" && a.tokenFile != "" {
		return nil, fmt.Errorf("--token-file: %s: there is no token in it", a.tokenFile)
	}
	return connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
			if token != "" {
				r.Header().Set("Authorization", "Bearer "+token)
			}
			return next(ctx, r)
		}
	}), nil
}

func (a adminFlags) transport() (*http.Transport, error) {
	out := &http.Transport{Proxy: http.ProxyFromEnvironment}
	if a.caFile == "" {
		return out, nil
	}
	data, err := a.read("--ca-file", a.caFile)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(data) {
		return nil, fmt.Errorf("--ca-file: %s: there is no certificate in it", a.caFile)
	}
	out.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	return out, nil
}

// read returns what is in the file that the flag names; nothing where it names
// none.
func (a adminFlags) read(flag, path string) ([]byte, error) {
	if path == "" {
		return nil, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	defer f.Close() //nolint:errcheck // it was only read
	data, err := io.ReadAll(io.LimitReader(f, maxSecret))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	return data, nil
}

// advise says what to do about an error that is about the port itself.
func (a adminFlags) advise(err error) error {
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return err
	}
	_, untrusted := errors.AsType[x509.UnknownAuthorityError](err)
	switch {
	case untrusted:
		return fmt.Errorf("%w; --ca-file names a file with the certificate of who vouches for it", err)
	case rpc.Code() == connect.CodeUnauthenticated && a.tokenFile == "":
		return fmt.Errorf("%w; give it with --token-file", err)
	case infoOf(rpc) == nil && rpc.Code() != connect.CodeUnavailable && rpc.Code() != connect.CodeCanceled:
		return fmt.Errorf("%w; is %s an admin port? A gateway serves it at gateway.admin.listen, as https:// where it has a certificate", err, a.address)
	}
	return err
}
