package rest_test

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/rest"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// manyAnswer is a line of an answer.
type manyAnswer struct {
	Line    int
	ID      string
	Outputs []json.RawMessage
	Error   struct{ Reason, Message string }
}

// openMany begins a call whose body the test writes, and returns what reads its answers.
func openMany(ctx context.Context, t *testing.T, url, query string, h2c bool) (*io.PipeWriter, *json.Decoder, *http.Response) {
	t.Helper()
	body, to := io.Pipe()
	t.Cleanup(func() { _ = to.Close() })
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/pipelines/echo:many"+query, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/x-ndjson")
	write(t, to, "{\"first\":1}\n")
	response, err := fronttest.Client(t, h2c).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	if response.StatusCode != http.StatusOK || response.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Fatalf("the answer is %d, %v", response.StatusCode, response.Header)
	}
	return to, json.NewDecoder(response.Body), response
}

// write writes to a body that is read concurrently.
func write(t *testing.T, to io.Writer, text string) {
	t.Helper()
	written := make(chan error, 1)
	go func() { _, err := io.WriteString(to, text); written <- err }()
	t.Cleanup(func() {
		if err := <-written; err != nil && t.Context().Err() == nil {
			t.Error(err)
		}
	})
}

// manyMemory is what the calls of serveMany may hold together.
const manyMemory = 64 << 20

func serveMany(t *testing.T, caller *fronttest.Caller, s transport.Settings) string {
	t.Helper()
	if s.MaxMessageBytes == 0 {
		s.MaxMessageBytes = fronttest.LimitBytes
	}
	pool := budget.NewPool(budget.Settings{Limit: manyMemory})
	t.Cleanup(func() { testbed.Eventually(t, "all memory is given back", func() bool { return pool.Held() == 0 }) })
	return fronttest.Serve(t, fronttest.WithMemory(rest.New(caller, nil, s), pool))
}

// The first line is answered last: in order, the others wait for it.
func TestLinesAreAnsweredInOrderOrAsTheyAreReady(t *testing.T) {
	t.Parallel()
	for _, h2c := range []bool{false, true} {
		for _, query := range []string{"?in_order=true&parameters.a=1", "?in_flight=8"} {
			t.Run(fmt.Sprint(h2c, query), func(t *testing.T) {
				t.Parallel()
				const lines, most = 100, 8
				var running, peak atomic.Int64
				others := make(chan struct{}, lines)
				caller := &fronttest.Caller{Answer: func(ctx context.Context, r *request.Request) (*request.Response, error) {
					now := running.Add(1)
					defer running.Add(-1)
					for was := peak.Load(); now > was && !peak.CompareAndSwap(was, now); was = peak.Load() {
					}
					switch text := string(r.Inputs[0].Blob.Data); {
					case strings.Contains(text, "slow"):
						for range most - 1 {
							<-others
						}
					case strings.Contains(text, "bad"):
						others <- struct{}{}
						return nil, fault.New(fault.QueueFull, "full")
					default:
						others <- struct{}{}
					}
					return fronttest.Echo(ctx, r)
				}}
				var body strings.Builder
				for i := range lines {
					switch {
					case i == 0:
						body.WriteString("{\"slow\":1}\n")
					case i%10 == 0:
						body.WriteString("{\"bad\":1}\n")
					case i%10 == 5:
						body.WriteString("no JSON\n")
					case i == lines-1:
						body.WriteString("{\"last\":1}") // without an end
					default:
						body.WriteString("{\"x\":1}\r\n")
					}
				}
				a := ask{path: "/v1/pipelines/echo:many" + query, body: strings.NewReader(body.String()), header: map[string]string{"Content-Type": "application/x-ndjson"}}.at(t, serveMany(t, caller, transport.Settings{}), h2c)
				var order []int
				for line := range strings.Lines(a.body) {
					var got manyAnswer
					if err := json.Unmarshal([]byte(line), &got); err != nil {
						t.Fatalf("%v: %q", err, line)
					}
					order = append(order, got.Line)
					want := ""
					switch i := got.Line - 1; {
					case i > 0 && i%10 == 0:
						want = string(fault.QueueFull)
					case i%10 == 5:
						want = string(fault.InvalidRequest)
					}
					if got.Error.Reason != want || (want == "") != (len(got.Outputs) == 1) {
						t.Errorf("line %d: got %q", got.Line, line)
					}
				}
				if len(order) != lines {
					t.Fatalf("%d answers: %d %s", len(order), a.status, a.body)
				}
				inOrder := strings.Contains(query, "in_order")
				for i, line := range order {
					if inOrder && line != i+1 {
						t.Fatalf("answer %d is to line %d", i+1, line)
					}
				}
				if !inOrder && (order[0] == 1 || peak.Load() > most) {
					t.Errorf("the slowest line is answered first, or %d ran at a time", peak.Load())
				}
			})
		}
	}
}

func TestLinesAreRefusedWhole(t *testing.T) {
	t.Parallel()
	lines := func(query, contentType, body string) ask {
		out := post(contentType, body)
		out.path = "/v1/pipelines/echo:many" + query
		return out
	}
	const ndjson = "application/x-ndjson"
	lines("", "application/json", "{}").of(t, &fronttest.Caller{}).wantFailure(t, 415, fault.UnsupportedMedia, "application/x-ndjson")
	lines("?in_flight=65", ndjson, "{}").of(t, &fronttest.Caller{}).wantFailure(t, 400, fault.InvalidRequest, "1 to 64")
	lines("?in_order=perhaps", ndjson, "{}").of(t, &fronttest.Caller{}).wantFailure(t, 400, fault.InvalidRequest, "true or false")
	lines("?other=1", ndjson, "{}").of(t, &fronttest.Caller{}).wantFailure(t, 400, fault.InvalidRequest, "unknown key")
	lines("", ndjson, "\n \n").of(t, &fronttest.Caller{}).wantFailure(t, 400, fault.InvalidRequest, "empty")
}

