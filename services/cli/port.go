package cli

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// port is one of a gateway's ports, with the flags of its address and credentials.
type port struct {
	// flag is the name of the address's flag, standard its default.
	flag, standard string
	// start is a hint how to start such a port, section its section in a mesh's file.
	start, section string

	address, context  string
	tokenFile, caFile string

	flags *pflag.FlagSet
	// sources name the values that no flag has set, by flag: a variable, or a context.
	sources map[string]string
}

const (
	publicFlag  = "address"
	adminFlag   = "admin"
	contextFlag = "context"
	tokenFlag   = "token-file"
	caFlag      = "ca-file"
)

// addPublic makes it the port for callers, and adds its flags to the command.
func (p *port) addPublic(cmd *cobra.Command) {
	p.add(cmd, port{flag: publicFlag, standard: "http://" + meshfile.DefaultListen, start: "stagemesh up starts a mesh", section: "gateway"}, "the gateway's address")
}

// addAdmin makes it the port for operators, and adds its flags to the command.
func (p *port) addAdmin(cmd *cobra.Command) {
	p.add(cmd, port{flag: adminFlag, standard: "http://" + meshfile.DefaultAdmin, start: "a gateway serves it at gateway.admin.listen", section: "gateway.admin"}, "the address of a gateway's admin port")
}

func (p *port) add(cmd *cobra.Command, kind port, usage string) {
	*p = kind
	flags := cmd.Flags()
	p.flags, p.sources = flags, map[string]string{}
	flags.StringVarP(&p.address, p.flag, "a", p.standard, usage+", as https:// where it has a certificate")
	flags.StringVar(&p.context, contextFlag, "", "the context to use, see stagemesh context; the one in use if empty")
	flags.StringVar(&p.tokenFile, tokenFlag, "", "a file with a token of that port, if it requires one; of several lines the first")
	flags.StringVar(&p.caFile, caFlag, "", "a file with the certificates, in PEM, that vouch for that port; the system's own if empty")
	cmd.MarkFlagsMutuallyExclusive(p.flag, contextFlag)
}

// complete sets what no flag says: from variables, then from a context. --context overrides the
// variables. The credentials of a context are for its own addresses, so it applies only where
// nothing else names one.
func (p *port) complete() error {
	set := func(flag, value, source string) {
		if value != "" && !p.flags.Changed(flag) && p.sources[flag] == "" {
			p.sources[flag] = source
			_ = p.flags.Lookup(flag).Value.Set(value) // they are strings
		}
	}
	for _, flag := range []string{p.flag, contextFlag, tokenFlag, caFlag} {
		if !p.flags.Changed(contextFlag) {
			set(flag, os.Getenv(program.Variable(flag)), program.Variable(flag))
		}
	}
	if p.flags.Changed(p.flag) || p.sources[p.flag] != "" {
		return nil
	}
	all, err := readContexts()
	name := cmp.Or(p.context, all.Current)
	if err != nil || name == "" {
		return err
	}
	c, err := all.find(name)
	if err != nil {
		return fmt.Errorf("%s: %w", p.source(contextFlag), err)
	}
	address, token := c.Address, c.TokenFile
	if p.flag == adminFlag {
		address, token = c.Admin, cmp.Or(c.AdminTokenFile, c.TokenFile)
	}
	if address == "" {
		return fmt.Errorf("context %s has no address for this command; add it again with --%s", name, p.flag)
	}
	source := "context " + name
	set(p.flag, address, source)
	set(tokenFlag, token, source)
	set(caFlag, c.CAFile, source)
	return nil
}

// source returns what has set the value of a flag, for messages.
func (p *port) source(flag string) string { return cmp.Or(p.sources[flag], "--"+flag) }

// clients are clients of all services. The public port has the first two, the admin port
// the others.
type clients struct {
	inferencev1connect.InferenceServiceClient
	inferencev1connect.JobServiceClient
	adminv1connect.DeadLetterServiceClient
	adminv1connect.JobAdminServiceClient
	adminv1connect.PipelineServiceClient
	adminv1connect.MeshServiceClient
	adminv1connect.ModelServiceClient

	// http sends to paths below the address of the port.
	http    *http.Client
	address string
}

