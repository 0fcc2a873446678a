package failure

import (
	"bytes"
	"encoding/json"
	"maps"
	"net/http"
	"strconv"
	"time"

	"github.com/stagemesh/stagemesh/gateway/front/header"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Write answers with the fault in err's chain.
func Write(w http.ResponseWriter, err error) {
	f := fault.From(err)
	WriteStatus(w, f, f.HTTPStatus())
}

// WriteStatus is Write where HTTP has a status for something that is no reason
// of its own: 405 for the method.
func WriteStatus(w http.ResponseWriter, f *fault.Fault, status int) {
	body := encode(document{documentOf(f)})
	h := w.Header()
	Headers(h, f)
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

// Document returns the JSON of the fault in err's chain, without a line end, for
// answers that have begun already.
func Document(err error) []byte { return encode(document{documentOf(fault.From(err))}) }

// Headers sets what a fault says in headers, whatever the body's form: when to come
// back, and the request's id.
func Headers(h http.Header, f *fault.Fault) {
	if f.RetryAfter > 0 {
		h.Set("Retry-After", strconv.FormatInt(seconds(f.RetryAfter), 10))
	}
	if id := f.Metadata[header.RequestIDKey]; id != "" {
		h.Set(header.RequestID, id)
	}
}

// encode leaves < and > as they are, for messages are read by people. Of
// strings and numbers the encoder has nothing to refuse.
func encode(d document) []byte {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(d)
	return bytes.TrimSpace(out.Bytes())
}

// seconds rounds up: a caller that comes back too early is refused again.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

type document struct {
	Error wire `json:"error"`
}

type wire struct {
	Code         string            `json:"code"`
	Reason       fault.Reason      `json:"reason"`
	Message      string            `json:"message"`
	RequestID    string            `json:"request_id,omitempty"`
	Stage        string            `json:"stage,omitempty"`
	Step         string            `json:"step,omitempty"`
	Host         string            `json:"host,omitempty"`
	Violations   []violation       `json:"violations,omitempty"`
	RetryAfterMS int64             `json:"retry_after_ms,omitempty"`
	Metadata     map[string]string `json:"metadata,omitempty"`
}

type violation struct {
	Field       string `json:"field"`
	Description string `json:"description"`
}

func documentOf(f *fault.Fault) wire {
	out := wire{
		Code: f.GRPCCode().String(), Reason: f.Reason, Message: f.Message,
		RequestID: f.Metadata[header.RequestIDKey],
		Stage:     f.Stage, Step: f.Step, Host: f.Host,
		RetryAfterMS: int64((f.RetryAfter + time.Millisecond - 1) / time.Millisecond),
		Metadata:     maps.Clone(f.Metadata),
	}
	delete(out.Metadata, header.RequestIDKey)
	for _, v := range f.Violations {
		out.Violations = append(out.Violations, violation(v))
	}
	return out
}
