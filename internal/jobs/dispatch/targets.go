package dispatch

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/webhook"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// HTTPTarget is an endpoint that gets jobs by POST below URL, with the job's ID as Idempotency-Key.
// Redirects are not followed.
type HTTPTarget struct {
	URL string `yaml:"url"`
	// Headers are sent along; "{tenant}" in a value is the job's tenant.
	Headers map[string]string `yaml:"headers"`
	// TokenFile holds the token of Authorization: Bearer. It is read for each attempt.
	TokenFile string `yaml:"token_file,path"`
	// CAFile has the endpoint's authorities, else the system's. CertFile and KeyFile are the dispatcher's own.
	CAFile   string `yaml:"ca_file,path"`
	CertFile string `yaml:"cert_file,path"`
	KeyFile  string `yaml:"key_file,path"`
	// RepeatUnknown has jobs sent again whose dispatcher died, else they fail; nil means true.
	RepeatUnknown *bool `yaml:"repeat_unknown"`
}

const (
	// DefaultTimeout bounds an attempt at an HTTP target.
	DefaultTimeout = 10 * time.Minute

	// maxAnswer has the end of a job fit into one message of a broker with the defaults.
	maxAnswer        = 8<<20 - 128<<10
	maxAnswerHeader  = 64 << 10
	connectTimeout   = 5 * time.Second
	idempotencyKey   = "Idempotency-Key"
	tenantInHeader   = "{tenant}"
	idleConnsTimeout = 90 * time.Second
)

// ownHeaders are set by the target, or are of one connection only.
var ownHeaders = []string{
	idempotencyKey, "Content-Type", "Content-Length", "Host",
	"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

func (c HTTPTarget) validate() error {
	errs := []error{credentials.Pair{CertFile: c.CertFile, KeyFile: c.KeyFile}.Check("")}
	u, err := url.Parse(c.URL)
	switch {
	case err != nil:
		errs = append(errs, errors.New("url: must be a URL such as https://host:8000"))
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "":
		errs = append(errs, errors.New("url: must be a URL such as https://host:8000, without user, query and fragment"))
	case u.Scheme == "http" && cmp.Or(c.CAFile, c.CertFile) != "":
		errs = append(errs, errors.New("url: has no TLS, which ca_file and cert_file are for; say https://"))
	}
	for _, name := range slices.Sorted(maps.Keys(c.Headers)) {
		key := http.CanonicalHeaderKey(name)
		if slices.Contains(ownHeaders, key) || key == "Authorization" && c.TokenFile != "" {
			errs = append(errs, fmt.Errorf("headers.%s: is set by the dispatcher, or is of one connection only", name))
		}
		if name == "" || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' || r == ':' }) || visible(c.Headers[name]) != c.Headers[name] {
			errs = append(errs, fmt.Errorf("headers.%s: a header is visible ASCII", name))
		}
	}
	return errors.Join(errs...)
}

// visible returns a header's value without what may not be in one.
func visible(value string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return -1
		}
		return r
	}, value)
}

type httpTarget struct {
	config HTTPTarget
	client http.Client
}

var _ Target = (*httpTarget)(nil)

// newHTTPTarget reads the files, and dials nothing. Its errors begin with the key.
func newHTTPTarget(c HTTPTarget, maxInFlight int) (*httpTarget, error) {
	secure := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.TokenFile != "" {
		if _, err := credentials.Token(c.TokenFile); err != nil {
			return nil, fmt.Errorf("token_file: %w", err)
		}
	}
	if c.CAFile != "" {
		var err error
		if secure.RootCAs, err = credentials.Roots(c.CAFile); err != nil {
			return nil, fmt.Errorf("ca_file: %w", err)
		}
	}
	if c.CertFile != "" {
		certificate, err := credentials.Pair{CertFile: c.CertFile, KeyFile: c.KeyFile}.Load("")
		if err != nil {
			return nil, err
		}
		secure.Certificates = []tls.Certificate{certificate}
	}
	return &httpTarget{config: c, client: newClient(maxInFlight, &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: secure, DialContext: (&net.Dialer{Timeout: connectTimeout}).DialContext,
	})}, nil
}

