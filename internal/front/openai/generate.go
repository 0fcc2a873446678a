package openai

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-json-experiment/json"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// What a stage gets and gives; docs/openai.md is its contract.
const (
	messagesInput = "messages"
	promptInput   = "prompt"
	textOutput    = "text"
	textPlain     = "text/plain"

	maxTokensParameter = "max_tokens"
	stopParameter      = "stop"

	finishKey           = "finish_reason"
	promptTokensKey     = "prompt_tokens"
	completionTokensKey = "completion_tokens"
)

// maxStops bounds the texts that end an answer.
const maxStops = 16

// generation is a call of chat or of completions.
type generation struct {
	*input

	isChat, streams, withUsage bool
	// created is when it came, in seconds of Unix time.
	created int64
	// id is the answer's, which is known with its first part.
	id string
}

// generate answers a call of chat or of completions.
func (h *calls) generate(w http.ResponseWriter, r *http.Request, id pipeline.RequestID) error {
	memory := budget.Of(r.Context(), h.settings.MaxPayload)
	defer memory.Close()
	g := &generation{isChat: r.URL.Path == ChatPath, created: time.Now().Unix()}
	kind, name := "completions", promptInput
	if g.isChat {
		kind, name = "chat", messagesInput
	}
	var err error
	if g.input, err = h.read(w, r, id, kind, memory); err != nil {
		return err
	}
	if err = g.take(g.takeMember); err != nil {
		return err
	}
	switch {
	case len(g.request.Inputs) == 0:
		return invalid(name, "is missing")
	case g.withUsage && !g.streams:
		return invalid("stream_options", "is for streams; leave it out, or set stream")
	case g.streams:
		return h.stream(w, r, g)
	}
	response, err := h.caller.Infer(r.Context(), g.request)
	if err != nil {
		return err
	}
	text, err := g.wholeText(response)
	if err != nil {
		return err
	}
	g.id = response.RequestID
	document := g.document(text, true, cmp.Or(response.Metadata[finishKey], "stop"))
	if used := usageOf(response.Metadata, promptTokensKey, completionTokensKey); used != nil {
		document["usage"] = used
	}
	write(w, response, document)
	return nil
}

// takeMember takes a member of the body.
func (g *generation) takeMember(f oipjson.Field) (taken bool, err error) {
	switch {
	case f.Name == messagesInput && g.isChat:
		var part payload.Part
		if part, err = messagesOf(f, g.memory); err == nil {
			g.request.Inputs = []payload.Part{part}
		}
	case f.Name == promptInput && !g.isChat:
		var texts [][]byte
		if texts, _, err = textsOf(f, 1, g.memory); err == nil {
			g.request.Inputs = []payload.Part{payload.OfBlob(promptInput, textPlain, texts[0])}
		}
	case f.Name == "stream":
		g.streams, err = boolean(f)
	case f.Name == "stream_options":
		var options struct {
			Usage       bool `json:"include_usage"`
			Obfuscation bool `json:"include_obfuscation"`
		}
		if json.Unmarshal(f.JSON, &options, json.RejectUnknownMembers(true)) != nil || options.Obfuscation {
			return false, invalid(f.Name, "is an object of include_usage, true or false; nothing else is supported")
		}
		g.withUsage = options.Usage
	case f.Name == maxTokensParameter, f.Name == "max_completion_tokens":
		_, err = g.setCount(maxTokensParameter, f)
	case f.Name == stopParameter:
		err = g.takeStop(f)
	default:
		return false, nil
	}
	return true, err
}

// takeStop takes texts that end the answer, which a stage gets as one parameter: a list in JSON.
func (g *generation) takeStop(f oipjson.Field) error {
	texts, _, err := textsOf(f, maxStops, g.memory)
	if err != nil {
		return err
	}
	list := []byte{'['}
	for i, text := range texts {
		if i > 0 {
			list = append(list, ',')
		}
		list = oipjson.AppendString(list, string(text))
	}
	return g.setParameter(stopParameter, payload.String(string(append(list, ']'))))
}

// textsOf returns a string, or a list of at least one string and at most that many.
func textsOf(f oipjson.Field, most int, memory *budget.Account) (out [][]byte, isList bool, err error) {
	take := func(one oipjson.Field) error {
		text, ok, err := one.Bytes(memory)
		switch {
		case err != nil:
			return err
		case !ok:
			return invalid(one.Name, "must be a string; tokens are not supported")
		case len(out) == most:
			return invalid(f.Name, "has more than %d texts; send the others in requests of their own", most)
		}
		out = append(out, text)
		return nil
	}
	if isList, err = f.Elements(take); !isList {
		err = take(f)
	}
	if err == nil && len(out) == 0 {
		err = invalid(f.Name, "is empty")
	}
	return out, isList, err
}

