// Package oiptest validates answers against the REST form of the Open Inference
// Protocol: the statuses, media types and documents of protocol.yaml. It also checks
// what no schema can express: that an answer matches its request, and its tensors match
// their shapes.
//
//	protocol := oiptest.New(t)
//	err := protocol.Check(request, requestBody, status, header, body)
//
// A Protocol is safe for concurrent use. No program links it.
package oiptest

import (
	"bytes"
	_ "embed"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
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
	jsonType     = "application/json"
	octetStream  = "application/octet-stream"
	// unknownPath is the path in the document that has the schema of every error.
	unknownPath = "/elsewhere"
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
		err = checkInference(r, requestBody, head, behind)
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
	if length == "" && mediaType != octetStream {
		return answer, nil, nil
	}
	n, err := strconv.Atoi(length)
	if err != nil || n < 0 || n > len(answer) || mediaType != octetStream {
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
		clone.Method, clone.URL = http.MethodGet, &url.URL{Path: unknownPath}
		failures = p.answer(clone, status, h, head)
	}
	return joinFailures(failures)
}

func (p *Protocol) answer(clone *http.Request, status int, h http.Header, head []byte) []*failure {
	mediaType := h.Get("Content-Type")
	if mediaType == octetStream {
		// The document describes the JSON.
		mediaType = jsonType
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

// inferRequest are the properties of a request on which its answer depends.
type inferRequest struct {
	ID         string
	Parameters struct {
		All bool `json:"binary_data_output"`
	}
	Outputs []requestedOutput
}

type requestedOutput struct {
	Name       string
	Parameters struct {
		Binary *bool `json:"binary_data"`
	}
}

// inferResponse is the answer of an inference.
type inferResponse struct {
	ModelName string `json:"model_name"`
	ID        string
	Outputs   []output
}

type output struct {
	Name, Datatype string
	Shape          []int
	Parameters     struct {
		Size *int `json:"binary_data_size"`
	}
	Data []any
}

// checkInference checks what the document's schemas cannot: that an answer matches its request,
// and that its tensors are consistent.
func checkInference(r *http.Request, body, head, behind []byte) error {
	in, err := request(r.Header.Get(lengthHeader), body)
	if err != nil {
		return err
	}
	var out inferResponse
	if err := json.Unmarshal(head, &out); err != nil {
		return err
	}
	if model := strings.Split(r.URL.Path, "/")[3]; out.ModelName != model || out.ID != in.ID {
		return fmt.Errorf("it is of model %q with id %q; asked was %q with %q", out.ModelName, out.ID, model, in.ID)
	}
	if err := checkOutputs(in, out.Outputs); err != nil {
		return err
	}
	for _, o := range out.Outputs {
		if behind, err = o.take(behind); err != nil {
			return fmt.Errorf("output %q: %w", o.Name, err)
		}
	}
	if len(behind) > 0 {
		return fmt.Errorf("%d bytes after the JSON belong to no output", len(behind))
	}
	return nil
}

// request reads the JSON of a request. The length header gives where its bytes begin.
func request(length string, body []byte) (inferRequest, error) {
	var out inferRequest
	if length != "" {
		n, err := strconv.Atoi(length)
		if err != nil || n > len(body) {
			return out, fmt.Errorf("a request whose %s is %q is answered", lengthHeader, length)
		}
		body = body[:n]
	}
	return out, json.Unmarshal(body, &out)
}

// checkOutputs checks that the outputs are the requested ones, each in the requested
// form.
func checkOutputs(in inferRequest, outputs []output) error {
	for _, o := range outputs {
		asBytes := in.Parameters.All
		at := slices.IndexFunc(in.Outputs, func(w requestedOutput) bool { return w.Name == o.Name })
		switch {
		case at < 0 && len(in.Outputs) > 0:
			return fmt.Errorf("output %q was not asked for", o.Name)
		case at >= 0 && in.Outputs[at].Parameters.Binary != nil:
			asBytes = *in.Outputs[at].Parameters.Binary
		}
		if is := o.Parameters.Size != nil; is != asBytes {
			return fmt.Errorf("output %q is binary: %t, asked for: %t", o.Name, is, asBytes)
		}
	}
	if n := len(in.Outputs); n > 0 && n != len(outputs) {
		return fmt.Errorf("%d outputs were asked for, %d are there", n, len(outputs))
	}
	return nil
}

// take checks that the number of elements matches the shape, in the JSON or at the
// beginning of the bytes. It returns the bytes after them.
func (o output) take(behind []byte) (rest []byte, err error) {
	places := 1
	for _, extent := range o.Shape {
		places *= extent
	}
	have := len(o.Data)
	if size := o.Parameters.Size; size != nil {
		if *size > len(behind) {
			return nil, fmt.Errorf("it has %d bytes, %d are left", *size, len(behind))
		}
		if have, err = elements(o.Datatype, behind[:*size]); err != nil {
			return nil, err
		}
		behind = behind[*size:]
	}
	if have != places {
		return nil, fmt.Errorf("it has %d elements, its shape %v is of %d", have, o.Shape, places)
	}
	return behind, nil
}

// widths are the bytes of an element.
func widths() map[string]int {
	return map[string]int{
		"BOOL": 1, "INT8": 1, "UINT8": 1, "INT16": 2, "UINT16": 2, "FP16": 2, "BF16": 2,
		"INT32": 4, "UINT32": 4, "FP32": 4, "INT64": 8, "UINT64": 8, "FP64": 8,
	}
}

// elements counts the elements in the raw bytes of a tensor.
func elements(datatype string, raw []byte) (int, error) {
	if width := widths()[datatype]; width > 0 {
		if len(raw)%width != 0 {
			return 0, fmt.Errorf("%d bytes are not whole elements of %s", len(raw), datatype)
		}
		return len(raw) / width, nil
	}
	n := 0
	for from := bytes.NewReader(raw); from.Len() > 0; n++ {
		var length uint32
		if binary.Read(from, binary.LittleEndian, &length) != nil || int64(length) > int64(from.Len()) {
			return 0, errors.New("an element of BYTES ends early")
		}
		if _, err := from.Seek(int64(length), 1); err != nil {
			return 0, err
		}
	}
	return n, nil
}