// send sends a request to a path of the port over plain HTTP. An answer with another status than 200 is
// an error; it is a *fault.Fault if the gateway gives a reason.
func (c clients) send(ctx context.Context, method, path string, header http.Header, body io.Reader) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(c.address, "/")+path, body)
	if err != nil {
		return nil, err
	}
	if header != nil {
		r.Header = header
	}
	response, err := c.http.Do(r)
	if err != nil || response.StatusCode == http.StatusOK {
		return response, err
	}
	defer response.Body.Close() //nolint:errcheck // it was only read
	text, err := io.ReadAll(io.LimitReader(response.Body, maxRefusal))
	var failure struct {
		Error struct{ Reason, Message string }
	}
	switch {
	case err != nil:
		return nil, err
	case json.Unmarshal(text, &failure) != nil || failure.Error.Reason == "":
		return nil, fmt.Errorf("%s from %s: %.200q", response.Status, redact(c.address), text)
	case response.StatusCode == http.StatusUnauthorized:
		return nil, connect.NewError(connect.CodeUnauthenticated, errors.New(failure.Error.Message))
	}
	return nil, fault.Newf(fault.Reason(failure.Error.Reason), "%s", failure.Error.Message)
}

// reach calls the function with clients of the port. Errors about the port itself say what
// to do.
func (p *port) reach(ask func(clients) error) error {
	if err := p.complete(); err != nil {
		return err
	}
	address, err := p.url()
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
		Transport: authorized{transport, token},
		// The token is for that port alone.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	limited := connect.WithInterceptors(connect.UnaryInterceptorFunc(limitWait))
	return p.advise(address, describeRPC(ask(clients{
		inferencev1connect.NewInferenceServiceClient(client, address, limited),
		inferencev1connect.NewJobServiceClient(client, address, limited),
		adminv1connect.NewDeadLetterServiceClient(client, address, limited),
		adminv1connect.NewJobAdminServiceClient(client, address, limited),
		adminv1connect.NewPipelineServiceClient(client, address, limited),
		adminv1connect.NewMeshServiceClient(client, address, limited),
		adminv1connect.NewModelServiceClient(client, address, limited),
		client, address,
	})))
}

type runFunc func(cmd *cobra.Command, client clients, args []string) error

// askPublic and askAdmin complete a command: it gets the flags of a port, and calls the function
// with clients of that.
func askPublic(cmd *cobra.Command, run runFunc) *cobra.Command {
	return ask((*port).addPublic, cmd, run)
}

func askAdmin(cmd *cobra.Command, run runFunc) *cobra.Command { return ask((*port).addAdmin, cmd, run) }

func ask(add func(*port, *cobra.Command), cmd *cobra.Command, run runFunc) *cobra.Command {
	p := new(port)
	add(p, cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return p.reach(func(client clients) error { return run(cmd, client, args) })
	}
	return cmd
}

// Bounds on the silence of a port.
const (
	handshakeTime = 10 * time.Second
	// answerTime is for what a gateway answers at once.
	answerTime = 15 * time.Second
	// slowBytes is how much of a request a slow line takes in a second.
	slowBytes = 256 << 10
)

// errSilent is returned when a port accepts a request and does not answer.
var errSilent = errors.New("no answer")

// noAnswer returns errSilent with the time that was waited.
func noAnswer(within time.Duration) error { return fmt.Errorf("%w within %s", errSilent, within) }