func newClient(maxInFlight int, t *http.Transport) http.Client {
	t.TLSHandshakeTimeout, t.ForceAttemptHTTP2, t.MaxResponseHeaderBytes = connectTimeout, true, maxAnswerHeader
	t.MaxIdleConnsPerHost, t.IdleConnTimeout = maxInFlight, idleConnsTimeout
	return http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func (t *httpTarget) close() { t.client.CloseIdleConnections() }

func (t *httpTarget) Forget(pipeline.RequestID) {}

func (t *httpTarget) Timeout(store.StoredJob) time.Duration { return DefaultTimeout }

func (t *httpTarget) Do(ctx context.Context, a Attempt) Answer {
	r, f := t.request(ctx, a)
	if f != nil {
		return Answer{Fault: f}
	}
	if t.config.TokenFile != "" {
		token, err := credentials.Token(t.config.TokenFile)
		if err != nil {
			return Answer{Fault: fault.New(fault.TargetFailed, "the token for the target cannot be read").Caused(err), outcome: latched}
		}
		r.Header.Set("Authorization", "Bearer "+token)
	}
	// A request that had no connection did not reach the target.
	var isConnected atomic.Bool
	r = r.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { isConnected.Store(true) }}))
	answer, err := t.client.Do(r)
	if err != nil {
		out := Answer{Fault: targetFault(r, err)}
		if !isConnected.Load() && ctx.Err() == nil {
			out.outcome = latched
		}
		return out
	}
	defer answer.Body.Close() //nolint:errcheck // it was only read
	out := answerOfStatus(answer)
	if out.HTTP == nil { // the body after a 101 ignores the context
		return out
	}
	body, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer+1))
	if err != nil {
		return Answer{Fault: targetFault(r, err)}
	}
	if len(body) > maxAnswer {
		if out.outcome == succeeded {
			out.outcome, out.Fault = failed, fault.Newf(fault.OutputTooLarge, "the answer of the target is over %d bytes", maxAnswer)
		}
		out.HTTP = nil
		return out
	}
	out.HTTP.ContentType, out.HTTP.Body = answer.Header.Get("Content-Type"), body
	return out
}

