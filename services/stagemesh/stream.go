package stagemesh

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

// runStream sends one file, and prints its answer as it comes.
func runStream(ctx context.Context, flags inferFlags, name string, files []string, in io.Reader, out io.Writer) error {
	if len(files) > 1 {
		return fmt.Errorf("--stream: is for one request: give one FILE, not %d", len(files))
	}
	s, err := flags.sender(name, in)
	if err != nil {
		return err
	}
	to := &teller{out: out, style: flags.style}
	return flags.address.with(func(client inferencev1connect.InferenceServiceClient) error {
		s.client = client
		return s.stream(ctx, files[0], to)
	})
}

// stream has the file's answer told.
func (s sender) stream(ctx context.Context, file string, to *teller) error {
	request, err := s.request(file)
	if err != nil {
		return err
	}
	answer, err := s.client.InferStream(ctx, connect.NewRequest(request))
	if err != nil {
		return to.fail(err)
	}
	defer answer.Close() //nolint:errcheck // what was to come has come
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

// teller prints a streamed answer.
type teller struct {
	out   io.Writer
	style style
	// chunks says that some were printed, and open that the last line has no end.
	chunks, open bool
}

// message prints one. The whole answer says nothing that its chunks have not.
func (t *teller) message(m *inferencev1.InferStreamResponse) error {
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
func (t *teller) parts(parts []*inferencev1.Part) error {
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

func (t *teller) text(text []byte) error {
	if len(text) == 0 {
		return nil
	}
	t.open = !bytes.HasSuffix(text, []byte{'\n'})
	_, err := t.out.Write(text)
	return err
}

func (t *teller) line(text string) error {
	if err := t.endLine(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(t.out, text)
	return err
}

func (t *teller) endLine() error {
	if !t.open {
		return nil
	}
	t.open = false
	_, err := fmt.Fprintln(t.out)
	return err
}

// fail returns why there is no answer, or no more of it, which is also told where
// lines of JSON are.
func (t *teller) fail(err error) error {
	if !t.style.json || hopeless(err) {
		_ = t.endLine() // the failure is what counts
		return told{err}
	}
	if err := newPrinter(t.out, t.style, "").failure("", err); err != nil {
		return err
	}
	return fmt.Errorf("%w: 1 of 1", ErrFailed)
}
