package fronttest

import (
	"bufio"
	"context"
	"errors"
	"io"
	"strconv"
	"strings"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// Words returns the chunks of a text, with a word in each, in the output "text".
func Words(words ...string) []call.Chunk {
	out := make([]call.Chunk, len(words))
	for i, word := range words {
		out[i] = call.Chunk{
			RequestID: RequestID, Seq: uint64(i + 1), Attempt: 1,
			Outputs: []payload.Part{payload.OfBlob("text", "text/plain", []byte(word))},
		}
	}
	return out
}

// Told is a Caller whose Stream follows a test step by step. It is safe for concurrent
// use.
type Told struct {
	Caller

	// Emit receives the chunks to emit. Stream answers when Emit closes.
	Emit chan call.Chunk
	// Ended receives the cause if a stream ends before its answer.
	Ended chan error
}

// NewTold returns a Told that waits for its first chunk.
func NewTold() *Told {
	return &Told{Emit: make(chan call.Chunk), Ended: make(chan error, 1)}
}

// Stream implements the fronts' Caller.
func (c *Told) Stream(ctx context.Context, r *call.Request, emit func(call.Chunk) error) (*call.Response, error) {
	for {
		select {
		case chunk, more := <-c.Emit:
			if !more {
				return c.Infer(ctx, r)
			}
			if err := emit(chunk); err != nil {
				c.Ended <- err
				return nil, err
			}
		case <-ctx.Done():
			c.Ended <- ctx.Err()
			return nil, ctx.Err()
		}
	}
}

// Event is a server-sent event as its reader receives it.
type Event struct {
	// ID is the last id so far.
	ID   uint64
	Name string
	Data string
	// Pings is how many comments came before the event.
	Pings int
}

// Events reads server-sent events.
type Events struct {
	lines *bufio.Scanner
	id    uint64
}

// ReadEvents returns a reader of the events of a response body.
func ReadEvents(from io.Reader) *Events {
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 64<<20)
	return &Events{lines: lines}
}

// errTorn means that a body ends within an event.
var errTorn = errors.New("the answer ends within an event")

// Next returns the next event, or io.EOF after the last.
func (r *Events) Next() (Event, error) {
	var out Event
	open := false
	for r.lines.Scan() {
		line := r.lines.Text()
		field, value, _ := strings.Cut(line, ": ")
		switch {
		case line == "" && open:
			out.ID = r.id
			return out, nil
		case strings.HasPrefix(line, ":"):
			out.Pings++
		case field == "id":
			id, err := strconv.ParseUint(value, 10, 64)
			if err != nil {
				return out, err
			}
			r.id, open = id, true
		case field == "event":
			out.Name, open = value, true
		case field == "data" && out.Data == "":
			out.Data, open = value, true
		case line != "":
			return out, errors.New("no field of an event: " + line)
		}
	}
	if err := r.lines.Err(); err != nil {
		return out, err
	}
	if open {
		return out, errTorn
	}
	return out, io.EOF
}

// All returns the events up to the end of the body.
func (r *Events) All() ([]Event, error) {
	var out []Event
	for {
		e, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		out = append(out, e)
	}
}
