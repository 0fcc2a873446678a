package openai

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

const (
	textInput       = "input"
	embeddingOutput = "embedding"

	dimensionsParameter = "dimensions"
	// maxTexts bounds the texts of a call.
	maxTexts = 2048
	// replyBytes is what the reply for a text takes beside its outputs.
	replyBytes = 1 << 10
	// maxRefusals is how often a call that has had places, and has none, is refused until it fails.
	maxRefusals = 10
	// growth is how slowly a call tries for more places: of its texts, fewer than one in so many are refused.
	growth = 32
)

// embedding is a call of embeddings.
type embedding struct {
	*input

	texts            [][]byte
	isList, inBase64 bool
	// dimensions is how many numbers a vector must have; 0 means any.
	dimensions int64
	// vectors are what became of the texts.
	vectors []vector
}

// vector is FP32, with the metadata of its response.
type vector struct {
	tensor.Tensor
	metadata map[string]string
}

// embed answers a call of embeddings. Each text is a request of its own, so that they share batches
// with those of others.
func (h *calls) embed(w http.ResponseWriter, r *http.Request, id pipeline.RequestID) error {
	memory := budget.Of(r.Context(), 0) // gateway.max_payload holds for each text
	defer memory.Close()
	in, err := h.read(w, r, id, "embeddings", memory)
	if err != nil {
		return err
	}
	e := &embedding{input: in}
	if err = e.take(e.takeMember); err != nil {
		return err
	}
	if len(e.texts) == 0 {
		return invalid(textInput, "is missing")
	}
	e.vectors = make([]vector, len(e.texts))
	if err := memory.ReserveOutput(int64(len(e.texts)) * replyBytes); err != nil {
		return err
	}
	first, err := h.inferTexts(r.Context(), e)
	if err != nil {
		return err
	}
	return e.write(w, first)
}

// write answers with the vectors. It holds the JSON of one vector at a time, because JSON takes
// several times what is reserved for a response.
func (e *embedding) write(w http.ResponseWriter, first *request.Response) error {
	document, used, isCounted := map[string]any{"object": "list", "model": e.model}, uint64(0), true
	for _, v := range e.vectors {
		n, ok := usageOf(v.metadata, promptTokensKey)[promptTokensKey].(uint64)
		used, isCounted = used+n, isCounted && ok
	}
	if isCounted {
		document["usage"] = map[string]any{promptTokensKey: used, "total_tokens": used}
	}
	end, err := json.Marshal(document)
	if err != nil {
		return err
	}
	setHeaders(w.Header(), first)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	before := `{"data":[`
	for i, v := range e.vectors {
		one := map[string]any{"object": "embedding", "index": i, "embedding": v.Raw} // which is base64
		if !e.inBase64 {
			one["embedding"], _ = v.FP32Values()
		}
		text, _ := json.Marshal(one) // numbers are finite: see vectorOf
		if _, err := w.Write(slices.Concat([]byte(before), text)); err != nil {
			return nil //nolint:nilerr // the caller has disconnected
		}
		before = ","
	}
	_, _ = w.Write(slices.Concat([]byte("],"), end[1:], []byte("\n")))
	return nil
}

// takeMember takes a member of the body.
func (e *embedding) takeMember(f oipjson.Field) (taken bool, err error) {
	switch f.Name {
	case textInput:
		e.texts, e.isList, err = textsOf(f, maxTexts, e.memory)
	case "encoding_format":
		format, _ := f.Text()
		if e.inBase64 = format == "base64"; !e.inBase64 && format != "float" {
			err = invalid(f.Name, "must be float or base64")
		}
	case dimensionsParameter:
		e.dimensions, err = e.setCount(f.Name, f)
	default:
		return false, nil
	}
	return true, err
}

