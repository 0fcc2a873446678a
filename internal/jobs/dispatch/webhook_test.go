package dispatch

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/net/dns/dnsmessage"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/webhook"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// receiver is a server that gets webhooks, and answers with its statuses, the last one for ever.
type receiver struct {
	*httptest.Server

	mu       sync.Mutex
	statuses []int
	calls    []receivedCall
}

type receivedCall struct {
	header http.Header
	body   string
}

func newReceiver(t *testing.T, statuses ...int) *receiver {
	t.Helper()
	out := &receiver{statuses: statuses}
	out.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		out.mu.Lock()
		defer out.mu.Unlock()
		out.calls = append(out.calls, receivedCall{r.Header, string(body)})
		w.Header().Set("Location", out.URL)
		w.WriteHeader(out.statuses[0])
		_, _ = io.WriteString(w, "internal")
		if len(out.statuses) > 1 {
			out.statuses = out.statuses[1:]
		}
	}))
	t.Cleanup(out.Close)
	return out
}

func (r *receiver) received() []receivedCall {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]receivedCall(nil), r.calls...)
}

// newNotifier is a mesh whose webhooks may have the addresses.
func newNotifier(t *testing.T, allow ...string) *meshBed {
	t.Helper()
	secret := testbed.SecretFile(t, "whsec_"+base64.StdEncoding.EncodeToString(make([]byte, 32)))
	return newMesh(t, func(c *Config) {
		c.Webhooks = &webhook.Config{Secrets: webhook.Secrets{SecretFiles: []string{secret}}, Allow: allow, Resolver: loopbackResolver(t)}
	})
}

// loopbackResolver resolves every name to 127.0.0.1.
func loopbackResolver(t *testing.T) *net.Resolver {
	t.Helper()
	server, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var answers sync.WaitGroup
	answers.Go(func() {
		for buf := make([]byte, 512); ; {
			n, from, err := server.ReadFrom(buf)
			var m dnsmessage.Message
			if err != nil || m.Unpack(buf[:n]) != nil {
				return
			}
			m.Response, m.Additionals = true, nil
			if q := m.Questions[0]; q.Type == dnsmessage.TypeA {
				m.Answers = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class}, Body: &dnsmessage.AResource{A: [4]byte{127, 0, 0, 1}}}}
			}
			answer, _ := m.Pack()
			_, _ = server.WriteTo(answer, from)
		}
	})
	t.Cleanup(func() {
		_ = server.Close()
		answers.Wait()
	})
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", server.LocalAddr().String())
	}}
}

// submitWithWebhook submits a job that expires after ttl.
func (b *meshBed) submitWithWebhook(url string, ttl time.Duration) pipeline.JobID {
	b.t.Helper()
	return b.submitWithWebhookFor("", url, ttl)
}

func (b *meshBed) submitWithWebhookFor(tenant, url string, ttl time.Duration) pipeline.JobID {
	b.t.Helper()
	id, deadline := pipeline.NewJobID(queue), time.Now().Add(ttl)
	job := &meshv1.QueuedJob{
		Job:     &inferencev1.Job{Id: id.String(), Queue: string(queue), AcceptedAt: timestamppb.Now(), Deadline: timestamppb.New(deadline)},
		Payload: &meshv1.QueuedJob_Infer{Infer: &inferencev1.InferRequest{}}, Webhook: url,
	}
	if _, _, err := b.jobs.Submit(b.t.Context(), id, tenant, store.JobHeader{Deadline: deadline}, job); err != nil {
		b.t.Fatal(err)
	}
	return id
}

// noticeOf waits for the end of the notice of a job.
func (b *meshBed) noticeOf(id pipeline.JobID) store.StoredRecord {
	b.t.Helper()
	return b.end(pipeline.KeyedJobID(pipeline.WebhookQueue, "", id.String()))
}

