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

// Words returns the chunks of an answer that is text, a word in each, in the
// output "text".
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

// Told is a Caller whose Stream does what a test tells it, step by step. It is
// safe for concurrent use.
type Told struct {
	Caller

	// Emit gets the chunks; closed, the answer follows.
	Emit chan call.Chunk
	// Ended gets why a stream ended before its answer.
	Ended chan error
}

// NewTold returns one that waits for its first chunk.
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

// Event is a server-sent event as its reader has it.
type Event struct {
	// ID is the last that was said, so far.
	ID   uint64
	Name string
	Data string
	// Pings is how many comments came before it.
	Pings int
}

// Events reads server-sent events.
type Events struct {
	lines *bufio.Scanner
	id    uint64
}

// ReadEvents returns a reader of the events of an answer's body.
func ReadEvents(from io.Reader) *Events {
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 64<<20)
	return &Events{lines: lines}
}

// errTorn says that an answer ends within an event.
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

// All returns the events up to the end of the answer.
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
