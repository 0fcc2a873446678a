package cli_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/test/meshtest"

	"github.com/stagemesh/stagemesh/services/cli"
)

// match holds each line against a pattern.
func match(t *testing.T, text string, patterns ...string) {
	t.Helper()
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if len(lines) != len(patterns) {
		t.Fatalf("got %d lines, want %d:\n%s", len(lines), len(patterns), text)
	}
	for i, pattern := range patterns {
		if !regexp.MustCompile("^" + pattern + "$").MatchString(lines[i]) {
			t.Errorf("line %d is %q, want %s", i+1, lines[i], pattern)
		}
	}
}

const header = `FILE +TIME +ANSWER`

func TestInferPrintsATableOfAnswers(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	// Plain HTTP is what an address without a scheme means.
	for _, address := range []string{address, strings.TrimPrefix(address, "http://")} {
		out, err := run(t, "infer", "digits", image("00-1.png"), image("07-9.png"), "--address", address)
		if err != nil {
			t.Fatal(err)
		}
		match(t, out, header,
			`00-1\.png +[0-9.]+ ms +labels=\[1 \d \d\]  scores=\[[0-9.]+ [0-9e.-]+ [0-9e.-]+\]`,
			`07-9\.png +[0-9.]+ ms +labels=\[9 \d \d\]  scores=\[[0-9.]+ [0-9e.-]+ [0-9e.-]+\]`)
	}
}

func TestInferPrintsWhereTheTimeWent(t *testing.T) {
	t.Parallel()
	out, err := run(t, "infer", "digits", image("00-1.png"), "--timeline", "-a", mesh(t))
	if err != nil {
		t.Fatal(err)
	}
	step := ` +: queue [0-9.]+ ms, batch [0-9.]+ ms, run [0-9.]+ ms \(batch of 1, [a-z]+\)`
	match(t, out, header, `00-1\.png .*`,
		strings.Replace(step, ":", "decode:", 1), strings.Replace(step, ":", "classify:", 1), strings.Replace(step, ":", "label:", 1))
}

func TestInferPrintsBlocksAsATree(t *testing.T) {
	t.Parallel()
	file := meshtest.Parse(t, `
mesh: bed
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages: {echo: {runner: {echo: {}}}}
pipelines:
  p:
    steps:
      - name: which
        switch:
          - {when: {part: input, equals: no}, steps: [{name: never, stage: echo}]}
          - else:
              - {name: both, parallel: {branches: {a: {steps: [{name: one, stage: echo}]}}}}
`)
	url := meshtest.Start(t, meshtest.FromFile(t, file, stagemesh.FileSettings{})).URL()
	out, err := run(t, "infer", "p", testbed.WriteFile(t, "input.txt", "yes"), "--timeline", "-a", url)
	if err != nil {
		t.Fatal(err)
	}
	step := `queue [0-9.]+ ms, batch [0-9.]+ ms, run [0-9.]+ ms \(batch of 1, [a-z]+\)`
	match(t, out, header, `input\.txt .*`, ` *which: switch, done after .*`, ` *1: skipped: input is absent`, ` *else: done after .*`,
		` *both: parallel, done after .*`, ` *a: done after .*`, ` *one: `+step)
}