func TestEveryEndCallsTheWebhook(t *testing.T) {
	t.Parallel()
	to := newReceiver(t, 204)
	b := newNotifier(t, "127.0.0.1")
	b.start(&stub{answer: func(ctx context.Context, a Attempt) Answer {
		switch a.Deadline.Sub(a.Job.GetJob().GetAcceptedAt().AsTime()) > time.Minute {
		case true:
			return Answer{Infer: &inferencev1.InferResponse{}}
		default:
			<-ctx.Done()
			return Answer{Fault: fault.From(ctx.Err())}
		}
	}})
	for state, ttl := range map[string]time.Duration{"succeeded": time.Hour, "expired": 200 * time.Millisecond} {
		id := b.submitWithWebhook(to.URL+"/hook?"+state, ttl)
		b.end(id)
		notice := b.noticeOf(id)
		if j := notice.GetJob(); j.GetState() != hasSucceeded || notice.GetHttp().GetStatus() != 204 || len(notice.GetHttp().GetBody()) > 0 || j.GetAttributes()["job"] != id.String() {
			t.Errorf("%s: notice %v", state, notice)
		}
		call := to.received()[len(to.received())-1]
		var body struct {
			Type      string
			Timestamp time.Time
			Data      pipeline.JobDocument
		}
		if err := json.Unmarshal([]byte(call.body), &body); err != nil || body.Type != "job."+state || body.Data.Id != id.String() || body.Data.State != state || time.Since(body.Timestamp) > time.Minute {
			t.Errorf("%s: %s, %v", state, call.body, err)
		}
		if call.header.Get("Webhook-Id") != id.UUID.String() || call.header.Get("Content-Type") != "application/json" || !strings.HasPrefix(call.header.Get("Webhook-Signature"), "v1,") {
			t.Errorf("%s: header %v", state, call.header)
		}
	}
	if n := len(to.received()); n != 2 {
		t.Errorf("%d calls", n)
	}
}

func TestWebhookIsTriedAgainUnderTheSameID(t *testing.T) {
	t.Parallel()
	for name, status := range map[string]int{"failure": 500, "busy": 503, "not found": 404, "redirect": 307} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			to := newReceiver(t, status, 200)
			b := newNotifier(t, "127.0.0.0/8")
			b.start(&stub{})
			id := b.submitWithWebhook(to.URL, time.Hour)
			b.end(id)
			if notice := b.noticeOf(id); notice.GetJob().GetState() != hasSucceeded || notice.GetJob().GetAttempts() != 2 {
				t.Errorf("notice %v", notice)
			}
			calls := to.received()
			if len(calls) != 2 || calls[0].header.Get("Webhook-Id") != calls[1].header.Get("Webhook-Id") || calls[0].header.Get("Webhook-Timestamp") == calls[1].header.Get("Webhook-Timestamp") || calls[0].body != calls[1].body {
				t.Errorf("calls %v", calls)
			}
		})
	}
}

func TestReceiverThatIsGoneEndsTheNotice(t *testing.T) {
	t.Parallel()
	to := newReceiver(t, 410)
	b := newNotifier(t, "127.0.0.1")
	b.start(&stub{})
	id := b.submitWithWebhook(to.URL, time.Hour)
	b.end(id)
	if notice := b.noticeOf(id); notice.GetJob().GetState() != hasFailed || notice.GetJob().GetAttempts() != 1 || len(to.received()) != 1 {
		t.Errorf("notice %v", notice)
	}
}

func TestPrivateAddressIsRefusedAtTheDial(t *testing.T) {
	t.Parallel()
	to := newReceiver(t, 200)
	at, err := url.Parse(to.URL)
	if err != nil {
		t.Fatal(err)
	}
	b := newNotifier(t)
	b.start(&stub{})
	// The name is not known to be private before it is looked up.
	id := b.submitWithWebhook("https://receiver.example:"+at.Port(), time.Hour)
	b.end(id)
	if notice := b.noticeOf(id); notice.GetJob().GetState() != hasFailed || notice.GetJob().GetReason() != string(fault.InvalidRequest) || !strings.Contains(notice.GetJob().GetMessage(), "not public") || len(to.received()) > 0 {
		t.Errorf("notice %v", notice)
	}
}