// answerLimit returns how long a call may be without the begin of an answer: answerTime, plus the wait or
// timeout that the request asks for, and the time to send it. Calls that take as long as their work have no limit.
func answerLimit(request any) (limit time.Duration, isLimited bool) {
	limit = answerTime
	switch in := request.(type) {
	case *inferencev1.SubmitJobsRequest, *adminv1.EnsureLoadedRequest, *adminv1.SetAliasRequest:
		return 0, false
	case *inferencev1.InferRequest:
		if in.GetTimeout() == nil {
			return 0, false
		}
		limit += in.GetTimeout().AsDuration() + time.Duration(proto.Size(in)/slowBytes)*time.Second
	case interface{ GetWait() *durationpb.Duration }: // GetResult, GetJob, ListJobs
		limit += in.GetWait().AsDuration()
	}
	return limit, true
}

// limitWait applies answerLimit. An answer that has begun may take as long as it takes.
func limitWait(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		limit, isLimited := answerLimit(r.Any())
		if !isLimited {
			return next(ctx, r)
		}
		within, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		timer := time.AfterFunc(limit, func() { cancel(noAnswer(limit)) })
		defer timer.Stop()
		begun := &httptrace.ClientTrace{GotFirstResponseByte: func() { timer.Stop() }}
		response, err := next(httptrace.WithClientTrace(within, begun), r)
		if cause := context.Cause(within); err != nil && errors.Is(cause, errSilent) {
			return nil, cause
		}
		return response, err
	}
}

// url returns the address as a URL; host:port means plain HTTP.
func (p *port) url() (string, error) {
	address := p.address
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	u, err := url.Parse(address)
	if err == nil && u.Port() != "" {
		_, err = strconv.ParseUint(u.Port(), 10, 16)
	}
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || u.RawQuery+u.Fragment != "" {
		return "", fmt.Errorf("%s: %q is not an address such as %s", p.source(p.flag), redact(address), p.standard)
	}
	return address, nil
}

// redact returns an address without the password that may be in it.
func redact(address string) string {
	u, err := url.Parse(address)
	switch {
	case err == nil:
		return u.Redacted()
	case !strings.Contains(address, "@"):
		return address
	}
	return "..." + address[strings.LastIndexByte(address, '@')+1:]
}

// token returns the first token of the file; empty without a file.
func (p *port) token() (string, error) {
	if p.tokenFile == "" {
		return "", nil
	}
	data, err := credentials.Read(p.tokenFile)
	if err != nil {
		return "", fmt.Errorf("%s: %w", p.source(tokenFlag), err)
	}
	words := strings.Fields(string(data)) // a tenant and a role may follow the token
	if len(words) == 0 {
		return "", fmt.Errorf("%s: %s: there is no token in it", p.source(tokenFlag), p.tokenFile)
	}
	return words[0], nil
}

func (p *port) transport() (*http.Transport, error) {
	out := &http.Transport{Proxy: http.ProxyFromEnvironment, TLSHandshakeTimeout: handshakeTime}
	if p.caFile == "" {
		return out, nil
	}
	roots, err := credentials.Roots(p.caFile)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", p.source(caFlag), err)
	}
	out.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	return out, nil
}

// advise adds what to do to an error about the port itself. Other errors are unchanged.
func (p *port) advise(address string, err error) error {
	rpc, isRPC := errors.AsType[*connect.Error](err)
	from := ""
	if p.sources[p.flag] != "" {
		from = " (set by " + p.sources[p.flag] + ")"
	}
	switch {
	case isDial(err):
		return fmt.Errorf("cannot connect to %s: %w; %s, or name another address with --%s", redact(address)+from, err, p.start, p.flag)
	case errors.Is(err, errSilent):
		return fmt.Errorf("%s: %w", redact(address), err)
	case errors.Is(err, errSpeaksTLS), errors.Is(err, http.ErrSchemeMismatch):
		return fmt.Errorf("%w; it has TLS where %s.cert_file says so: give --%s as https:// then, else as http://", err, p.section, p.flag)
	case isA[x509.UnknownAuthorityError](err):
		return fmt.Errorf("%w; --ca-file names a file with the certificate of who vouches for it", err)
	case isA[x509.HostnameError](err):
		return fmt.Errorf("%w; --%s has to name the port as its certificate does, which is %s.cert_file", err, p.flag, p.section)
	case isRefused(err) && p.tokenFile == "":
		return fmt.Errorf("%w; give it with --token-file", err)
	case isRefused(err):
		return fmt.Errorf("%w; the one in %s %s is another", err, p.source(tokenFlag), p.tokenFile)
	case !isRPC || p.flag != adminFlag || isHopeless(err) || infoOf(rpc) != nil || rpc.Code() == connect.CodeUnavailable || rpc.Code() == connect.CodeCanceled:
		return err
	}
	return fmt.Errorf("%w; is %s an admin port? A gateway serves it at gateway.admin.listen, as https:// where it has a certificate", err, redact(p.address))
}

