package oiptest

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/pb33f/libopenapi"
	validator "github.com/pb33f/libopenapi-validator"
	findings "github.com/pb33f/libopenapi-validator/errors"
)

//go:embed protocol.yaml
var document []byte

const (
	lengthHeader = "Inference-Header-Content-Length"
	text         = "application/json"
	octets       = "application/octet-stream"
	elsewhere    = "/elsewhere"
)

// Protocol validates answers against the protocol's document.
type Protocol struct{ validator validator.Validator }

// New returns the protocol.
func New(t testing.TB) *Protocol {
	t.Helper()
	parsed, err := libopenapi.NewDocument(document)
	if err != nil {
		t.Fatal(err)
	}
	v, failures := validator.NewValidator(parsed)
	if err := errors.Join(failures...); err != nil {
		t.Fatal(err)
	}
	return &Protocol{validator: v}
}

// Valid returns the error of the protocol's own document, or nil.
func (p *Protocol) Valid() error {
	_, failures := p.validator.ValidateDocument()
	return joinFailures(failures)
}

// Check returns the error of an answer to a request, or nil; requestBody is the request's
// body.
func (p *Protocol) Check(r *http.Request, requestBody []byte, status int, h http.Header, answer []byte) error {
	head, behind, err := split(h, answer)
	if err == nil {
		err = p.document(r, status, h, head)
	}
	if err == nil && status == http.StatusOK && strings.HasSuffix(r.URL.Path, "/infer") {
		err = fits(r, requestBody, head, behind)
	}
	if err != nil {
		return fmt.Errorf("%s %s is answered %d %.300q: %w", r.Method, r.URL.Path, status, head, err)
	}
	return nil
}

// split returns the JSON of an answer and the bytes behind it. The media type and the
// length header have to announce the bytes.
func split(h http.Header, answer []byte) (head, behind []byte, err error) {
	length, mediaType := h.Get(lengthHeader), h.Get("Content-Type")
	if length == "" && mediaType != octets {
		return answer, nil, nil
	}
	n, err := strconv.Atoi(length)
	if err != nil || n < 0 || n > len(answer) || mediaType != octets {
		return nil, nil, fmt.Errorf("its %s is %q, of %d bytes of %s", lengthHeader, length, len(answer), mediaType)
	}
	return answer[:n], answer[n:], nil
}

// document validates a status and its JSON against the document. Unknown errors have
// the schema of every error.
func (p *Protocol) document(r *http.Request, status int, h http.Header, head []byte) error {
	clone := r.Clone(r.Context())
	clone.Body, clone.URL.Path = http.NoBody, strings.TrimSuffix(clone.URL.Path, "/")
	failures := p.answer(clone, status, h, head)
	if len(failures) > 0 && (failures[0].IsPathMissingError() || failures[0].IsOperationMissingError()) {
		clone.Method, clone.URL = http.MethodGet, &url.URL{Path: elsewhere}
		failures = p.answer(clone, status, h, head)
	}
	return joinFailures(failures)
}

func (p *Protocol) answer(clone *http.Request, status int, h http.Header, head []byte) []*failure {
	mediaType := h.Get("Content-Type")
	if mediaType == octets {
		// The document describes the JSON.
		mediaType = text
	}
	_, failures := p.validator.ValidateHttpResponse(clone, &http.Response{
		StatusCode: status, Header: http.Header{"Content-Type": {mediaType}},
		Body: io.NopCloser(bytes.NewReader(head)), Request: clone,
	})
	return failures
}

// failure is an error that the validator reports.
type failure = findings.ValidationError

func joinFailures(failures []*failure) error {
	out := make([]error, len(failures))
	for i, f := range failures {
		out[i] = f
	}
	return errors.Join(out...)
}