func TestNoticeDoesNotTellWhereSecretsAre(t *testing.T) {
	t.Parallel()
	secret := testbed.SecretFile(t, "whsec_"+base64.StdEncoding.EncodeToString(make([]byte, 32)))
	target, err := newWebhookTarget(webhook.Config{Secrets: webhook.Secrets{SecretFiles: []string{secret}}}, 1)
	if err == nil {
		err = os.Remove(secret)
	}
	if err != nil {
		t.Fatal(err)
	}
	answer := target.Do(t.Context(), callOf("https://example.com", "application/json", nil))
	if outcomeOf(answer) != retried || strings.Contains(answer.Fault.Error(), secret) || !errors.Is(answer.Fault, os.ErrNotExist) {
		t.Errorf("%+v", answer)
	}
}

func TestCauseOfAFailedNoticeHasNoURL(t *testing.T) {
	t.Parallel()
	secret := testbed.SecretFile(t, "whsec_"+base64.StdEncoding.EncodeToString(make([]byte, 32)))
	target, err := newWebhookTarget(webhook.Config{Secrets: webhook.Secrets{SecretFiles: []string{secret}}, Resolver: loopbackResolver(t), Allow: []string{"127.0.0.1"}}, 1)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.NotFoundHandler())
	server.Close()
	cause := fmt.Sprint(errors.Unwrap(target.Do(t.Context(), callOf(server.URL+"/hook?token=SECRET", "application/json", nil)).Fault))
	if strings.Contains(cause, "SECRET") || !strings.Contains(cause, "refused") {
		t.Error(cause)
	}
}

func TestNoticeIsSentOnceAfterACrash(t *testing.T) {
	t.Parallel()
	to := newReceiver(t, 200)
	b := newNotifier(t, "127.0.0.1")
	// A dispatcher has stored the end, and no more; another one has also stored the notice.
	var ids []pipeline.JobID
	b.limitNotices(mebibytes)
	for _, hasNotice := range []bool{false, true} {
		id := b.submitWithWebhook(to.URL, time.Hour)
		ended := &inferencev1.Job{Id: id.String(), Queue: string(queue), State: hasSucceeded, EndedAt: timestamppb.Now()}
		if _, err := b.jobs.PutRecord(t.Context(), id, "", 0, &meshv1.JobRecord{Job: ended}); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if hasNotice {
				if err := b.jobs.Notify(t.Context(), "", to.URL, ended); err != nil {
					t.Fatal(err)
				}
			}
		}
		ids = append(ids, id)
	}
	stop := b.start(&stub{})
	for _, id := range ids {
		b.end(id)
		if notice := b.noticeOf(id); notice.GetJob().GetState() != hasSucceeded {
			t.Errorf("notice %v", notice)
		}
	}
	// One that is stored again after its end is not sent again.
	if err := b.jobs.Notify(t.Context(), "", to.URL, &inferencev1.Job{Id: ids[0].String(), State: hasSucceeded}); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the repeated notice leaves", func() bool {
		_, err := b.jobs.Queued(t.Context(), pipeline.KeyedJobID(pipeline.WebhookQueue, "", ids[0].String()), "")
		return err != nil
	})
	stop()
	if n := len(to.received()); n != 2 {
		t.Errorf("%d calls", n)
	}
}

// limitNotices makes the queue of webhooks, or changes it, so that it holds so many bytes.
func (b *meshBed) limitNotices(most int64) {
	b.t.Helper()
	err := b.jobs.EnsureQueue(b.t.Context(), pipeline.WebhookQueue, store.WebhookQueueSettings())
	if err == nil {
		var s jetstream.Stream
		if s, err = b.conn.JetStream().Stream(b.t.Context(), b.conn.JobStream(pipeline.WebhookQueue)); err == nil {
			config := s.CachedInfo().Config
			config.MaxBytes = most
			_, err = b.conn.JetStream().UpdateStream(b.t.Context(), config)
		}
	}
	if err != nil {
		b.t.Fatal(err)
	}
}

