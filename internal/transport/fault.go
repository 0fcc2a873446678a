package transport

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// WriteJSON answers with a value as JSON. A failed write is not an error: the caller has disconnected.
func WriteJSON(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(value)
}

// WriteFault answers with the fault in err's chain. A failed write is not an error: the caller
// has disconnected.
func WriteFault(w http.ResponseWriter, err error) {
	f := fault.From(err)
	WriteFaultStatus(w, f, f.HTTPStatus())
}

// WriteFaultStatus is WriteFault with a status that no reason has, such as 405.
func WriteFaultStatus(w http.ResponseWriter, f *fault.Fault, status int) {
	body := FaultJSON(f)
	h := w.Header()
	SetFaultHeaders(h, f)
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

// WrongMethod sets Allow, and returns the fault of a request whose path has other methods, to be
// written with the status 405. Where there is GET, there is HEAD.
func WrongMethod(w http.ResponseWriter, r *http.Request, methods ...string) *fault.Fault {
	if slices.Contains(methods, http.MethodGet) {
		methods = append(methods, http.MethodHead)
	}
	slices.Sort(methods)
	allowed := strings.Join(methods, ", ")
	w.Header().Set("Allow", allowed)
	return fault.Newf(fault.InvalidRequest, "%.*q is %s, not %.*s", fault.MaxQuoted, r.URL.Path, allowed, fault.MaxQuoted, r.Method)
}

// ReadOnly returns a handler that passes GET and HEAD to next.
func ReadOnly(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet || r.Method == http.MethodHead {
			next(w, r)
		} else {
			WriteFaultStatus(w, WrongMethod(w, r, http.MethodGet), http.StatusMethodNotAllowed)
		}
	}
}

// SetFaultHeaders sets Retry-After and the request's ID, whatever the body's form.
func SetFaultHeaders(h http.Header, f *fault.Fault) {
	if f.RetryAfter > 0 {
		// Rounded up: a caller that returns too early is refused again.
		h.Set("Retry-After", strconv.FormatInt(int64((f.RetryAfter+time.Second-1)/time.Second), 10))
	}
	if id := f.Metadata[RequestIDKey]; id != "" {
		h.Set(HeaderRequestID, id)
	}
}

// faultBody is the JSON of a fault.
type faultBody struct {
	Code         string            `json:"code"`
	Reason       fault.Reason      `json:"reason"`
	Message      string            `json:"message"`
	RequestID    string            `json:"request_id,omitempty"`
	Stage        string            `json:"stage,omitempty"`
	Step         string            `json:"step,omitempty"`
	Host         string            `json:"host,omitempty"`
	Violations   []fault.Violation `json:"violations,omitempty"`
	RetryAfterMS int64             `json:"retry_after_ms,omitempty"`
	Metadata     map[string]string `json:"metadata,omitempty"`
}

// FaultJSON returns the fault in err's chain as a JSON document on one line.
func FaultJSON(err error) []byte {
	f := fault.From(err)
	body := faultBody{
		Code: f.GRPCCode().String(), Reason: f.Reason, Message: f.Message,
		RequestID: f.Metadata[RequestIDKey],
		Stage:     f.Stage, Step: f.Step, Host: f.Host, Violations: f.Violations,
		RetryAfterMS: int64((f.RetryAfter + time.Millisecond - 1) / time.Millisecond),
		Metadata:     maps.Clone(f.Metadata),
	}
	delete(body.Metadata, RequestIDKey)
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)                            // people read messages
	_ = encoder.Encode(map[string]faultBody{"error": body}) // strings and numbers always encode
	return bytes.TrimSpace(out.Bytes())
}

// WithRequestID returns err as a fault with the request's ID, unless it has one or the ID is
// empty.
func WithRequestID(err error, id string) *fault.Fault {
	f := fault.From(err)
	if id == "" || f.Metadata[RequestIDKey] != "" {
		return f
	}
	return f.WithMetadata(RequestIDKey, id)
}

// RPCError returns err as the status of an RPC: the code and message of its fault, the
// google.rpc details, and the request's ID. It returns a *connect.Error as it is.
func RPCError(err error) *connect.Error {
	if status, ok := errors.AsType[*connect.Error](err); ok {
		return status
	}
	f := fault.From(err)
	s := f.Status()
	code := connect.Code(s.GetCode()) // Connect's codes are gRPC's
	if code < connect.CodeCanceled || code > connect.CodeUnauthenticated {
		code = connect.CodeInternal
	}
	out := connect.NewError(code, errors.New(s.GetMessage()))
	for _, message := range s.GetDetails() {
		if detail, err := connect.NewErrorDetail(message); err == nil {
			out.AddDetail(detail)
		}
	}
	if id := f.Metadata[RequestIDKey]; id != "" {
		out.Meta().Set(HeaderRequestID, id)
	}
	return out
}

// rpcErrorOf returns a fault as RPCError, and other errors as they are: the connect library
// classifies those itself.
func rpcErrorOf(err error) error {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return RPCError(f)
	}
	return err
}

// InvalidField returns the fault of a field whose value is not valid.
func InvalidField(field string, err error) *fault.Fault {
	return fault.InField(fault.InvalidRequest, field, "%s", plainText(err))
}

// maxErrorText bounds the text of a library's error, which may quote the caller, in runes.
const maxErrorText = 400

// plainText returns the error's text, cut, and without the protobuf library's prefix, whose
// spaces vary on purpose.
func plainText(err error) string {
	text := strings.ReplaceAll(err.Error(), "\u00a0", " ")
	return fmt.Sprintf("%.*s", maxErrorText, strings.TrimPrefix(text, "proto: "))
}
