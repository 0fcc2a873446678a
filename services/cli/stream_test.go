package cli_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// spelling starts a mesh whose stage spells a text, letter by letter, and then fails
// where the text does not end in a full stop. It waits before the last letter, if
// there is a gate.
func spelling(t *testing.T, gate <-chan struct{}) (address string) {
	t.Helper()
	m, err := stagemesh.New(stagemesh.Settings{Gateway: gateway.Settings{Config: gateway.Config{Listen: "127.0.0.1:0"}}})
	if err != nil {
		t.Fatal(err)
	}
	spell := inproc.New(inproc.Settings{}, func(ctx context.Context, b runner.Batch, sink runner.Sink) error {
		text := b.Items[0].Inputs[0].Blob.Data
		for at := range text {
			if gate != nil && at == len(text)-1 {
				select {
				case <-gate:
				case <-ctx.Done():
				}
			}
			if err := sink.Chunk(0, []payload.Part{payload.OfBlob("letter", "text/plain", text[at:at+1])}); err != nil {
				return err
			}
		}
		if !strings.HasSuffix(string(text), ".") {
			return sink.SetOutcome(0, runner.Failed(fault.New(fault.RunnerFailed, "there is no full stop")))
		}
		return sink.SetOutcome(0, runner.Output(payload.OfBlob("text", "text/plain", text)))
	})
	if err := m.AddStage(stagemesh.Stage{Name: "spell", Runner: spell}); err != nil {
		t.Fatal(err)
	}
	return meshtest.Start(t, m).URL()
}

// file is one with that text.
func file(t *testing.T, text string) string {
	t.Helper()
	return testbed.WriteFile(t, "text.txt", text)
}

func TestStreamIsPrintedAsItArrives(t *testing.T) {
	t.Parallel()
	gate := make(chan struct{})
	address, path := spelling(t, gate), file(t, "abc.")
	var out testbed.Log
	done := make(chan error, 1)
	go func() {
		done <- command(t.Context(), strings.NewReader(""), &out, t.Output(), "infer", "stage:spell", path, "--stream", "-a", address)
	}()
	testbed.Eventually(t, "the letters before the gate", func() bool { return out.Has("abc") })
	if out.Has(".") {
		t.Errorf("printed %q", out.String())
	}
	close(gate)
	if err := testbed.Receive(t, "the end of the command", done); err != nil || out.String() != "abc.\n" {
		t.Errorf("printed %q, %v", out.String(), err)
	}
}

func TestStreamIsPrintedAsJSONLines(t *testing.T) {
	t.Parallel()
	out, err := run(t, "infer", "stage:spell", file(t, "a."), "--stream", "--json", "-a", spelling(t, nil))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 3 {
		t.Fatalf("printed %s", out)
	}
	for i, line := range lines {
		var m inferencev1.InferStreamResponse
		if err := protojson.Unmarshal([]byte(line), &m); err != nil || m.GetSeq() != uint64(i+1) || (m.GetFinal() != nil) != (i == 2) || m.GetRequestId() == "" {
			t.Errorf("line %d is %s, %v", i+1, line, err)
		}
	}
}

func TestAnswerWithoutChunksIsPrinted(t *testing.T) {
	t.Parallel()
	out, err := run(t, "infer", "digits", image("07-9.png"), "--stream", "--timeline", "-a", mesh(t))
	if err != nil {
		t.Fatal(err)
	}
	match(t, out, `labels=\[9 \d \d\]`, `scores=\[.*\]`, `decode: queue .*`, `classify: .*`, `label: .*`)
}

func TestFailedStreamIsExplained(t *testing.T) {
	t.Parallel()
	address := spelling(t, nil)
	out, err := run(t, "infer", "stage:spell", file(t, "ab"), "--stream", "-a", address)
	if err == nil || err.Error() != "RUNNER_FAILED at stage spell: there is no full stop" || out != "ab\n" {
		t.Errorf("printed %q, %v", out, err)
	}
	out, err = run(t, "infer", "stage:spell", file(t, "ab"), "--stream", "--json", "-a", address)
	if lines := strings.Split(strings.TrimSpace(out), "\n"); !errors.Is(err, cli.ErrFailed) || len(lines) != 3 || !strings.Contains(lines[2], `"error":"RUNNER_FAILED at stage spell`) {
		t.Errorf("printed %s, %v", out, err)
	}
	if _, err := run(t, "infer", "nope", file(t, "ab"), "--stream", "-a", address); err == nil || !strings.HasPrefix(err.Error(), "UNKNOWN_PIPELINE: ") {
		t.Errorf("got %v", err)
	}
	if _, err := run(t, "infer", "nope", file(t, "ab"), "--stream", "-a", "127.0.0.1:1"); err == nil || !strings.HasPrefix(err.Error(), "cannot connect to http://127.0.0.1:1: ") {
		t.Errorf("got %v", err)
	}
	if _, err := run(t, "infer", "nope", file(t, "ab"), file(t, "cd"), "--stream", "-a", address); err == nil || err.Error() != "--stream: needs exactly one FILE, not 2" {
		t.Errorf("got %v", err)
	}
}