// A full queue of webhooks stops neither attempts nor ends nor a reload, and the ended jobs leave later.
func TestEndedJobsWaitForRoomForTheirNotices(t *testing.T) {
	t.Parallel()
	const many = 2 * maxEnding
	to := newReceiver(t, 200)
	b, target := newNotifier(t, "127.0.0.1"), &stub{}
	b.limitNotices(1)
	var ids []pipeline.JobID
	for range many {
		ids = append(ids, b.submitWithWebhook(to.URL, time.Hour))
	}
	b.start(target)
	wait := func(r *meshv1.PoolReport) bool {
		return r.GetOut() == 0 && r.GetQueues()[0].GetDelayed() == many
	}
	b.report("ended jobs wait", ids[0], wait)
	b.wantEnd(b.submit(), hasSucceeded, "", 1)
	before := b.owner("main")
	b.reload(func(c *Config) {
		p := c.Pools["main"]
		p.Timeout = time.Minute
		c.Pools["main"] = p
	})
	testbed.Eventually(t, "another owner has the pool", func() bool { o := b.owner("main"); return o != nil && o != before })
	b.report("ended jobs wait again", ids[0], wait)
	b.limitNotices(mebibytes)
	for _, id := range ids {
		b.wantEnd(id, hasSucceeded, "", 1)
		if n := target.ran(id); n != 1 {
			t.Errorf("job %s ran %d times", id, n)
		}
		b.noticeOf(id)
	}
	if n := len(to.received()); n != many {
		t.Errorf("%d calls", n)
	}
}

// The end of a job that waits for room may be forgotten meanwhile. The job runs no second time.
func TestEndedJobLeavesOnceItsRecordIsGone(t *testing.T) {
	t.Parallel()
	b, target := newNotifier(t, "127.0.0.1"), &stub{}
	b.limitNotices(1)
	id := b.submitWithWebhook("https://example.com", time.Hour)
	b.start(target)
	b.report("the ended job waits", id, func(r *meshv1.PoolReport) bool { return r.GetQueues()[0].GetDelayed() == 1 })
	records, err := b.conn.JetStream().Stream(t.Context(), b.conn.JobRecordStream())
	if err == nil {
		err = records.Purge(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "it leaves its queue", func() bool {
		_, err := b.jobs.Queued(t.Context(), id, "")
		return errors.Is(err, store.ErrNoJob)
	})
	if n := target.ran(id); n != 1 {
		t.Errorf("it ran %d times", n)
	}
}

func TestNoticesOfOneTenantLeaveRoomForOthers(t *testing.T) {
	t.Parallel()
	const many = 4 * maxEnding
	failing, working := newReceiver(t, 500), newReceiver(t, 200)
	b := newNotifier(t, "127.0.0.1")
	b.limitNotices(many * 200) // a notice takes more
	for range many {
		b.submitWithWebhookFor("a", failing.URL, time.Hour)
	}
	b.start(&stub{})
	b.report("some notices find no room", pipeline.JobID{}, func(r *meshv1.PoolReport) bool {
		q := r.GetQueues()[0]
		return q.GetEnded() > 0 && q.GetDelayed() > 0 && q.GetEnded()+q.GetDelayed() == many
	})
	b.submitWithWebhookFor("b", working.URL, time.Hour)
	testbed.Eventually(t, "the other tenant's notice is sent", func() bool { return len(working.received()) == 1 })
}

// A receiver that fails does not keep the others from their notices, and its notices are no loss.
func TestFailingReceiverClosesNothing(t *testing.T) {
	t.Parallel()
	b := breaker{disabled: true}
	now := time.Now()
	for i := range 3 * breakerFailures {
		if !b.finish([16]byte{byte(i)}, retried, now) || b.blocks(now) {
			t.Fatal("the breaker is open")
		}
	}
	pauses, left := time.Duration(0), 3*24*time.Hour
	for k := range webhookAttempts {
		job := &meshv1.QueuedJob{Job: &inferencev1.Job{Attempts: uint32(k + 1)}}
		answer := (*webhookTarget)(nil).later(Attempt{StoredJob: store.StoredJob{Job: job}}, Answer{Fault: fault.New(fault.TargetFailed, "")})
		next, pause := attempt{outcome: answer.outcome, counts: true, failures: k, most: webhookAttempts, retryAfter: answer.Fault.RetryAfter, left: left}.next(.999)
		if k == webhookAttempts-1 && next != poison || k < webhookAttempts-1 && next != retried {
			t.Fatalf("attempt %d, %s left: %v", k+1, left, next)
		}
		pauses, left = pauses+pause, left-pause-webhookTimeout
	}
	if pauses < 48*time.Hour {
		t.Errorf("given up after %s", pauses)
	}
}