func TestInferPrintsJSON(t *testing.T) {
	t.Parallel()
	noImage := testbed.WriteFile(t, "x.png", "no image")
	out, err := run(t, "infer", "digits", image("00-1.png"), noImage, image("07-9.png"), "--json", "-a", mesh(t))
	if !errors.Is(err, cli.ErrFailed) {
		t.Errorf("got %v", err)
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 3 {
		t.Fatalf("got %d lines:\n%s", len(lines), out)
	}
	for i, label := range map[int]string{0: "1", 2: "9"} {
		var response inferencev1.InferResponse
		if err := protojson.Unmarshal([]byte(lines[i]), &response); err != nil {
			t.Fatal(err)
		}
		if got := cli.Render(response.GetOutputs()[0]); !strings.HasPrefix(got, "labels=["+label+" ") || response.GetRequestId() == "" {
			t.Errorf("line %d: got %s", i, lines[i])
		}
	}
	var failure struct{ Error string }
	if err := json.Unmarshal([]byte(lines[1]), &failure); err != nil || !strings.HasPrefix(failure.Error, "INVALID_INPUT at stage decode: ") {
		t.Errorf("got %s, %v", lines[1], err)
	}
}

func TestInferReadsStandardInput(t *testing.T) {
	t.Parallel()
	data := testbed.ReadFile(t, image("07-9.png"))
	var out testbed.Log
	if err := command(t.Context(), bytes.NewReader(data), &out, t.Output(), "infer", "digits", "-", "-a", mesh(t)); err != nil {
		t.Fatal(err)
	}
	match(t, out.String(), header, `- +[0-9.]+ ms +labels=\[9 .*`)
}

func TestInferContinuesAfterAFailure(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	noImage := filepath.Join(folder, "text.png")
	if err := os.WriteFile(noImage, []byte("no image"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := run(t, "infer", "digits", noImage, image("00-1.png"), filepath.Join(folder, "nowhere.png"), image("07-9.png"), "-a", mesh(t))
	if !errors.Is(err, cli.ErrFailed) || err.Error() != "some requests failed: 2 of 4" {
		t.Errorf("got %v", err)
	}
	match(t, out, header,
		`text\.png +- +INVALID_INPUT at stage decode: input image: expected a PNG or JPEG.*`,
		`00-1\.png +[0-9.]+ ms +labels=\[1 .*`,
		`nowhere\.png +- +open .*nowhere\.png: no such file or directory`,
		`07-9\.png +[0-9.]+ ms +labels=\[9 .*`)
}

func TestInferExplainsFailures(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"an unknown pipeline":       {[]string{"nope", image("00-1.png"), "-a", address}, `00-1\.png +- +UNKNOWN_PIPELINE: .*"nope".*digits.*`},
		"a stage that is not there": {[]string{"stage:nope", image("00-1.png"), "-a", address}, `00-1\.png +- +NO_CAPACITY at stage nope: .*`},
		"no time":                   {[]string{"digits", image("00-1.png"), "--timeout", "1ns", "-a", address}, `00-1\.png +- +DEADLINE_EXCEEDED.*: .*`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, err := run(t, append([]string{"infer"}, test.args...)...)
			if !errors.Is(err, cli.ErrFailed) {
				t.Errorf("got %v", err)
			}
			match(t, out, header, test.want)
		})
	}
}

func TestInferStopsWithoutAGateway(t *testing.T) {
	t.Parallel()
	out, err := run(t, "infer", "digits", image("00-1.png"), image("07-9.png"), "-a", "127.0.0.1:1")
	if err == nil || !strings.HasPrefix(err.Error(), "cannot connect to http://127.0.0.1:1: ") || strings.Contains(err.Error(), "\n") || out != "" {
		t.Errorf("got %q, %v", out, err)
	}
}

func TestInferRejectsInvalidAddresses(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"ftp://localhost", "http://", "", "http://a b"} {
		_, err := run(t, "infer", "digits", image("00-1.png"), "-a", address)
		if err == nil || !strings.HasPrefix(err.Error(), "--address: ") {
			t.Errorf("%q: got %v", address, err)
		}
	}
	if _, err := run(t, "infer", "digits"); err == nil || err.Error() != "give a PIPELINE and at least one FILE; see stagemesh infer --help" {
		t.Errorf("got %v", err)
	}
}

// Each line is answered by a line, and fails alone.
func TestInferAnswersLines(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	const scores = `{"scores": [0, 0.1, 0, 0, 0.7, 0, 0, 0, 0, 0.2]}`
	file := testbed.WriteFile(t, "requests.ndjson", scores+"\n{\"scores\": \"none\"}\n"+scores)
	for _, args := range [][]string{nil, {"--unordered", "--in-flight", "2", "--timeout", "20s"}} {
		out, err := run(t, append([]string{"infer", "stage:label", file, "--ndjson", "-a", address}, args...)...)
		if !errors.Is(err, cli.ErrFailed) || err.Error() != "some requests failed: 1 of 3" {
			t.Errorf("got %v", err)
		}
		lines := strings.Split(strings.TrimSpace(out), "\n")
		if args != nil {
			slices.Sort(lines)
		}
		match(t, strings.Join(lines, "\n"), `\{"line":1,"request_id":.*"data":\["4","9","1"\].*`, `\{"line":2,"error":\{.*"INVALID_INPUT".*`, `\{"line":3,"request_id":.*"data":\["4","9","1"\].*`)
	}
	for want, args := range map[string][]string{
		"--ndjson: needs exactly one FILE, not 2": {file, file},
		"--ndjson: cannot be used with --stream":  {file, "--stream"},
		"INVALID_REQUEST: in_flight: \"65\"":      {file, "--in-flight", "65"},
		"open nowhere":                            {"nowhere"},
	} {
		if _, err := run(t, append([]string{"infer", "stage:label", "--ndjson", "-a", address}, args...)...); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v: got %v", args, err)
		}
	}
}