// parseRetryAfter reads the header Retry-After: seconds, or a date. Anything else is 0.
func parseRetryAfter(value string, now time.Time) time.Duration {
	value = strings.TrimSpace(value)
	if seconds, err := strconv.ParseUint(value, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if at, err := http.ParseTime(value); err == nil {
		return max(0, at.Sub(now))
	}
	return 0
}

func answerOfStatus(answer *http.Response) Answer {
	status := answer.StatusCode
	out := Answer{outcome: outcomeOfStatus(status)}
	if status >= http.StatusOK { // no gateway can answer with another one
		out.HTTP = &inferencev1.HttpAnswer{Status: uint32(status)}
	}
	if out.outcome != succeeded {
		out.Fault = fault.Newf(fault.TargetFailed, "the target answered with status %d", status).
			WithRetryAfter(parseRetryAfter(answer.Header.Get("Retry-After"), time.Now()))
	}
	return out
}

// Resume implements Target. Nobody knows what became of an attempt of a dispatcher that died.
func (t *httpTarget) Resume(context.Context, Attempt) (Answer, bool) {
	if repeat := t.config.RepeatUnknown; repeat == nil || *repeat {
		return Answer{}, false
	}
	return Answer{Fault: fault.New(fault.TargetFailed, "a dispatcher ended while the attempt ran, and repeat_unknown of its pool forbids another one"), outcome: poison}, true
}

// request returns what is sent, but for the token. Path, body and content type are the caller's.
func (t *httpTarget) request(ctx context.Context, a Attempt) (*http.Request, *fault.Fault) {
	call := a.Job.GetHttp()
	if call == nil {
		return nil, fault.New(fault.InvalidRequest, "the job is not an HTTP call, and the target of its queue expects one")
	}
	if f := pipeline.CheckCallPath(call.GetPath()); f != nil {
		return nil, f
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(t.config.URL, "/")+call.GetPath(), bytes.NewReader(call.GetBody()))
	if err != nil {
		return nil, fault.From(err)
	}
	for name, value := range t.config.Headers {
		r.Header.Set(name, strings.ReplaceAll(value, tenantInHeader, visible(a.Tenant)))
	}
	r.Header.Set(idempotencyKey, a.ID.String())
	if call.GetContentType() != "" {
		r.Header.Set("Content-Type", visible(call.GetContentType()))
	}
	return r, nil
}

// targetFault returns a fault whose message tenants may see. Its cause has addresses, but not the URL, which
// may have secrets.
func targetFault(r *http.Request, err error) *fault.Fault {
	if canceled := r.Context().Err(); errors.Is(canceled, context.Canceled) {
		return fault.From(canceled)
	}
	if of := new(url.Error); errors.As(err, &of) {
		err = of.Err
	}
	why := "no connection, or a broken one"
	if errors.Is(err, context.DeadlineExceeded) || os.IsTimeout(err) {
		why = "it took too long"
	}
	return fault.New(fault.TargetFailed, "the target did not answer: "+why).Caused(fmt.Errorf("%s: %w", r.URL.Host, err))
}

const (
	webhookTimeout = 15 * time.Second
	// webhookAttempts takes almost three days: a notice becomes a dead letter before it expires.
	webhookAttempts     = 70
	longestWebhookPause = time.Hour
)

// WithWebhooks returns the section with the pool and the queue of webhooks, if it has those.
func (c Config) WithWebhooks() Config {
	if c.Webhooks == nil {
		return c
	}
	c.Pools, c.Queues = withEntry(c.Pools, string(pipeline.WebhookQueue), PoolConfig{
		Target: TargetConfig{webhooks: c.Webhooks}, MaxInFlight: c.Webhooks.MaxInFlight, Timeout: webhookTimeout,
	}), withEntry(c.Queues, string(pipeline.WebhookQueue), QueueConfig{
		JobQueueSettings: store.WebhookQueueSettings(), Pool: string(pipeline.WebhookQueue), Attempts: webhookAttempts,
	})
	return c
}

// withEntry returns a copy of a map with one more entry.
func withEntry[V any](m map[string]V, key string, value V) map[string]V {
	out := map[string]V{key: value}
	maps.Copy(out, m)
	return out
}

// webhookTarget tells of the ends of jobs. Each has its URL, so a failure is no reason to spare others.
type webhookTarget struct {
	httpTarget

	config webhook.Config
}

func newWebhookTarget(c webhook.Config, maxInFlight int) (*webhookTarget, error) {
	// There is no proxy, which would dial instead.
	return &webhookTarget{config: c, httpTarget: httpTarget{client: newClient(maxInFlight, &http.Transport{DialContext: c.Dial})}}, c.ReadSecrets()
}

func (t *webhookTarget) Do(ctx context.Context, a Attempt) Answer {
	to := a.Job.GetHttp()
	if err := t.config.Check(to.GetPath()); err != nil {
		return Answer{Fault: fault.InField(fault.InvalidRequest, "webhook", "%w", err)}
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, to.GetPath(), bytes.NewReader(to.GetBody()))
	if err == nil {
		r.Header.Set("Content-Type", to.GetContentType())
		r.Header.Set("User-Agent", "stagemesh")
		err = t.config.Sign(r.Header, a.Tenant, messageID(a), time.Now(), to.GetBody())
	}
	if err != nil { // it has the path of a file, and tenants see the message
		return t.later(a, Answer{Fault: fault.New(fault.TargetFailed, "the webhook cannot be signed with jobs.webhooks.secret_files").Caused(err)})
	}
	answer, err := t.client.Do(r)
	switch {
	case errors.Is(err, webhook.ErrPrivate):
		return Answer{Fault: fault.InField(fault.InvalidRequest, "webhook", "%w", webhook.ErrPrivate)}
	case err != nil && errors.Is(ctx.Err(), context.Canceled):
		return Answer{Fault: targetFault(r, err)}
	case err != nil:
		return t.later(a, Answer{Fault: targetFault(r, err)})
	}
	defer answer.Body.Close() //nolint:errcheck // nobody reads it
	out := answerOfStatus(answer)
	switch {
	case out.outcome == succeeded:
	case answer.StatusCode == http.StatusGone:
		out.outcome = failed
	default:
		return t.later(a, out)
	}
	return out
}

// messageID is the ended job's ID, which stays the same if the notice is replayed.
func messageID(a Attempt) string {
	of, err := pipeline.ParseJobID(a.Job.GetJob().GetAttributes()[store.NoticeOf])
	if err != nil {
		return a.ID.UUID.String()
	}
	return of.UUID.String()
}

// later has the notice sent again after a pause that doubles up to an hour, or is longer by Retry-After.
func (*webhookTarget) later(a Attempt, answer Answer) Answer {
	const doublings = 12
	pause := firstPause << min(max(a.Job.GetJob().GetAttempts(), 1)-1, doublings)
	answer.outcome = retried
	answer.Fault.RetryAfter = max(answer.Fault.RetryAfter, min(pause, longestWebhookPause))
	return answer
}
