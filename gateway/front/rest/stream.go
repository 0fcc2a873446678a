package rest

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/oipjson"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// The names of the events.
const (
	chunkEvent = "chunk"
	doneEvent  = "done"
	errorEvent = "error"
)

// stream answers one request with events, as its chunks come.
func (h *handler) stream(w http.ResponseWriter, r *http.Request, pipeline string) {
	start := time.Now()
	out := &stream{EventStream: transport.NewEventStream(transport.StallWriter(w, h.settings.StallTimeout), h.settings.PingInterval)}
	err := h.streamed(out, w, r, pipeline)
	switch {
	case err == nil:
	case out.Begun():
		// A caller that no longer listens is not told.
		_ = out.Send(transport.Event{Name: errorEvent, Data: transport.FaultJSON(transport.WithRequestID(err, out.id))})
	default:
		h.fail(w, err, start)
	}
}

// streamed reads the request and sends its answer, or says why there is none.
func (h *handler) streamed(out *stream, w http.ResponseWriter, r *http.Request, pipeline string) error {
	if last := strings.TrimSpace(r.Header.Get(lastEventID)); last != "" {
		return invalid(lastEventID, fmt.Errorf("%.*q: a stream is not taken up where it broke; send the request without it, which makes it anew", shown, last))
	}
	memory := transport.NewReservation(r.Context(), h.settings.MaxPayload)
	defer memory.Release()
	request, wished, err := h.asked(w, r, pipeline, memory)
	if err != nil {
		return err
	}
	return out.Run(r.Context(), func(ctx context.Context) error {
		response, err := h.caller.Stream(ctx, request, out.chunk)
		if err != nil {
			return err
		}
		return out.done(response, wished)
	})
}

// lastEventID is what a reader sends that goes on where an earlier answer broke.
const lastEventID = "Last-Event-ID"

// stream is a streamed answer on its way out.
type stream struct {
	*transport.EventStream

	// Of the event that was sent last.
	id  string
	seq uint64
}

// chunk sends a chunk. One that JSON cannot say ends the call.
func (s *stream) chunk(c call.Chunk) error {
	dst := make([]byte, 0, 256+2*payload.Size(c.Outputs))
	dst = oipjson.AppendString(append(dst, `{"request_id":`...), c.RequestID)
	dst = strconv.AppendUint(append(dst, `,"seq":`...), c.Seq, 10)
	dst, err := appendOutputs(append(dst, `,"outputs":[`...), c.Outputs)
	if err != nil {
		return err
	}
	s.SetHeader(transport.HeaderRequestID, c.RequestID)
	s.id, s.seq = c.RequestID, c.Seq
	return s.Send(transport.Event{ID: c.Seq, Name: chunkEvent, Data: append(dst, "]}"...)})
}

// done sends the answer as a whole, as it would have come by itself.
func (s *stream) done(r *call.Response, wished wish) error {
	document, err := wished.document(r)
	if err != nil {
		return transport.WithRequestID(err, r.RequestID)
	}
	s.SetHeader(transport.HeaderRequestID, r.RequestID)
	return s.Send(transport.Event{ID: s.seq + 1, Name: doneEvent, Data: bytes.TrimSpace(document)})
}