// messagesOf returns the messages of a chat as JSON: a list of objects with role, content, which is
// text, and name where there is one.
func messagesOf(f oipjson.Field, memory *budget.Account) (payload.Part, error) {
	if err := memory.Reserve(int64(len(f.JSON))); err != nil {
		return payload.Part{}, err
	}
	out := make([]byte, 0, len(f.JSON))
	_, err := f.Elements(func(message oipjson.Field) (err error) {
		opening := byte('[')
		if len(out) > 0 {
			opening = ','
		}
		out, err = appendMessage(append(out, opening), message, memory)
		return err
	})
	switch {
	case err != nil:
		return payload.Part{}, err
	case len(out) == 0:
		return payload.Part{}, invalid(f.Name, "must be a list of at least one message")
	}
	return payload.OfBlob(messagesInput, payload.JSONType, append(out, ']')), nil
}

// roles are those of messages that the gateway passes on.
var roles = []string{"system", "developer", "user", "assistant"}

// appendMessage appends a message.
func appendMessage(dst []byte, message oipjson.Field, memory *budget.Account) ([]byte, error) {
	fields, err := oipjson.DecodeFields(message.JSON)
	if err != nil {
		return dst, invalid(message.Name, "must be an object with role and content")
	}
	var role string
	var content, name []byte
	for _, f := range fields {
		field := message.Name + "." + f.Name
		isText := f.JSON[0] == '"'
		switch {
		case f.Null():
		case f.Name == "role":
			if role, _ = f.Text(); !slices.Contains(roles, role) {
				return dst, invalid(field, "must be one of %s, got %.*s", strings.Join(roles, ", "), fault.MaxQuoted, f.JSON)
			}
		case f.Name == "content" && isText:
			content = f.JSON
		case f.Name == "content":
			if content, err = joinContent(field, f, memory); err != nil {
				return dst, err
			}
		case f.Name == "name" && isText:
			name = f.JSON
		default:
			return dst, invalid(field, "is not supported; a message has role, content, which is text, and name")
		}
	}
	switch {
	case role == "":
		return dst, invalid(message.Name+".role", "is missing")
	case content == nil:
		return dst, invalid(message.Name+".content", "is missing")
	}
	dst = append(append(oipjson.AppendString(append(dst, `{"role":`...), role), `,"content":`...), content...)
	if name != nil {
		dst = append(append(dst, `,"name":`...), name...)
	}
	return append(dst, '}'), nil
}

// partCopies is how often a part of a message is in memory: as text, joined, and as JSON, whose escapes
// may take as much again.
const partCopies = 4

// joinContent returns the parts of a message, which are all text, as one string in JSON.
func joinContent(field string, content oipjson.Field, memory *budget.Account) ([]byte, error) {
	if err := memory.Reserve(partCopies * int64(len(content.JSON))); err != nil {
		return nil, err
	}
	joined := []byte{}
	isList, err := content.Elements(func(part oipjson.Field) error {
		kind, text, isText := "", "", false
		fields, err := oipjson.DecodeFields(part.JSON)
		for _, f := range fields {
			switch f.Name {
			case "type":
				kind, _ = f.Text()
			case "text":
				text, isText = f.Text()
			}
		}
		if err != nil || kind != "text" || !isText || len(fields) != 2 {
			return invalid(field, "has a part that is not text, which is not supported; a part is an object of type text with a text")
		}
		joined = append(joined, text...)
		return nil
	})
	if err == nil && !isList {
		err = invalid(field, "must be a string, or a list of parts that are text")
	}
	return oipjson.AppendString(nil, string(joined)), err
}

// stream answers with an event for each chunk. It returns an error only before the first event.
func (h *calls) stream(w http.ResponseWriter, r *http.Request, g *generation) error {
	out := transport.NewEventStream(w, h.settings.PingInterval)
	err := out.Run(r.Context(), func(ctx context.Context) error { return h.sendEvents(ctx, g, out) })
	if err == nil || !out.Begun() {
		return err
	}
	f := fault.From(err)
	// A failed send is not an error: the caller has disconnected.
	_ = sendEvent(out, errorBody(f, f.HTTPStatus()))
	return nil
}

