package dispatch

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
	"github.com/stagemesh/stagemesh/mesh/webhook"
)

const (
	webhookTimeout = 15 * time.Second
	// webhookAttempts takes almost three days, so that a notice that nobody takes becomes a dead
	// letter before it expires.
	webhookAttempts     = 70
	longestWebhookPause = time.Hour
	// maxDiscarded bounds the bytes of an answer that are read so that its connection may be used
	// again.
	maxDiscarded = 4 << 10
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
	for k, v := range m {
		out[k] = v
	}
	return out
}

// webhookTarget tells receivers of the ends of jobs. Each has a URL of its own, so the failure of
// one is no reason to spare others.
type webhookTarget struct {
	httpTarget

	config webhook.Config
}

func newWebhookTarget(c webhook.Config, maxInFlight int) (*webhookTarget, error) {
	transport := newTransport(maxInFlight)
	transport.DialContext = c.Dial // and no proxy, which would dial instead
	return &webhookTarget{config: c, httpTarget: httpTarget{client: newClient(transport)}}, c.ReadSecrets()
}

// Do implements Target.
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
		return Answer{Fault: targetFault(ctx, err)}
	case err != nil:
		return t.later(a, Answer{Fault: targetFault(ctx, err)})
	}
	defer answer.Body.Close()                                             //nolint:errcheck // it was only read
	_, _ = io.Copy(io.Discard, io.LimitReader(answer.Body, maxDiscarded)) // nobody wants it
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

// messageID returns the ID of the message, which is that of the job that has ended: it stays the
// same if the notice is replayed.
func messageID(a Attempt) string {
	of, err := pipeline.ParseJobID(a.Job.GetJob().GetAttributes()[store.NoticeOf])
	if err != nil {
		return a.ID.UUID.String()
	}
	return of.UUID.String()
}

// later has the notice sent again, after pauses that double up to an hour, or as long as the
// receiver asks for.
func (*webhookTarget) later(a Attempt, answer Answer) Answer {
	const doublings = 12
	pause := firstPause << min(max(a.Job.GetJob().GetAttempts(), 1)-1, doublings)
	answer.outcome = retried
	answer.Fault.RetryAfter = max(answer.Fault.RetryAfter, min(pause, longestWebhookPause))
	return answer
}
