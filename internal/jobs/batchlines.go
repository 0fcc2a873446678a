package jobs

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"golang.org/x/sync/errgroup"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Bounds of an input file.
const (
	maxBatchLines = 50_000
	// maxBatchLine is the size of the longest line, in bytes.
	maxBatchLine = 8 << 20
	// maxBatchErrors is how many bad lines are told.
	maxBatchErrors = 100
	// lineBuffer is where a reader of lines begins, in bytes.
	lineBuffer = 64 << 10
)

type batchLine struct {
	CustomID string    `json:"custom_id"`
	Method   string    `json:"method"`
	URL      string    `json:"url"`
	Body     batchBody `json:"body"`
}

// batchBody is what matters of a request's body.
type batchBody struct {
	Model  string `json:"model"`
	Stream bool   `json:"stream"`
}

// errBadBatch ends the check of a file with enough errors.
var errBadBatch = errors.New("the batch is not valid")

// linePlace is where a request of an input file is: its place from 0, the number of its line, and
// the offset of that.
type linePlace struct {
	i, number int
	offset    int64
}

// errNoInput means that the bytes of an input file are gone.
var errNoInput = errors.New("the input file was deleted")

// eachRequest passes the requests of an input file, from a place on, to do. A text is valid until do
// returns; nil is a line that is too long. The error is errNoInput if the file was deleted.
func eachRequest(file io.Reader, at linePlace, do func(at linePlace, text []byte) error) error {
	lines := bufio.NewScanner(file)
	lines.Buffer(make([]byte, lineBuffer), maxBatchLine)
	size := 0
	lines.Split(func(data []byte, atEOF bool) (_ int, line []byte, err error) {
		size, line, err = bufio.ScanLines(data, atEOF)
		return size, line, err
	})
	for lines.Scan() {
		if lines.Err() != nil {
			break // the file cannot be read further, and the line may be half of one
		}
		at.number++
		if text := bytes.TrimSpace(lines.Bytes()); len(text) > 0 {
			if err := do(at, text); err != nil {
				return err
			}
			at.i++
		}
		at.offset += int64(size)
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		at.number++
		return do(at, nil)
	case errors.Is(err, store.ErrNoRecord):
		return errNoInput
	default:
		return err
	}
}

// batchCheck checks the lines of an input file.
type batchCheck struct {
	endpoint string
	requests int
	// seen has digests of the custom IDs, in little memory.
	seen map[[16]byte]struct{}
	errs []store.BatchError
}

func (c *batchCheck) fail(line int, code, param, format string, args ...any) {
	c.errs = append(c.errs, store.BatchError{Code: code, Message: fmt.Sprintf(format, args...), Param: param, Line: line})
}

// add checks a line of eachRequest. After errBadBatch nothing is added.
func (c *batchCheck) add(at linePlace, text []byte) error {
	c.requests = at.i + 1
	switch {
	case at.i == maxBatchLines:
		c.fail(at.number, "too_many_requests", "", "The input file has more than %d requests.", maxBatchLines)
	case text == nil:
		c.fail(at.number, "line_too_long", "", "The line has more than %d bytes.", maxBatchLine)
	default:
		if c.check(at.number, text); len(c.errs) < maxBatchErrors {
			return nil
		}
	}
	return errBadBatch
}

func (c *batchCheck) check(number int, text []byte) {
	var line batchLine
	err := json.Unmarshal(text, &line)
	ofType, isType := errors.AsType[*json.SemanticError](err)
	var syntax *jsontext.SyntacticError
	digest := sha256.Sum256([]byte(line.CustomID))
	id := [16]byte(digest[:16])
	_, isAgain := c.seen[id]
	c.seen[id] = struct{}{}
	const missing = "missing_required_parameter"
	switch {
	case isType:
		param := strings.Join(slices.Collect(ofType.JSONPointer.Tokens()), ".")
		c.fail(number, "invalid_type", param, "The line has a value of the wrong type, %s.", ofType.JSONKind)
	case errors.As(err, &syntax):
		c.fail(number, "invalid_json_line", "", "The line is not valid JSON at byte %d: %.*s.", syntax.ByteOffset, fault.MaxQuoted, syntax.Err)
	case err != nil:
		c.fail(number, "invalid_json_line", "", "The line is not valid JSON: %.*s.", fault.MaxQuoted, err)
	case line.CustomID == "":
		c.fail(number, missing, "custom_id", "custom_id is missing.")
	case isAgain:
		c.fail(number, "duplicate_custom_id", "custom_id", "An earlier line has the custom_id %.*q.", fault.MaxQuoted, line.CustomID)
	case line.Method != http.MethodPost:
		c.fail(number, "invalid_method", "method", "The method is %.*q, not POST.", fault.MaxQuoted, line.Method)
	case line.URL != c.endpoint:
		c.fail(number, "invalid_url", "url", "The url is %.*q, and the endpoint of the batch %.*q.", fault.MaxQuoted, line.URL, fault.MaxQuoted, c.endpoint)
	case line.Body.Model == "":
		c.fail(number, missing, "body.model", "body.model is missing.")
	case line.Body.Stream:
		c.fail(number, "invalid_request", "body.stream", "A request of a batch cannot be streamed.")
	}
}

type resultLine struct {
	ID       string        `json:"id"`
	CustomID string        `json:"custom_id"`
	Response *lineResponse `json:"response"`
	Error    *lineError    `json:"error"`
}

type lineResponse struct {
	StatusCode int            `json:"status_code"`
	RequestID  string         `json:"request_id"`
	Body       jsontext.Value `json:"body"`
}

