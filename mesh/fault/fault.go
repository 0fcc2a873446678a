// Package fault is the vocabulary of failure: every failure that can reach a
// caller has a Reason, and one table has for each reason the gRPC code and
// HTTP status it is and whether a retry can help. docs/faults.md is that table
// in prose and is held against it by a test.
//
// A failure is classified once, where it is known, by New; everything else
// passes it on, and From recovers it from an error chain. What is not a Fault
// is INTERNAL: its text stays in the logs and does not reach the caller.
//
// Faults are plain values, safe to share once built. The With methods return
// copies.
package fault

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/genproto/googleapis/rpc/code"
)

// Domain is the domain of the google.rpc.ErrorInfo that carries a reason.
const Domain = "stagemesh"

// MaxQuoted bounds how much of a caller's own text a message repeats, in runes: %.*q.
const MaxQuoted = 80

// Violation is one field that is not valid, and why.
type Violation struct {
	// Field is a path such as "inputs.pixels.shape".
	Field       string `json:"field"`
	Description string `json:"description"`
}

// Fault is a failure with everything a caller needs to act on it. Build one by
// New or Newf.
type Fault struct {
	Reason  Reason
	Message string
	// Code replaces the reason's own gRPC code where a runner chose one; OK
	// means the reason's.
	Code code.Code
	// Stage, Step and Host are where it happened; empty at the gateway.
	Stage string
	Step  string
	Host  string
	// Violations are the inputs at fault.
	Violations []Violation
	// RetryAfter is how long to wait before a retry; 0 means unknown.
	RetryAfter time.Duration
	// Metadata are further facts for a machine.
	Metadata map[string]string

	cause error
}

// New returns a fault of the reason. The message is a sentence for a person:
// what was wrong, where, and what to do.
func New(r Reason, message string) *Fault { return &Fault{Reason: r, Message: message} }

// Newf is New with a format. A %w operand becomes the cause.
func Newf(r Reason, format string, args ...any) *Fault {
	err := fmt.Errorf(format, args...)
	return &Fault{Reason: r, Message: err.Error(), cause: errors.Unwrap(err)}
}

// InField is Newf for a field of the request, whose path begins the message and is in the
// fault's violations.
func InField(r Reason, field, format string, args ...any) *Fault {
	out := Newf(r, format, args...)
	out.Violations = []Violation{{Field: field, Description: out.Message}}
	out.Message = field + ": " + out.Message
	return out
}

// Error implements error.
func (f *Fault) Error() string {
	if f.Stage == "" {
		return fmt.Sprintf("%s: %s", f.Reason, f.Message)
	}
	return fmt.Sprintf("%s at stage %s: %s", f.Reason, f.Stage, f.Message)
}

// Unwrap returns the cause, if any.
func (f *Fault) Unwrap() error { return f.cause }

// GRPCCode returns the code on gRPC and Connect.
func (f *Fault) GRPCCode() code.Code {
	if f.Code != code.Code_OK {
		return f.Code
	}
	return Classify(f.Reason).Code
}

// HTTPStatus returns the status on plain HTTP.
func (f *Fault) HTTPStatus() int {
	class := Classify(f.Reason)
	if f.Code == code.Code_OK || f.Code == class.Code {
		return class.HTTP
	}
	if status, ok := httpStatuses[f.Code]; ok {
		return status
	}
	return http.StatusInternalServerError
}

// Retryable reports whether the same request may succeed later.
func (f *Fault) Retryable() bool { return Classify(f.Reason).Retryable && !f.IsFinal() }

// finalKey is in the metadata of final faults.
const finalKey = "final"

// IsFinal reports whether the fault is known to come again, whatever its reason says.
func (f *Fault) IsFinal() bool { return f.Metadata[finalKey] != "" }

// Final returns a copy that is final.
func (f *Fault) Final() *Fault { return f.WithMetadata(finalKey, "true") }

// Caused returns a copy with a cause: for logs and errors.Is, not for the
// caller.
func (f *Fault) Caused(err error) *Fault {
	out := f.clone()
	out.cause = err
	return out
}

// At returns a copy with the place where it happened; fields that are set already stay.
func (f *Fault) At(stage, step, host string) *Fault {
	out := f.clone()
	if out.Stage == "" {
		out.Stage = stage
	}
	if out.Step == "" {
		out.Step = step
	}
	if out.Host == "" {
		out.Host = host
	}
	return out
}

// WithRetryAfter returns a copy that asks for a pause before the retry.
func (f *Fault) WithRetryAfter(d time.Duration) *Fault {
	out := f.clone()
	out.RetryAfter = d
	return out
}

// WithViolation returns a copy that names one more field at fault.
func (f *Fault) WithViolation(field, format string, args ...any) *Fault {
	out := f.clone()
	out.Violations = append(out.Violations, Violation{Field: field, Description: fmt.Sprintf(format, args...)})
	return out
}

// WithMetadata returns a copy with one more fact.
func (f *Fault) WithMetadata(key, value string) *Fault {
	out := f.clone()
	if out.Metadata == nil {
		out.Metadata = map[string]string{}
	}
	out.Metadata[key] = value
	return out
}

func (f *Fault) clone() *Fault {
	out := *f
	out.Violations = slices.Clone(f.Violations)
	out.Metadata = maps.Clone(f.Metadata)
	return &out
}

// From returns the fault in err's chain. A context's end becomes its own
// reason; anything else is Internal, with err as the cause and a message that
// gives nothing of it away.
func From(err error) *Fault {
	if f, ok := errors.AsType[*Fault](err); ok {
		return f
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return &Fault{Reason: DeadlineExceeded, Message: "the deadline passed", cause: err}
	case errors.Is(err, context.Canceled):
		return &Fault{Reason: Cancelled, Message: "the caller went away", cause: err}
	}
	return &Fault{Reason: Internal, Message: "internal error; look for the request id in the logs", cause: err}
}

// maxKey bounds what a path repeats of a caller's own key, in bytes.
const maxKey = 40

// Member returns the path of a member of the object at a path: "inputs.order" and
// "price" are "inputs.order.price". A key that is not a plain word is in brackets and
// quotes, and a long one is cut.
func Member(path, key string) string {
	if len(key) > maxKey {
		key = strings.ToValidUTF8(key[:maxKey], "") + "..."
	}
	if !plainKey(key) {
		return fmt.Sprintf("%s[%s]", path, strconv.Quote(key))
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

// Element returns the path of an element of the list at a path: "inputs.items[3]".
func Element(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }

func plainKey(key string) bool {
	if key == "" || !utf8.ValidString(key) {
		return false
	}
	return strings.Trim(key, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.$") == ""
}