func TestAnswerOfALineIsOneLine(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{Answer: func(context.Context, *request.Request) (*request.Response, error) {
		return &request.Response{Outputs: []payload.Part{payload.OfBlob("y", "application/json", []byte("{\n  \"a\": 1\r\n}\n"))}}, nil
	}}
	_, body := testbed.Call(t, http.DefaultClient, http.MethodPost, serveMany(t, caller, transport.Settings{})+"/v1/pipelines/echo:many", "{\"x\":1}\n", "Content-Type", "application/x-ndjson")
	if !strings.Contains(body, `"json":{   "a": 1  } }`) || strings.IndexAny(body, "\r\n") != len(body)-1 {
		t.Errorf("%q", body)
	}
}

// A line that is too long fails alone, and a caller that leaves ends what runs.
func TestLinesEndAloneAndTogether(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", manyMemory+1) + "\n"
	for _, h2c := range []bool{false, true} {
		t.Run(fmt.Sprint(h2c), func(t *testing.T) {
			t.Parallel()
			started, ended := make(chan struct{}, 64), make(chan struct{}, 64)
			caller := &fronttest.Caller{Answer: func(ctx context.Context, r *request.Request) (*request.Response, error) {
				if !strings.Contains(string(r.Inputs[0].Blob.Data), "hang") {
					return fronttest.Echo(ctx, r)
				}
				started <- struct{}{}
				<-ctx.Done()
				ended <- struct{}{}
				return nil, ctx.Err()
			}}
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			to, answers, response := openMany(ctx, t, serveMany(t, caller, transport.Settings{}), "", h2c)
			next := func(line int, reason fault.Reason) {
				t.Helper()
				var got manyAnswer
				if err := answers.Decode(&got); err != nil || got.Line != line || got.Error.Reason != string(reason) {
					t.Fatalf("got %+v, %v", got, err)
				}
			}
			next(1, "")
			write(t, to, long)
			next(2, fault.PayloadTooLarge)
			write(t, to, "{\"x\":1}\n")
			next(3, "")
			write(t, to, "{\"hang\":1}\n{\"hang\":1}\n")
			testbed.Receive(t, "a line runs", started)
			testbed.Receive(t, "another line runs", started)
			leave()
			_ = response.Body.Close()
			testbed.Receive(t, "a line ends", ended)
			testbed.Receive(t, "another line ends", ended)
		})
	}
}

// What runs when the gateway stops is answered, and the answer ends with the reason.
func TestLinesEndWithTheGateway(t *testing.T) {
	t.Parallel()
	for _, h2c := range []bool{false, true} {
		t.Run(fmt.Sprint(h2c), func(t *testing.T) {
			t.Parallel()
			stopping, started := make(chan struct{}), make(chan struct{}, 1)
			caller := &fronttest.Caller{Answer: func(ctx context.Context, r *request.Request) (*request.Response, error) {
				if strings.Contains(string(r.Inputs[0].Blob.Data), "slow") {
					started <- struct{}{}
					<-stopping
				}
				return fronttest.Echo(ctx, r)
			}}
			to, answers, response := openMany(t.Context(), t, serveMany(t, caller, transport.Settings{Stopping: stopping}), "?in_order=true", h2c)
			defer response.Body.Close()
			write(t, to, "{\"slow\":1}\n")
			testbed.Receive(t, "the line runs", started)
			close(stopping)
			for i, want := range []fault.Reason{"", "", fault.ShuttingDown} {
				var got manyAnswer
				if err := answers.Decode(&got); err != nil || got.Line != i+1 || got.Error.Reason != string(want) {
					t.Fatalf("answer %d is %+v, %v", i+1, got, err)
				}
			}
			if err := answers.Decode(new(manyAnswer)); err != io.EOF {
				t.Errorf("the answers end with %v", err)
			}
		})
	}
}

// manyLines is how many lines one body has; `make soak` sends a million.
var manyLines = flag.Int("lines", 20_000, "how many lines one body has")

// Lines of any number take the memory of those that run.
func TestManyLinesTakeConstantMemory(t *testing.T) { //nolint:paralleltest // it measures the heap
	const allowed = 24 << 20
	lines := *manyLines
	url := serveMany(t, &fronttest.Caller{}, transport.Settings{})
	body, to := io.Pipe()
	go func() {
		from := bufio.NewWriter(to)
		for i := range lines {
			fmt.Fprintf(from, "{\"inputs\":[{\"name\":\"x\",\"datatype\":\"FP32\",\"shape\":[1,4],\"data\":[%d,2,3,4]}]}\n", i)
		}
		_ = to.CloseWithError(from.Flush())
	}()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/pipelines/echo:many?in_order=true", body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/x-ndjson")
	response, err := fronttest.Client(t, false).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before, most, answers := heap(), uint64(0), bufio.NewScanner(response.Body)
	n := 0
	for ; answers.Scan(); n++ {
		if prefix := fmt.Sprintf("{\"line\":%d,", n+1); !strings.HasPrefix(answers.Text(), prefix) || strings.Contains(answers.Text(), `"error"`) {
			t.Fatalf("answer %d is %q", n+1, answers.Text())
		}
		if n%10_000 == 0 {
			most = max(most, heap())
		}
	}
	if err := answers.Err(); err != nil || n != lines {
		t.Fatalf("%d answers, %v", n, err)
	}
	if most > before+allowed {
		t.Errorf("%d bytes are held, %d before the first line", most, before)
	}
}
