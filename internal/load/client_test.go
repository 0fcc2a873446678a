package load_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/runners"

	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// A broker that stops while a queue is created does not stop the clock that all brokers
// of a process share.
func TestMain(m *testing.M) {
	testbed.Main(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
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

// mesh starts a mesh and returns its address.
func mesh(t *testing.T) string {
	t.Helper()
	f, err := meshfile.Parse("mesh.yaml", []byte(file), ".", runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	m := meshtest.FromFile(t, f, stagemesh.FileSettings{})
	meshtest.Start(t, m)
	return m.URL()
}

// inputs are two inputs of bytes.
func inputs(t *testing.T) [][]payload.Part {
	t.Helper()
	return [][]payload.Part{{load.RandomBlob(1024)}, {payload.OfBlob("", "text/plain", []byte("x"))}}
}

func open(t *testing.T, s load.ClientSettings) *load.Client {
	t.Helper()
	out, err := load.NewClient(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(out.Close)
	return out
}

var protocols = []load.Protocol{load.GRPC, load.Connect, load.HTTP, load.OIP}

func TestEveryProtocolReportsTimelines(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	tensor, err := load.RandomTensor("x=FP32[2,3]")
	if err != nil {
		t.Fatal(err)
	}
	for _, protocol := range protocols {
		t.Run(string(protocol), func(t *testing.T) {
			t.Parallel()
			to := open(t, load.ClientSettings{
				Protocol: protocol, Address: address, Pipeline: "twice", Inputs: append(inputs(t), []payload.Part{tensor}),
				Timeout: 20 * time.Second, Token: "not required",
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

func TestEveryProtocolClassifiesErrors(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	closed := httptest.NewServer(http.NotFoundHandler())
	closed.Close()
	for _, protocol := range protocols {
		for name, test := range map[string]struct {
			settings           load.ClientSettings
			want               string
			refused, retryable bool
		}{
			"an unknown pipeline": {load.ClientSettings{Address: address, Pipeline: "nope"}, "UNKNOWN_PIPELINE", false, false},
			"no host":             {load.ClientSettings{Address: address, Pipeline: "stage:nope"}, "NO_CAPACITY", true, true},
			"no time":             {load.ClientSettings{Address: address, Pipeline: "stage:slow", Timeout: 50 * time.Millisecond}, "DEADLINE_EXCEEDED", false, true},
			"no server":           {load.ClientSettings{Address: closed.URL, Pipeline: "twice"}, load.ReasonUnreachable, false, false},
		} {
			t.Run(string(protocol)+"/"+name, func(t *testing.T) {
				t.Parallel()
				s := test.settings
				s.Protocol, s.Inputs = protocol, inputs(t)
				err := open(t, s).Do(t.Context(), &load.Answer{})
				failed, ok := errors.AsType[*load.RequestError](err)
				if !ok || failed.Reason != test.want || failed.Refused != test.refused || failed.Retryable != test.retryable || failed.Error() == "" {
					t.Errorf("got %#v", err)
				}
			})
		}
	}
}

func TestChunksAreTimed(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	for _, protocol := range []load.Protocol{load.GRPC, load.Connect} {
		t.Run(string(protocol), func(t *testing.T) {
			t.Parallel()
			to := open(t, load.ClientSettings{Protocol: protocol, Address: address, Pipeline: "stage:words", Inputs: inputs(t)[1:], Streams: true})
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
			to := open(t, load.ClientSettings{Protocol: protocol, Address: address, Pipeline: "twice", Inputs: inputs(t), Durability: pipeline.File, Priority: -3})
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
	a, b := payload.OfBlob("a", "text/plain", []byte("1")), payload.OfBlob("b", "text/plain", []byte("2"))
	to := open(t, load.ClientSettings{Protocol: load.HTTP, Address: server.URL + "/", Pipeline: "p", Inputs: [][]payload.Part{{a, b}}})
	if err := to.Do(t.Context(), &load.Answer{}); err != nil || !slices.Equal(got, []string{"1", "2"}) {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestInvalidClientSettingsAreNamed(t *testing.T) {
	t.Parallel()
	half, err := load.RandomTensor("FP16[2]")
	if err != nil {
		t.Fatal(err)
	}
	good := load.ClientSettings{Protocol: load.GRPC, Address: "http://h", Pipeline: "p", Inputs: inputs(t)}
	for want, change := range map[string]func(*load.ClientSettings){
		`protocol: expected grpc, connect, http or oip, got "soap"`: func(s *load.ClientSettings) { s.Protocol = "soap" },
		`address: "h" is not a URL`:                                 func(s *load.ClientSettings) { s.Address = "h" },
		"inputs: at least one is required":                          func(s *load.ClientSettings) { s.Inputs = nil },
		"timeout: -1s is negative":                                  func(s *load.ClientSettings) { s.Timeout = -time.Second },
		"streams: not supported by http: use":                       func(s *load.ClientSettings) { s.Protocol, s.Streams = load.HTTP, true },
		"durability: not supported by oip: use":                     func(s *load.ClientSettings) { s.Protocol, s.Durability = load.OIP, pipeline.File },
		"priority: not supported by oip: use":                       func(s *load.ClientSettings) { s.Protocol, s.Priority = load.OIP, 1 },
		"payload: FP16 has no JSON form: use":                       func(s *load.ClientSettings) { s.Protocol, s.Inputs = load.HTTP, [][]payload.Part{{half}} },
		"payload: tensors beside bytes": func(s *load.ClientSettings) {
			s.Protocol, s.Inputs = load.HTTP, [][]payload.Part{{half, s.Inputs[0][0]}}
		},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			s := good
			change(&s)
			if _, err := load.NewClient(s); err == nil || !strings.HasPrefix(err.Error(), want) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestTensorsAreGeneratedFromText(t *testing.T) {
	t.Parallel()
	for text, size := range map[string]int{"FP32[1,64]": 256, "fp64[2, 2]": 32, "pixels=UINT8[1,28,28]": 784, "BF16[3]": 6, "INT64[]": 8, "BOOL[0,5]": 0} {
		a, err := load.RandomTensor(text)
		b, again := load.RandomTensor(text)
		if err != nil || again != nil || len(a.Tensor.Raw) != size || string(a.Tensor.Raw) != string(b.Tensor.Raw) {
			t.Errorf("%s: got %v, %v", text, a, err)
		}
	}
	for text, want := range map[string]string{
		"FP32": "use a datatype and a shape", "FP32[1": "use a datatype and a shape", "[1]": `"" is not a datatype`, "BYTES[1]": `"BYTES" is not a datatype of fixed size`,
		"FP32[x]": `"x" is not the size of an axis`, "FP32[-1]": `"-1" is not the size of an axis`, "FP32[99999999999,99999999999]": "it is larger than", "FP32[17000000]": "it is larger than",
	} {
		if _, err := load.RandomTensor(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", text, err)
		}
	}
}

func TestExampleFilesAreAnswered(t *testing.T) {
	t.Parallel()
	data := testbed.ReadFile(t, filepath.Join("..", "..", "examples", "digits", "images", "00-1.png"))
	to := open(t, load.ClientSettings{Protocol: load.HTTP, Address: mesh(t), Pipeline: "stage:echo", Inputs: [][]payload.Part{{payload.OfBlob("", "image/png", data)}}})
	if err := to.Do(t.Context(), &load.Answer{}); err != nil {
		t.Error(err)
	}
}