type lineError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// lenient is for what was checked before, and for outputs, which nobody checks.
var lenient = json.JoinOptions(jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))

// Bounds of the records of ended lines that are read ahead: their number, and their bytes unless
// they are fewer than minRecordReads. As lines, bodies that are not JSON are larger than in records.
const (
	minRecordReads = 8
	maxRecordReads = 64
	maxRecordBytes = 64 << 20
)

// lineWriter writes each line of a batch to one of its files, in their order.
type lineWriter struct {
	*batchRun

	output, failures io.Writer
	// outcomes has how many lines ended in each state of a job.
	outcomes map[string]int
}

type endedLine struct {
	customID string
	id       pipeline.JobID
	text     []byte
	outcome  string
	isRead   chan struct{} // closed once text and outcome are
}

func (w *lineWriter) write(ctx context.Context) error {
	if w.get().RequestCounts.Total == 0 {
		return nil // they were not read
	}
	work, ctx := errgroup.WithContext(ctx)
	reads := w.recordReads()
	lines, unread := make(chan *endedLine, reads), make(chan *endedLine)
	work.Go(func() error {
		defer close(lines)
		defer close(unread)
		return w.requests(ctx, func(at linePlace, text []byte) error {
			line := &endedLine{id: pipeline.LineJobID(w.queue, w.id, at.i), isRead: make(chan struct{})}
			var in struct {
				CustomID string `json:"custom_id"`
			}
			_ = json.Unmarshal(text, &in, lenient) // it was checked before
			line.customID = in.CustomID
			return errors.Join(send(ctx, lines, line), send(ctx, unread, line))
		})
	})
	for range reads {
		work.Go(func() error {
			for line := range unread {
				if err := w.read(ctx, line); err != nil {
					return err
				}
			}
			return nil
		})
	}
	work.Go(func() error {
		for line := range lines {
			select {
			case <-line.isRead:
			case <-ctx.Done():
				return ctx.Err()
			}
			to := w.failures
			if line.outcome == lineSucceeded {
				to = w.output
			}
			w.outcomes[line.outcome]++
			if _, err := to.Write(line.text); err != nil {
				return err
			}
		}
		return nil
	})
	return work.Wait()
}

func send[T any](ctx context.Context, to chan<- T, v T) error {
	select {
	case to <- v:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *lineWriter) read(ctx context.Context, line *endedLine) error {
	record, err := w.store.Record(ctx, line.id, w.tenant)
	if err != nil && !errors.Is(err, store.ErrNoJob) && !errors.Is(err, store.ErrNotAJob) {
		return err
	}
	var out resultLine
	out, line.outcome = w.resultOf(line, record)
	line.text, err = json.Marshal(out, lenient)
	if err != nil && out.Response != nil { // alone its body is JSON, but it is nested too deeply for a line
		out.Response.Body, _ = jsontext.AppendQuote(nil, out.Response.Body)
		line.text, err = json.Marshal(out, lenient)
	}
	if err != nil {
		return err
	}
	line.text = append(line.text, '\n')
	close(line.isRead)
	return nil
}

// The states of a job that outcomes are compared with.
const (
	lineSucceeded = "succeeded"
	lineFailed    = "failed"
	lineExpired   = "expired"
)

// resultOf returns the result of a line, and the state in which it ended.
func (s *Service) resultOf(line *endedLine, r store.StoredRecord) (out resultLine, outcome string) {
	job := r.GetJob()
	out, outcome = resultLine{ID: "batch_req_" + hex.EncodeToString(line.id.UUID[:]), CustomID: line.customID}, pipeline.JobStateName(job.GetState())
	switch {
	case job == nil:
		out.Error, outcome = &lineError{"result_lost", "The end of this request is no longer stored."}, lineFailed
	case outcome == lineExpired:
		out.Error = &lineError{"batch_expired", "This request could not be executed before the completion window expired."}
	case job.GetState() == inferencev1.JobState_JOB_STATE_CANCELLED:
		out.Error = &lineError{"batch_cancelled", "This request was cancelled before it was executed."}
	case r.GetHttp() != nil:
		out.Response = &lineResponse{StatusCode: int(r.GetHttp().GetStatus()), RequestID: job.GetId(), Body: jsonOf(r.GetHttp().GetBody())}
	case r.GetInfer() != nil:
		body, err := s.outputOf(job.GetPipeline(), r.GetInfer())
		if err != nil {
			f := fault.From(err)
			out.Error, outcome = &lineError{string(f.Reason), f.Message}, lineFailed
			break
		}
		out.Response = &lineResponse{StatusCode: http.StatusOK, RequestID: r.GetInfer().GetRequestId(), Body: body}
	default:
		out.Error = &lineError{job.GetReason(), job.GetMessage()}
	}
	return out, outcome
}

// outputOf returns the output of a pipeline: one part of JSON as it is, or the document of a
// response.
func (s *Service) outputOf(name string, in *inferencev1.InferResponse) (jsontext.Value, error) {
	response, err := request.ResponseFromProto(name, in)
	if err != nil {
		return nil, err
	}
	if len(response.Outputs) == 1 && response.Outputs[0].Tensor == nil && payload.IsJSON(response.Outputs[0].Blob.ContentType) {
		return jsonOf(response.Outputs[0].Blob.Data), nil
	}
	return s.settings.Document(response)
}

// jsonOf returns a body as JSON: as it is, or as a string.
func jsonOf(body jsontext.Value) jsontext.Value {
	if body.IsValid(lenient) {
		return body
	}
	text, _ := jsontext.AppendQuote(nil, body) // bytes that are not UTF-8 become U+FFFD
	return text
}