// isHopeless reports whether an error is about the port, so that every request to it
// fails alike.
func isHopeless(err error) bool {
	return isDial(err) || errors.Is(err, errSilent) || errors.Is(err, errSpeaksTLS) || errors.Is(err, http.ErrSchemeMismatch) || isA[*tls.CertificateVerificationError](err) || isRefused(err)
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

// isRefused reports whether the port rejects the token, or the lack of one.
func isRefused(err error) bool {
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

// authorized adds a token to every request, unless it is empty. It turns the answer of
// Go's server to a request without TLS into errSpeaksTLS.
type authorized struct {
	*http.Transport
	token string
}

const (
	wantsTLS = "Client sent an HTTP request to an HTTPS server."
	// maxRefusal bounds an answer that may be wantsTLS, in bytes.
	maxRefusal = 1 << 20
)

// RoundTrip implements http.RoundTripper.
func (a authorized) RoundTrip(r *http.Request) (*http.Response, error) {
	if a.token != "" {
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer "+a.token)
	}
	// Go's server resets connections without TLS, and its answer may be lost.
	explain := func(err error) error {
		if r.URL.Scheme != "http" || !errors.Is(err, syscall.ECONNRESET) {
			return err
		}
		return fmt.Errorf("the connection was cut off; perhaps %w: %w", errSpeaksTLS, err)
	}
	response, err := a.Transport.RoundTrip(r)
	if err != nil || response.StatusCode != http.StatusBadRequest || response.ProtoMinor != 0 || response.Header.Get("Content-Type") != "" {
		return response, explain(err)
	}
	defer response.Body.Close() //nolint:errcheck // it was only read
	text, err := io.ReadAll(io.LimitReader(response.Body, maxRefusal))
	switch {
	case err != nil:
		return nil, explain(err)
	case strings.HasPrefix(string(text), wantsTLS):
		return nil, errSpeaksTLS
	}
	response.Body = io.NopCloser(bytes.NewReader(text))
	return response, nil
}

// rpcError is an error of the gateway whose text is Describe's.
type rpcError struct{ error }

// Error implements error.
func (t rpcError) Error() string { return visibleLines(Describe(t.error)) }

// Unwrap returns the error of the client.
func (t rpcError) Unwrap() error { return t.error }

// describeRPC makes an error of the gateway an rpcError; others stay unchanged.
func describeRPC(err error) error {
	if rpc, ok := err.(*connect.Error); ok { //nolint:errorlint // a wrapped one has its own text
		return rpcError{rpc}
	}
	return err
}

// Describe returns the text of an error, with the mesh's reason and the stage where it
// arose.
func Describe(err error) string {
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return err.Error()
	}
	info := infoOf(rpc)
	if info == nil {
		return rpc.Error()
	}
	place := info.GetReason()
	if stage := info.GetMetadata()["stage"]; stage != "" {
		place += " at stage " + stage
	}
	return place + ": " + rpc.Message()
}

// infoOf returns the mesh's details of an error, or nil.
func infoOf(err *connect.Error) *errdetails.ErrorInfo {
	for _, detail := range err.Details() {
		value, err := detail.Value()
		if info, is := value.(*errdetails.ErrorInfo); err == nil && is {
			return info
		}
	}
	return nil
}
