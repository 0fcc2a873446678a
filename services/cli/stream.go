package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
)

// runStream sends one file and prints its answer as it arrives.
func runStream(ctx context.Context, flags inferFlags, name string, files []string, in io.Reader, out io.Writer) error {
	if len(files) > 1 {
		return fmt.Errorf("--stream: needs exactly one FILE, not %d", len(files))
	}
	s, err := flags.sender(name, in)
	if err != nil {
		return err
	}
	to := &streamPrinter{out: out, style: flags.style}
	return flags.address.with(func(client inferencev1connect.InferenceServiceClient) error {
		s.client = client
		return s.stream(ctx, files[0], to)
	})
}

// stream sends the file and prints each message of the answer.
func (s sender) stream(ctx context.Context, file string, to *streamPrinter) error {
	request, err := s.request(file)
	if err != nil {
		return err
	}
	answer, err := s.client.InferStream(ctx, connect.NewRequest(request))
	if err != nil {
		return to.fail(err)
	}
	defer answer.Close() //nolint:errcheck // the answer has ended
	for answer.Receive() {
		if err := to.message(answer.Msg()); err != nil {
			return err
		}
	}
	if err := answer.Err(); err != nil {
		return to.fail(err)
	}
	return nil
}

// streamPrinter prints a streamed answer.
type streamPrinter struct {
	out   io.Writer
	style style
	// chunks is true once a chunk was printed, open while the last line has no newline.
	chunks, open bool
}

// message prints one message. The final answer repeats its chunks, so it is printed only
// when there were none.
func (t *streamPrinter) message(m *inferencev1.InferStreamResponse) error {
	if t.style.json {
		line, err := protojson.Marshal(m)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(t.out, "%s\n", line)
		return err
	}
	if chunk := m.GetChunk(); chunk != nil {
		t.chunks = true
		return t.parts(chunk.GetOutputs())
	}
	if !t.chunks {
		if err := t.parts(m.GetFinal().GetOutputs()); err != nil {
			return err
		}
	}
	if err := t.endLine(); err != nil || !t.style.timeline {
		return err
	}
	for _, step := range m.GetFinal().GetTimeline().GetSteps() {
		if err := t.line(RenderStep(step)); err != nil {
			return err
		}
	}
	return nil
}

// parts prints text as it is, and all else on a line of its own.
func (t *streamPrinter) parts(parts []*inferencev1.Part) error {
	for _, part := range parts {
		var err error
		if text, is := textOf(part); is {
			err = t.text(text)
		} else {
			err = t.line(Render(part))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func textOf(part *inferencev1.Part) ([]byte, bool) {
	blob := part.GetBlob()
	return blob.GetData(), part.GetTensor() == nil && strings.HasPrefix(blob.GetContentType(), "text/")
}

func (t *streamPrinter) text(text []byte) error {
	if len(text) == 0 {
		return nil
	}
	t.open = !bytes.HasSuffix(text, []byte{'\n'})
	_, err := t.out.Write(text)
	return err
}

func (t *streamPrinter) line(text string) error {
	if err := t.endLine(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(t.out, text)
	return err
}

func (t *streamPrinter) endLine() error {
	if !t.open {
		return nil
	}
	t.open = false
	_, err := fmt.Fprintln(t.out)
	return err
}

// fail returns the error that ended the answer. With --json it is also printed as a line.
func (t *streamPrinter) fail(err error) error {
	if !t.style.json || hopeless(err) {
		_ = t.endLine() // the failure matters more
		return rpcError{err}
	}
	if err := newPrinter(t.out, t.style, "").failure("", err); err != nil {
		return err
	}
	return fmt.Errorf("%w: 1 of 1", ErrFailed)
}
