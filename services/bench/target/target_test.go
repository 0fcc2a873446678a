package target_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/bench/load"
	"github.com/stagemesh/stagemesh/services/bench/target"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/runners"
)

// A broker that ends while a queue is being made forgets the clock that all brokers of
// a process share.
func TestMain(m *testing.M) {
	bustest.Main(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

const file = `mesh: bench
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages:
  echo: {runner: {echo: {}}}
  again: {runner: {echo: {}}}
  slow: {runner: {sleep: {base: 10s}}}
  words: {runner: {stream: {chunks: 3, every: 5ms}}}
pipelines:
  twice: {steps: [{name: one, stage: echo}, {name: two, stage: again}]}
`

// mesh starts one and returns its address.
func mesh(t *testing.T) string {
	t.Helper()
	f, err := meshfile.Parse("mesh.yaml", []byte(file), ".", runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	m, err := stagemesh.FromFile(f, stagemesh.FileSettings{})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Stop(); err != nil {
			t.Error(err)
		}
	})
	return m.URL()
}

// inputs are of some bytes.
func inputs(t *testing.T) [][]*inferencev1.Part {
	t.Helper()
	return [][]*inferencev1.Part{{target.RandomBlob(1024)}, {target.BlobOf("text/plain", []byte("x"))}}
}

func open(t *testing.T, s target.Settings) *target.Target {
	t.Helper()
	out, err := target.New(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(out.Close)
	return out
}

var protocols = []target.Protocol{target.GRPC, target.Connect, target.HTTP, target.OIP}

func TestEveryProtocolTellsWhereTheTimeWent(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	tensor, err := target.RandomTensor("x=FP32[2,3]")
	if err != nil {
		t.Fatal(err)
	}
	for _, protocol := range protocols {
		t.Run(string(protocol), func(t *testing.T) {
			t.Parallel()
			to := open(t, target.Settings{
				Protocol: protocol, Address: address, Pipeline: "twice", Inputs: append(inputs(t), []*inferencev1.Part{tensor}),
				Timeout: 20 * time.Second, Token: "nobody asks for it",
			})
			for i := range 3 {
				var answer load.Answer
				if err := to.Do(t.Context(), &answer); err != nil {
					t.Fatalf("request %d: %v", i, err)
				}
				if len(answer.Steps) != 2 || answer.Steps[0].Name != "one" || answer.Steps[1].Name != "two" {
					t.Fatalf("got %+v", answer)
				}
				parts := time.Duration(0)
				for _, step := range answer.Steps {
					parts += step.Queue + step.Batch + step.Run
					if step.BatchSize < 1 || step.BatchSize > 4 || step.Dispatch == "" {
						t.Errorf("got %+v", step)
					}
				}
				if parts <= 0 || answer.Total < parts {
					t.Errorf("the parts take %s of %s", parts, answer.Total)
				}
			}
		})
	}
}

func TestEveryProtocolNamesItsFailures(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	closed := httptest.NewServer(http.NotFoundHandler())
	closed.Close()
	for _, protocol := range protocols {
		for name, test := range map[string]struct {
			settings           target.Settings
			want               string
			refused, retryable bool
		}{
			"an unknown pipeline": {target.Settings{Address: address, Pipeline: "nope"}, "UNKNOWN_PIPELINE", false, false},
			"no host":             {target.Settings{Address: address, Pipeline: "stage:nope"}, "NO_CAPACITY", true, true},
			"no time":             {target.Settings{Address: address, Pipeline: "stage:slow", Timeout: 50 * time.Millisecond}, "DEADLINE_EXCEEDED", false, true},
			"nobody":              {target.Settings{Address: closed.URL, Pipeline: "twice"}, target.Unreachable, false, false},
		} {
			t.Run(string(protocol)+"/"+name, func(t *testing.T) {
				t.Parallel()
				s := test.settings
				s.Protocol, s.Inputs = protocol, inputs(t)
				err := open(t, s).Do(t.Context(), &load.Answer{})
				failed, ok := errors.AsType[*load.Failure](err)
				if !ok || failed.Reason != test.want || failed.Refused != test.refused || failed.Retryable != test.retryable || failed.Error() == "" {
					t.Errorf("got %#v", err)
				}
			})
		}
	}
}

func TestChunksAreTimedAsTheyCome(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	for _, protocol := range []target.Protocol{target.GRPC, target.Connect} {
		t.Run(string(protocol), func(t *testing.T) {
			t.Parallel()
			to := open(t, target.Settings{Protocol: protocol, Address: address, Pipeline: "stage:words", Inputs: inputs(t)[1:], Streams: true})
			var answer load.Answer
			if err := to.Do(t.Context(), &answer); err != nil {
				t.Fatal(err)
			}
			if len(answer.Chunks) != 3 || !slices.IsSorted(answer.Chunks) || answer.Chunks[2] < 10*time.Millisecond || len(answer.Steps) != 1 {
				t.Errorf("got %+v", answer)
			}
		})
	}
}

func TestOptionsReachTheMesh(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	for _, protocol := range protocols[:3] {
		t.Run(string(protocol), func(t *testing.T) {
			t.Parallel()
			to := open(t, target.Settings{Protocol: protocol, Address: address, Pipeline: "twice", Inputs: inputs(t), Durability: pipeline.File, Priority: -3})
			if err := to.Do(t.Context(), &load.Answer{}); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestFormsCarrySeveralInputs(t *testing.T) {
	t.Parallel()
	var got []string
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if err := r.ParseMultipartForm(1 << 20); err == nil {
			got = append(r.MultipartForm.Value["a"], r.MultipartForm.Value["b"]...)
		}
	}))
	t.Cleanup(server.Close)
	a, b := target.BlobOf("text/plain", []byte("1")), target.BlobOf("text/plain", []byte("2"))
	a.Name, b.Name = "a", "b"
	to := open(t, target.Settings{Protocol: target.HTTP, Address: server.URL + "/", Pipeline: "p", Inputs: [][]*inferencev1.Part{{a, b}}})
	if err := to.Do(t.Context(), &load.Answer{}); err != nil || !slices.Equal(got, []string{"1", "2"}) {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestWrongSettingsAreRefusedByName(t *testing.T) {
	t.Parallel()
	half, err := target.RandomTensor("FP16[2]")
	if err != nil {
		t.Fatal(err)
	}
	good := target.Settings{Protocol: target.GRPC, Address: "http://h", Pipeline: "p", Inputs: inputs(t)}
	for want, change := range map[string]func(*target.Settings){
		`protocol: "soap" is none of`:            func(s *target.Settings) { s.Protocol = "soap" },
		`address: "h" is no URL`:                 func(s *target.Settings) { s.Address = "h" },
		"inputs: there are none":                 func(s *target.Settings) { s.Inputs = nil },
		"timeout: -1s is negative":               func(s *target.Settings) { s.Timeout = -time.Second },
		"streams: the protocol cannot say it in": func(s *target.Settings) { s.Protocol, s.Streams = target.HTTP, true },
		"durability: the protocol cannot say it": func(s *target.Settings) { s.Protocol, s.Durability = target.OIP, pipeline.File },
		"priority: the protocol cannot say it":   func(s *target.Settings) { s.Protocol, s.Priority = target.OIP, 1 },
		"payload: there is no JSON of such":      func(s *target.Settings) { s.Protocol, s.Inputs = target.HTTP, [][]*inferencev1.Part{{half}} },
		"payload: tensors beside bytes": func(s *target.Settings) {
			s.Protocol, s.Inputs = target.HTTP, [][]*inferencev1.Part{{half, s.Inputs[0][0]}}
		},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			s := good
			change(&s)
			if _, err := target.New(s); err == nil || !strings.HasPrefix(err.Error(), want) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestTensorsAreGeneratedAsTheyAreWritten(t *testing.T) {
	t.Parallel()
	for text, size := range map[string]int{"FP32[1,64]": 256, "fp64[2, 2]": 32, "pixels=UINT8[1,28,28]": 784, "BF16[3]": 6, "INT64[]": 8, "BOOL[0,5]": 0} {
		a, err := target.RandomTensor(text)
		b, again := target.RandomTensor(text)
		if err != nil || again != nil || len(a.GetTensor().GetRaw()) != size || string(a.GetTensor().GetRaw()) != string(b.GetTensor().GetRaw()) {
			t.Errorf("%s: got %v, %v", text, a, err)
		}
	}
	for text, want := range map[string]string{
		"FP32": "use a datatype and a shape", "FP32[1": "use a datatype and a shape", "[1]": `"" is no datatype`, "BYTES[1]": `"BYTES" is no datatype whose elements have a size`,
		"FP32[x]": `"x" is no extent`, "FP32[-1]": `"-1" is no extent`, "FP32[99999999999,99999999999]": "it is larger than", "FP32[17000000]": "it is larger than",
	} {
		if _, err := target.RandomTensor(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", text, err)
		}
	}
}

func TestFilesOfTheExampleAreAnswered(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile(filepath.Join("..", "..", "..", "examples", "digits", "images", "00-1.png"))
	if err != nil {
		t.Fatal(err)
	}
	to := open(t, target.Settings{Protocol: target.HTTP, Address: mesh(t), Pipeline: "stage:echo", Inputs: [][]*inferencev1.Part{{target.BlobOf("image/png", data)}}})
	if err := to.Do(t.Context(), &load.Answer{}); err != nil {
		t.Error(err)
	}
}
