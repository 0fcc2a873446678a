package rest

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// linesType is the media type of one JSON document a line.
const linesType = "application/x-ndjson"

// jobLine is a line that has no answer yet.
type jobLine struct {
	number int
	memory *budget.Account
}

// submitLines stores a job for each line of the body, which are as the template. It answers with
// a line for each: the job, or why there is none.
func (h *jobsHandler) submitLines(w http.ResponseWriter, r *http.Request, template *inferencev1.SubmitJobRequest, kind kind) error {
	options, err := ReadOptions(r)
	if err != nil {
		return err
	}
	kind.media, kind.full = jsonType, jsonType
	if template.GetHttp() != nil {
		kind.params = map[string]string{"form": "blob"}
	}
	var unanswered []jobLine
	budget.FromContext(r.Context()).HasMany()
	memory := budget.Of(r.Context(), 0)
	defer func() {
		memory.Close()
		for _, line := range unanswered {
			line.memory.Close()
		}
	}()
	if err := memory.Reserve(lineBuffer); err != nil {
		return err
	}
	var answers []byte // those that are held
	hasAny := false
	answer := func(document []byte) error {
		if !hasAny {
			hasAny = true
			_ = http.NewResponseController(w).EnableFullDuplex() // without it, in tests, there is no connection
			w.Header().Set("Content-Type", linesType)
		}
		before := cap(answers)
		answers = append(append(answers, document...), '\n')
		if len(answers) < maxHeldAnswers && memory.Reserve(int64(cap(answers)-before)) == nil {
			return nil
		}
		_, err := w.Write(answers)
		answers = answers[:0]
		return err
	}
	jobs := func(yield func(*inferencev1.SubmitJobRequest, error) bool) {
		from := bufio.NewReaderSize(transport.StallReader(w, r, h.settings), lineBuffer)
		for number := 1; ; number++ {
			data, err := readLine(from, h.settings.MaxMessageBytes, func() { transport.ReleaseBody(r) })
			isLong, isEOF := errors.Is(err, errLongLine), errors.Is(err, io.EOF)
			if len(data) == 0 && isEOF {
				return
			}
			if len(data) == 0 && err == nil {
				continue
			}
			transport.ReleaseBody(r)
			line, isLast := jobLine{number, budget.Of(r.Context(), h.settings.MaxPayload)}, err != nil && !isLong
			unanswered = append(unanswered, line)
			var in *inferencev1.SubmitJobRequest
			switch {
			case isLong:
				err = transport.TooLarge(int64(h.settings.MaxMessageBytes))
			case isLast && !isEOF:
				err = transport.ReadFault(err)
			default:
				in, err = h.jobOfLine(template, *options, kind, data, line)
			}
			if !yield(in, err) || isLast {
				return
			}
		}
	}
	err = h.jobs.SubmitJobs(r.Context(), jobs, func(job *inferencev1.Job, err error) error {
		line := unanswered[0]
		unanswered = unanswered[1:]
		line.memory.Close()
		if err != nil {
			return answer(failedLine(line.number, err))
		}
		return answer(appendValue(nil, pipeline.JobDocumentOf(job)))
	})
	switch {
	case err == nil && !hasAny:
		return emptyBody()
	case !hasAny:
		return err
	case err != nil && len(unanswered) > 0:
		_ = answer(failedLine(unanswered[0].number, err))
	}
	if err != nil { // net/http would read the rest
		_ = http.NewResponseController(w).SetReadDeadline(time.Unix(0, 0))
	}
	_, _ = w.Write(answers) // a failed write is not an error: the caller has disconnected
	return nil
}

func (h *jobsHandler) jobOfLine(template *inferencev1.SubmitJobRequest, request request.Request, kind kind, data []byte, line jobLine) (*inferencev1.SubmitJobRequest, error) {
	if err := line.memory.Reserve(int64(len(data))); err != nil {
		return nil, err
	}
	if err := h.takeBody(&request, new(format), kind, data, line.memory); err != nil {
		return nil, err
	}
	if err := payload.Validate("inputs", request.Inputs); err != nil {
		return nil, err
	}
	request.Pipeline = template.GetInfer().GetPipeline()
	if request.IdempotencyKey != "" {
		request.IdempotencyKey = fmt.Sprintf("%s/%d", request.IdempotencyKey, line.number)
	}
	out := proto.CloneOf(template)
	return out, setRequest(out, &request, jsonType)
}

func failedLine(number int, err error) []byte {
	return append(fmt.Appendf(nil, `{"line":%d,`, number), transport.FaultJSON(err)[1:]...)
}

const (
	lineBuffer = 64 << 10
	// maxHeldAnswers is how many bytes of answers are held before the answer begins, since a client
	// may read nothing before it has sent everything.
	maxHeldAnswers = 1 << 20
)

var errLongLine = errors.New("the line is too long")

// readLine returns the next line without its end and the spaces around it, or errLongLine if it
// is longer than limit. It calls release for what it does not keep of such a line. The last line may come
// with io.EOF.
func readLine(from *bufio.Reader, limit int, release func()) (line []byte, err error) {
	for {
		part, err := from.ReadSlice('\n')
		isLong := len(line)+len(bytes.TrimRight(part, "\r\n")) > limit
		if !isLong {
			line = append(line, part...)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull) && !isLong:
		case errors.Is(err, bufio.ErrBufferFull):
			line, limit = nil, -1
			release()
		case isLong && (err == nil || errors.Is(err, io.EOF)):
			return nil, errLongLine
		default:
			return bytes.TrimSpace(line), err
		}
	}
}
