package fleet

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
)

// heard is what one caller hears.
type heard struct {
	request, body string
	// reason is that of the fault that was the answer.
	reason string
	// terminals counts the ends of the answer: outputs, or a fault.
	terminals int
	// muddled says that a streamed answer had a gap, or parts of two runs.
	muddled bool
	// seq is the number of the last message of a streamed answer.
	seq uint64
	// left says that the caller gave up; err that there was no answer.
	left bool
	err  error
}

// wrong reports whether it is not the answer to the text, by any run.
func (h heard) wrong(text string) bool {
	got, _, _ := strings.Cut(h.body, " ")
	return got != text || h.muddled
}

// ask sends a request to the gateway whose turn it is.
func (l *Load) ask(i int, text string) heard {
	var h heard
	err := l.ready.through(l.spec.Through, i, func(addr string) (err error) {
		if l.spec.Chunks > 0 {
			h, err = l.stream(addr, text)
		} else {
			h, err = l.infer(addr, text)
		}
		return err
	})
	h.err, h.left = err, err != nil && errors.Is(l.staying.Err(), context.Canceled)
	return h
}

func (l *Load) infer(addr, text string) (heard, error) {
	request, err := http.NewRequestWithContext(l.staying, http.MethodPost, "http://"+addr+"/v1/pipelines/"+l.spec.Pipeline+":infer", strings.NewReader(text))
	if err != nil {
		return heard{}, err
	}
	request.Header.Set("Content-Type", "text/plain")
	if l.spec.Durable {
		request.Header.Set("Stagemesh-Durability", "file")
	}
	if l.spec.Timeout > 0 {
		request.Header.Set("Stagemesh-Timeout", l.spec.Timeout.String())
	}
	response, err := l.client.Do(request)
	if err != nil {
		return heard{}, err
	}
	defer response.Body.Close() //nolint:errcheck // it was read to its end
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return heard{}, err
	}
	h := heard{request: response.Header.Get("Stagemesh-Request-Id"), body: string(body), terminals: 1}
	if response.StatusCode != http.StatusOK {
		h.reason = reasonOf(response.StatusCode, body)
	}
	return h, nil
}

func reasonOf(status int, body []byte) string {
	var problem struct {
		Error struct {
			Reason string `json:"reason"`
		} `json:"error"`
	}
	if json.Unmarshal(bytes.TrimSpace(body), &problem) != nil || problem.Error.Reason == "" {
		return fmt.Sprintf("untyped %d: %.200s", status, body)
	}
	return problem.Error.Reason
}

func (l *Load) stream(addr, text string) (heard, error) {
	client := inferencev1connect.NewInferenceServiceClient(l.client, "http://"+addr)
	request := &inferencev1.InferRequest{Pipeline: l.spec.Pipeline, Inputs: []*inferencev1.Part{{
		Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: "text/plain", Data: []byte(text)}},
	}}}
	if l.spec.Durable {
		request.Durability = inferencev1.Durability_DURABILITY_FILE
	}
	if l.spec.Timeout > 0 {
		request.Timeout = durationpb.New(l.spec.Timeout)
	}
	messages, err := client.InferStream(l.staying, connect.NewRequest(request))
	if err != nil {
		return heard{}, err
	}
	defer messages.Close() //nolint:errcheck // it was read to its end
	var h heard
	chunks := 0
	for messages.Receive() {
		chunks += h.take(messages.Msg())
	}
	if err := messages.Err(); err != nil {
		if h.reason = reasonIn(err); h.reason == "" {
			return h, err
		}
		h.terminals++
		return h, nil
	}
	if h.terminals == 0 {
		return h, errors.New("the stream ended without an answer")
	}
	h.muddled = h.muddled || chunks != l.spec.Chunks
	return h, nil
}

// take takes a message of a streamed answer and returns how many chunks it is.
func (h *heard) take(m *inferencev1.InferStreamResponse) (chunks int) {
	h.request = m.GetRequestId()
	h.seq++
	h.muddled = h.muddled || m.GetSeq() != h.seq
	outputs := m.GetChunk().GetOutputs()
	if final := m.GetFinal(); final != nil {
		outputs = final.GetOutputs()
		h.terminals++
	} else {
		chunks = 1
		h.muddled = h.muddled || h.terminals > 0
	}
	body := string(outputs[0].GetBlob().GetData())
	h.muddled = h.muddled || h.body != "" && h.body != body
	h.body = body
	return chunks
}

func reasonIn(err error) string {
	answer, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return ""
	}
	for _, detail := range answer.Details() {
		value, err := detail.Value()
		if info, is := value.(*errdetails.ErrorInfo); err == nil && is {
			return info.GetReason()
		}
	}
	return ""
}
