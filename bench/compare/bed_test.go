package compare_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/mesh/payload"

	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func file(t *testing.T, text string) string {
	t.Helper()
	return testbed.MeshFile(t, text)
}

const echo = "mesh: m\nstages:\n  a: {runner: {echo: {}}}\n"

func TestFailedStartIsExplained(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		script, want string
	}{
		"it ends at once":    {"echo no space >&2; exit 3", "the broker and the gateway: EOF: no space"},
		"other output":       {"echo nonsense; cat", "the broker and the gateway: invalid character"},
		"too much output":    {"head -c 10000 /dev/zero | tr '\\0' x; cat", "the broker and the gateway: bufio: buffer full"},
		"its host ends":      {`case "$*" in *--stage*) echo no stage >&2; exit 3;; *) echo '{"broker": "b", "url": "u"}'; cat;; esac`, "a host of stage a: EOF: no stage"},
		"its front dislikes": {`case "$*" in *--stage*) exit 3;; *) echo '{}'; cat; echo dislike >&2; exit 4;; esac`, "a host of stage a: EOF\nthe broker and the gateway: exit status 4: dislike"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := compare.StartBed(t.Context(), compare.BedSettings{File: file(t, echo), Program: "sh", Arguments: []string{"-c", test.script, "sh"}})
			if err == nil || !strings.HasPrefix(err.Error(), test.want) {
				t.Errorf("got %v", err)
			}
		})
	}
	if _, err := compare.StartBed(t.Context(), compare.BedSettings{File: file(t, echo), Program: "there-is-no-such-program"}); err == nil || !strings.HasPrefix(err.Error(), "the broker and the gateway: exec: ") {
		t.Errorf("got %v", err)
	}
	if _, err := compare.StartBed(t.Context(), compare.BedSettings{File: file(t, "mesh: m\nnope: 1\n"), Program: "sh"}); err == nil || !strings.Contains(err.Error(), "mesh.yaml:2:1: ") {
		t.Errorf("got %v", err)
	}
}

func TestBaselineNeedsAKnownPipeline(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"nope":       "pipelines.nope: there is none",
		"stage:nope": "stages.nope: there is none, so the baseline has no number of hosts",
	} {
		for _, program := range []string{"", "sh"} {
			_, err := compare.StartBed(t.Context(), compare.BedSettings{File: file(t, echo), Program: program, Baseline: name})
			if err == nil || !strings.HasSuffix(err.Error(), want) {
				t.Errorf("got %v", err)
			}
		}
	}
}

func TestStartEndsWithContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	// The process prints nothing, and ends with its input.
	_, err := compare.StartBed(ctx, compare.BedSettings{File: file(t, echo), Program: "sh", Arguments: []string{"-c", "cat >/dev/null", "sh"}})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestMeshRunsUntilStopped(t *testing.T) {
	t.Parallel()
	script := `case "$*" in *--stage*) echo '{}';; *) echo '{"broker": "b", "url": "http://there"}';; esac; cat`
	b, err := compare.StartBed(t.Context(), compare.BedSettings{File: file(t, echo), Program: "sh", Arguments: []string{"-c", script, "sh"}})
	if err != nil || b.URL() != "http://there" {
		t.Fatalf("got %v", err)
	}
	if err := b.Stop(); err != nil {
		t.Error(err)
	}
}

func TestHandlerReturnsItsInput(t *testing.T) {
	t.Parallel()
	b, err := compare.StartBed(t.Context(), compare.BedSettings{File: file(t, echo), Handler: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := b.Stop(); err != nil {
			t.Error(err)
		}
	}()
	for _, protocol := range []load.Protocol{load.GRPC, load.Connect, load.HTTP} {
		client, err := load.NewClient(load.ClientSettings{
			Address: b.BaselineURL(), Protocol: protocol, Pipeline: "stage:a", Inputs: [][]payload.Part{{payload.OfBlob("", "text/plain", []byte("x"))}},
		})
		if err != nil {
			t.Fatal(err)
		}
		var answer load.Answer
		if err := client.Do(t.Context(), &answer); err != nil {
			t.Errorf("%s: %v", protocol, err)
		}
		client.Close()
	}
}
