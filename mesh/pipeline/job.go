package pipeline

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// JobID identifies a job: its queue, and a UUID, which is the job's alone. A tenant's jobs are
// known to that tenant only.
type JobID struct {
	Queue QueueName
	UUID  uuid.UUID
}

// WebhookQueue is the built-in queue whose jobs are calls of webhooks.
const WebhookQueue QueueName = "webhooks"

// UnsaidTokens is the length of an answer of a language model that a job does not bound, in tokens.
const UnsaidTokens = 256

// TokensOfCall returns what a call of an OpenAI-compatible server takes at most: a token for four
// bytes, and the longest answer that it permits. It returns 0 for nil.
func TokensOfCall(call *inferencev1.HttpCall) int64 {
	if call == nil {
		return 0
	}
	var body struct {
		Tokens           float64 `json:"max_tokens"`
		CompletionTokens float64 `json:"max_completion_tokens"`
		OutputTokens     float64 `json:"max_output_tokens"`
	}
	_ = json.Unmarshal(call.GetBody(), &body) // another body bounds nothing
	answer := max(body.Tokens, body.CompletionTokens, body.OutputTokens)
	if answer <= 0 {
		answer = UnsaidTokens
	}
	const bytesOfOne = 4
	return int64(len(call.GetBody())+bytesOfOne-1)/bytesOfOne + int64(min(answer, math.MaxInt32))
}

// CheckCallPath checks the path of a call, and its query, which are below the URL of an HTTP target.
func CheckCallPath(path string) *fault.Fault {
	u, err := url.Parse("http://target" + path)
	if err != nil || !strings.HasPrefix(path, "/") || strings.Contains(path, "#") || slices.Contains(strings.Split(u.Path, "/"), "..") {
		return fault.InField(fault.InvalidRequest, "http.path", "must be a path below the target's URL: it begins with /, and has no .. and no fragment")
	}
	return nil
}

// NewJobID returns the ID of a new job.
func NewJobID(queue QueueName) JobID { return JobID{Queue: queue, UUID: uuid.Must(uuid.NewV7())} }

// KeyedJobID returns the ID of the tenant's job with that idempotency key.
func KeyedJobID(queue QueueName, tenant, key string) JobID {
	return JobID{Queue: queue, UUID: uuid.NewSHA1(uuid.NewSHA1(uuid.NameSpaceOID, []byte(string(queue)+" "+tenant)), []byte(key))}
}

// LinePrefix is what the UUIDs of the jobs of one batch have in common.
type LinePrefix [12]byte

// LineJobID returns the ID of the job of a batch's line.
func LineJobID(queue QueueName, batch uuid.UUID, line int) JobID {
	id := JobID{Queue: queue, UUID: uuid.NewSHA1(batch, []byte(queue))}
	binary.BigEndian.PutUint32(id.UUID[len(LinePrefix{}):], uint32(line)) //nolint:gosec // a batch has far fewer lines
	return id
}

// Line returns the batch and the line of an ID of LineJobID; of other IDs they mean nothing.
func (id JobID) Line() (LinePrefix, int) {
	return LinePrefix(id.UUID[:]), int(binary.BigEndian.Uint32(id.UUID[len(LinePrefix{}):]))
}

var errJobID = errors.New("a job's ID is its queue, a dot and a UUID, such as nightly.0192d3f4-1c2a-7000-8000-000000000000")

// ParseJobID reads the ID of a job.
func ParseJobID(s string) (JobID, error) {
	queue, text, ok := strings.Cut(s, ".")
	id, err := uuid.Parse(text)
	if !ok || err != nil || id.String() != text || !validName(queue) {
		return JobID{}, errJobID
	}
	return JobID{Queue: QueueName(queue), UUID: id}, nil
}

// String returns the ID as callers know it.
func (id JobID) String() string { return string(id.Queue) + "." + id.UUID.String() }

// MintedAt returns when the ID was minted, and false for one with an idempotency key.
func (id JobID) MintedAt() (at time.Time, ok bool) {
	const v7 = 7
	if id.UUID.Version() != v7 {
		return time.Time{}, false
	}
	seconds, nanos := id.UUID.Time().UnixTime()
	return time.Unix(seconds, nanos), true
}

// JobStateName returns a state as people read it: queued, running and so on.
func JobStateName(s inferencev1.JobState) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "JOB_STATE_"))
}

// AddJobTime counts the time since the last call, or since acceptance, for the state that the job
// is in.
func AddJobTime(j *inferencev1.Job, now time.Time) {
	if j.GetUsage() == nil {
		j.Usage = new(inferencev1.JobUsage)
	}
	u := j.GetUsage()
	took := max(0, now.Sub(j.GetAcceptedAt().AsTime()).Seconds()-u.GetQueuedSeconds()-u.GetDelayedSeconds()-u.GetRunningSeconds())
	switch j.GetState() {
	case inferencev1.JobState_JOB_STATE_RUNNING:
		u.RunningSeconds += took
	case inferencev1.JobState_JOB_STATE_DELAYED:
		u.DelayedSeconds += took
	default:
		u.QueuedSeconds += took
	}
}

// JobDocument is a job as JSON has it, in answers and webhooks: the members of the message, with a
// state and times as people read them.
type JobDocument struct {
	*inferencev1.Job

	State      string `json:"state"`
	AcceptedAt string `json:"accepted_at"`
	Deadline   string `json:"deadline"`
	Attempts   uint32 `json:"attempts"`
	StartedAt  string `json:"started_at,omitempty"`
	NotBefore  string `json:"not_before,omitempty"`
	EndedAt    string `json:"ended_at,omitempty"`
}

// JobDocumentOf returns a job as JSON has it.
func JobDocumentOf(j *inferencev1.Job) JobDocument {
	return JobDocument{
		Job: j, State: JobStateName(j.GetState()), AcceptedAt: formatTime(j.GetAcceptedAt()), Deadline: formatTime(j.GetDeadline()), Attempts: j.GetAttempts(),
		StartedAt: formatTime(j.GetStartedAt()), NotBefore: formatTime(j.GetNotBefore()), EndedAt: formatTime(j.GetEndedAt()),
	}
}

func formatTime(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return t.AsTime().Format(time.RFC3339Nano)
}

// JobPlaceDocument is where a job stands, as JSON has it.
type JobPlaceDocument struct {
	*inferencev1.JobPlace

	Job      JobDocument `json:"job"`
	Since    string      `json:"since,omitempty"`
	StartsAt string      `json:"starts_at,omitempty"`
}

// JobPlaceDocumentOf returns where a job stands, as JSON has it.
func JobPlaceDocumentOf(r *inferencev1.ExplainJobResponse) JobPlaceDocument {
	p := r.GetPlace()
	return JobPlaceDocument{JobPlace: p, Job: JobDocumentOf(r.GetJob()), Since: formatTime(p.GetSince()), StartsAt: formatTime(p.GetStartsAt())}
}
