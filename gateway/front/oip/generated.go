package oip

import (
	"context"
	"encoding/json"
	"net/http"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/gateway/front/eventstream"
	"github.com/stagemesh/stagemesh/gateway/front/header"
	"github.com/stagemesh/stagemesh/gateway/front/oipjson"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// generate answers one request with one object, which has the whole answer.
func (h *rest) generate(w http.ResponseWriter, r *http.Request, name string) error {
	room := body.NewRoom(r.Context(), h.maxPayload)
	defer room.Close()
	g, err := h.generation(w, r, name, room)
	if err != nil {
		return err
	}
	response, err := h.caller.Infer(r.Context(), g.request)
	if err != nil {
		return err
	}
	text, err := g.object(response.Outputs)
	if err != nil {
		return fault.From(err).WithMetadata(header.RequestIDKey, response.RequestID)
	}
	write(w, response, append(text, '\n'), nil)
	return nil
}

// generateStream answers one request with an event for each chunk, or one for the
// answer where it has none. An error is for before the first.
func (h *rest) generateStream(w http.ResponseWriter, r *http.Request, name string) error {
	room := body.NewRoom(r.Context(), h.maxPayload)
	defer room.Close()
	g, err := h.generation(w, r, name, room)
	if err != nil {
		return err
	}
	out := eventstream.New(w, h.silence)
	err = out.Run(r.Context(), func(ctx context.Context) error { return h.generating(ctx, g, out) })
	if err == nil || !out.Begun() {
		return err
	}
	// Of text there is nothing to refuse, and a caller that no longer listens is not
	// told.
	data, _ := json.Marshal(failed(fault.From(err)))
	_ = out.Send(eventstream.Event{Data: data})
	return nil
}

func (h *rest) generating(ctx context.Context, g *generation, out *eventstream.Stream) error {
	send := func(requestID string, outputs []payload.Part) error {
		data, err := g.object(outputs)
		if err != nil {
			return fault.From(err).WithMetadata(header.RequestIDKey, requestID)
		}
		out.Say(header.RequestID, requestID)
		return out.Send(eventstream.Event{Data: data})
	}
	chunks := false
	response, err := h.caller.Stream(ctx, g.request, func(c call.Chunk) error {
		chunks = true
		return send(c.RequestID, c.Outputs)
	})
	if err != nil || chunks {
		return err
	}
	return send(response.RequestID, response.Outputs)
}

func (h *rest) generation(w http.ResponseWriter, r *http.Request, name string, room *body.Room) (*generation, error) {
	model, err := h.models.Model(name)
	if err != nil {
		return nil, err
	}
	data, err := h.read(w, r)
	if err != nil {
		return nil, err
	}
	out, err := generationOf(r.Context(), name, data, model, room)
	if err != nil {
		return nil, err
	}
	out.request.Trace = header.Trace(r.Header)
	return out, nil
}

// object returns an answer, or a part of one: what it is of, and its outputs by their
// names, which come first where they are the same.
func (g *generation) object(outputs []payload.Part) (dst []byte, err error) {
	dst = make([]byte, 0, 256+2*payload.Size(outputs))
	for _, head := range [][2]string{{"model_name", g.request.Pipeline}, {"model_version", onlyVersion}, {idKey, g.id}} {
		if _, output := payload.Find(outputs, head[0]); !output && head[1] != "" {
			dst = oipjson.AppendString(appendKey(dst, head[0]), head[1])
		}
	}
	for _, part := range outputs {
		name := part.Name
		if _, taken := payload.Find(outputs, unnamedKey); name == "" && !taken {
			name = unnamedKey
		}
		if dst, err = appendValue(appendKey(dst, name), part); err != nil {
			return nil, err
		}
	}
	return append(dst, '}'), nil
}

// appendKey opens the object, or goes on with it.
func appendKey(dst []byte, key string) []byte {
	opening := byte(',')
	if len(dst) == 0 {
		opening = '{'
	}
	return append(oipjson.AppendString(append(dst, opening), key), ':')
}

// appendValue appends an output: a tensor's elements, JSON as it is, and what else is
// text as a string.
func appendValue(dst []byte, p payload.Part) ([]byte, error) {
	if p.Tensor != nil {
		return oipjson.AppendValue(dst, p)
	}
	data := p.Blob.Data
	switch {
	case payload.IsJSON(p.Blob.ContentType) && utf8.Valid(data) && json.Valid(data):
		return append(dst, data...), nil
	case utf8.Valid(data):
		return oipjson.AppendString(dst, string(data)), nil
	}
	return nil, fault.Newf(fault.NotSupported, "outputs.%s: %d bytes that are no text cannot be said here; use infer", p.Name, len(data))
}