// inferTexts fills the vectors, and returns the response for the first text. Where the mesh has no place
// for a text, the text waits for others of the call. The first other failure ends the call. Calls remember how
// many texts of a pipeline had places, so that few are refused.
func (h *calls) inferTexts(ctx context.Context, e *embedding) (first *request.Response, err error) {
	if e.request.Timeout > 0 { // it is the call's, not each text's
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, e.request.Timeout)
		defer cancel()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type end struct {
		text     int
		response *request.Response
		err      error
	}
	ends := make(chan end)
	waiting := make([]int, len(e.texts))
	for i := range waiting {
		waiting[i] = i
	}
	// limit is how many texts may run: an answer raises it by 1/(growth*limit), a refusal sets it to those that still run.
	running, answered, refusals, limit := 0, 0, 0, float64(transport.ManyInFlight)
	if of, ok := h.places.Load(e.request.Pipeline); ok {
		limit = of.(float64)
	}
	defer func() { h.places.Store(e.request.Pipeline, limit) }()
	for running > 0 || len(waiting) > 0 && err == nil {
		for ; len(waiting) > 0 && err == nil && running < int(limit); running++ {
			i := waiting[0]
			waiting = waiting[1:]
			go func() {
				response, err := h.inferText(ctx, e, i)
				ends <- end{i, response, err}
			}() // the loop receives one end for each
		}
		ended := <-ends
		running--
		switch {
		case err != nil: // it ends the others
		case ended.err == nil:
			if ended.text == 0 {
				first = ended.response
			}
			answered++
			limit = min(limit+1/(growth*limit), transport.ManyInFlight)
		case ended.response == nil && isRefused(ended.err) && (running > 0 || answered > 0 && refusals < maxRefusals):
			waiting, limit = append(waiting, ended.text), max(1, float64(running))
			if running == 0 { // others have the places
				refusals++
				err = pause(ctx, fault.From(ended.err).RetryAfter)
			}
		default:
			err = ended.err
			cancel()
		}
	}
	return first, err
}

// isRefused reports whether the mesh had no place for a request.
func isRefused(err error) bool {
	f := fault.From(err)
	return f.Reason == fault.Overloaded || f.Reason == fault.QueueFull
}

// pause waits as long as a refusal asks for, and not long.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(min(cmp.Or(d, budget.RetryAfter), budget.RetryAfter)):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// inferText makes the request for a text.
func (h *calls) inferText(ctx context.Context, e *embedding, i int) (*request.Response, error) {
	one := *e.request
	one.Inputs = []payload.Part{payload.OfBlob(textInput, textPlain, e.texts[i])}
	if i > 0 {
		one.ID = ""
	}
	if one.IdempotencyKey != "" && e.isList {
		one.IdempotencyKey = fmt.Sprintf("%s/%d", one.IdempotencyKey, i+1)
	}
	response, err := h.caller.Infer(ctx, &one)
	if err != nil {
		return response, e.at(i, err) // a response that did not fit into memory
	}
	if e.vectors[i], err = e.vectorOf(response); err != nil {
		return nil, transport.WithRequestID(e.at(i, err), response.RequestID)
	}
	return response, nil
}

// at returns the error of a text as a fault whose message names the text.
func (e *embedding) at(i int, err error) error {
	f := fault.From(err)
	if !e.isList {
		return f
	}
	out := *f
	out.Message = fmt.Sprintf("%s[%d]: %s", textInput, i, f.Message)
	return &out
}

// vectorOf returns the vector of a response.
func (e *embedding) vectorOf(r *request.Response) (out vector, err error) {
	part, ok := outputOf(r.Outputs, embeddingOutput)
	if !ok || part.Tensor == nil || part.Tensor.Datatype != tensor.FP32 {
		return out, badVector("the pipeline %s gives no output %s, nor one alone, that is FP32", e.request.Pipeline, embeddingOutput)
	}
	values, err := part.Tensor.FP32Values()
	if err != nil {
		return out, badVector("the output %s: %w", part.Name, err)
	}
	shape := part.Tensor.Shape
	if len(values) == 0 || len(shape) == 0 || shape[len(shape)-1] != int64(len(values)) {
		return out, badVector("the output %s has the shape %v, not that of one vector", part.Name, shape)
	}
	if e.dimensions > 0 && e.dimensions != int64(len(values)) {
		return out, invalid(dimensionsParameter, "the model gives %d numbers for a text, and no other number", len(values))
	}
	for i, v := range values {
		if f := float64(v); math.IsNaN(f) || math.IsInf(f, 0) {
			return out, badVector("the output %s has %v at %d, which JSON cannot represent", part.Name, v, i)
		}
	}
	return vector{*part.Tensor, r.Metadata}, nil
}

func badVector(format string, args ...any) error {
	return fault.Newf(fault.RunnerOutputInvalid, format, args...)
}