func (h *calls) sendEvents(ctx context.Context, g *generation, out *transport.EventStream) error {
	send := func(id, text string, finish any) error {
		isFirst := g.id == ""
		if isFirst {
			g.id = id
			out.SetHeader(transport.HeaderRequestID, id)
			out.SetHeader(headerRequestID, id)
		}
		return sendEvent(out, g.document(text, isFirst, finish))
	}
	response, err := h.caller.Stream(ctx, g.request, func(c request.Chunk) error {
		if c.Activating != nil {
			return nil // the API has no event for it
		}
		text, ok, err := textOf(c.Outputs)
		if err != nil {
			return transport.WithRequestID(err, c.RequestID)
		}
		if !ok {
			return nil
		}
		return send(c.RequestID, text, nil)
	})
	if err != nil {
		return err
	}
	if g.id == "" { // there were no chunks
		text, err := g.wholeText(response)
		if err == nil {
			err = send(response.RequestID, text, nil)
		}
		if err != nil {
			return err
		}
	}
	if err := send(response.RequestID, "", cmp.Or(response.Metadata[finishKey], "stop")); err != nil {
		return err
	}
	if used := usageOf(response.Metadata, promptTokensKey, completionTokensKey); g.withUsage && used != nil {
		last := g.document("", false, nil)
		last["choices"], last["usage"] = []any{}, used
		if err := sendEvent(out, last); err != nil {
			return err
		}
	}
	return out.Send(transport.Event{Data: []byte("[DONE]")})
}

func sendEvent(out *transport.EventStream, document map[string]any) error {
	data, err := json.Marshal(document, json.Deterministic(true))
	if err != nil {
		return err
	}
	return out.Send(transport.Event{Data: data})
}

// document returns an answer, or a chunk of one. The finish is nil before the end.
func (g *generation) document(text string, isFirst bool, finish any) map[string]any {
	choice := map[string]any{"index": 0, "logprobs": nil, finishKey: finish}
	prefix, object := "chatcmpl-", "chat.completion"
	switch {
	case !g.isChat:
		prefix, object = "cmpl-", "text_completion"
		choice["text"] = text
	case g.streams:
		object = "chat.completion.chunk"
		delta := map[string]any{}
		if isFirst {
			delta["role"] = "assistant"
		}
		if finish == nil {
			delta["content"] = text
		}
		choice["delta"] = delta
	default:
		choice["message"] = map[string]any{"role": "assistant", "content": text, "refusal": nil}
	}
	out := map[string]any{"id": prefix + g.id, "object": object, "created": g.created, "model": g.model, "choices": []any{choice}}
	if g.withUsage {
		out["usage"] = nil
	}
	return out
}

// wholeText returns the text of a response.
func (g *generation) wholeText(r *request.Response) (string, error) {
	text, ok, err := textOf(r.Outputs)
	if err == nil && !ok {
		err = fault.Newf(fault.RunnerOutputInvalid, "the pipeline %s gives no output %s, nor one alone that is text", g.request.Pipeline, textOutput)
	}
	if err != nil {
		return "", transport.WithRequestID(err, r.RequestID)
	}
	return text, nil
}

// textOf returns the text of outputs: the one of that name, or the only one.
func textOf(outputs []payload.Part) (text string, ok bool, err error) {
	part, ok := outputOf(outputs, textOutput)
	if !ok || part.Tensor != nil {
		return "", false, nil
	}
	if !utf8.Valid(part.Blob.Data) {
		return "", false, fault.Newf(fault.RunnerOutputInvalid, "the output %s is not text in UTF-8", part.Name)
	}
	return string(part.Blob.Data), true, nil
}

// outputOf returns the output of that name, or the only one.
func outputOf(outputs []payload.Part, name string) (payload.Part, bool) {
	if part, ok := payload.Find(outputs, name); ok || len(outputs) != 1 {
		return part, ok
	}
	return outputs[0], true
}

// usageOf returns the numbers of tokens with these names in the metadata of a response, and their
// sum; nil if one is missing.
func usageOf(metadata map[string]string, names ...string) map[string]any {
	out, total := map[string]any{}, uint64(0)
	for _, name := range names {
		n, err := strconv.ParseUint(metadata[name], 10, 32)
		if err != nil {
			return nil
		}
		out[name] = n
		total += n
	}
	out["total_tokens"] = total
	return out
}
