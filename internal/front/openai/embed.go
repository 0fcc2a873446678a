package openai

import (
	"context"
	"encoding/base64"
	"fmt"
	"math"
	"net/http"

	"golang.org/x/sync/errgroup"

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
)

// embedding is a call of embeddings.
type embedding struct {
	*input

	texts            [][]byte
	isList, inBase64 bool
	// dimensions is how many numbers a vector must have; 0 means any.
	dimensions int64
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
	responses, err := h.inferTexts(r.Context(), e)
	if err != nil {
		return err
	}
	data, used := make([]any, len(responses)), uint64(0)
	isCounted := true
	for i, one := range responses {
		vector, err := e.vectorOf(one)
		if err != nil {
			return transport.WithRequestID(e.at(i, err), one.RequestID)
		}
		data[i] = map[string]any{"object": "embedding", "index": i, "embedding": vector}
		usage := usageOf(one.Metadata, promptTokensKey)
		n, ok := usage[promptTokensKey].(uint64)
		used, isCounted = used+n, isCounted && ok
	}
	document := map[string]any{"object": "list", "model": e.model, "data": data}
	if isCounted {
		document["usage"] = map[string]any{promptTokensKey: used, "total_tokens": used}
	}
	write(w, responses[0], document)
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

// inferTexts returns the response for each text. The first failure ends the others.
func (h *calls) inferTexts(ctx context.Context, e *embedding) ([]*request.Response, error) {
	out := make([]*request.Response, len(e.texts))
	if e.request.Timeout > 0 { // it is the call's, not each text's
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, e.request.Timeout)
		defer cancel()
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(transport.ManyInFlight)
	for i, text := range e.texts {
		group.Go(func() (err error) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			one := *e.request
			one.Inputs = []payload.Part{payload.OfBlob(textInput, textPlain, text)}
			if i > 0 {
				one.ID = ""
			}
			if one.IdempotencyKey != "" && e.isList {
				one.IdempotencyKey = fmt.Sprintf("%s/%d", one.IdempotencyKey, i+1)
			}
			if out[i], err = h.caller.Infer(ctx, &one); err != nil {
				return e.at(i, err)
			}
			return nil
		})
	}
	return out, group.Wait()
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

// vectorOf returns the vector of a response, in the form of the answer.
func (e *embedding) vectorOf(r *request.Response) (any, error) {
	part, ok := outputOf(r.Outputs, embeddingOutput)
	if !ok || part.Tensor == nil || part.Tensor.Datatype != tensor.FP32 {
		return nil, badVector("the pipeline %s gives no output %s, nor one alone, that is FP32", e.request.Pipeline, embeddingOutput)
	}
	values, err := part.Tensor.FP32Values()
	if err != nil {
		return nil, badVector("the output %s: %w", part.Name, err)
	}
	shape := part.Tensor.Shape
	if len(values) == 0 || len(shape) == 0 || shape[len(shape)-1] != int64(len(values)) {
		return nil, badVector("the output %s has the shape %v, not that of one vector", part.Name, shape)
	}
	if e.dimensions > 0 && e.dimensions != int64(len(values)) {
		return nil, invalid(dimensionsParameter, "the model gives %d numbers for a text, and no other number", len(values))
	}
	for i, v := range values {
		if f := float64(v); math.IsNaN(f) || math.IsInf(f, 0) {
			return nil, badVector("the output %s has %v at %d, which JSON cannot represent", part.Name, v, i)
		}
	}
	if e.inBase64 {
		return base64.StdEncoding.EncodeToString(part.Tensor.Raw), nil
	}
	return values, nil
}

func badVector(format string, args ...any) error {
	return fault.Newf(fault.RunnerOutputInvalid, format, args...)
}
