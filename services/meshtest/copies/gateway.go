package copies

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/services/meshtest"
)

// programVariable makes the test's program a gateway.
const programVariable = "STAGEMESH_COPIES_PROGRAM"

// IsProgram reports whether this process is to be a gateway.
func IsProgram() bool { return os.Getenv(programVariable) != "" }

// Main is the gateway's, and returns the code to exit with.
func Main() int {
	if err := cli.New().ExecuteContext(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "gateway:", err)
		return 1
	}
	return 0
}

// Gateway is a gateway in a process of its own, with a broker and hosts in the
// test's. It ends with its test.
type Gateway struct {
	*meshtest.Bed
	// Address is the public port's, host:port; Ops is the operations port's URL.
	Address, Ops string
}

// maxPayload is the broker's, so that a tensor of a mebibyte fits into a message.
const maxPayload = 8 << 20

// file is the mesh's. Its stage is there because there has to be one; the test's are
// asked by their names.
const file = `
mesh: %s
nats: {url: %q}
registry: {none: true}
stages:
  any: {runner: {synth_noop: {}}}
`

// Start starts a gateway and waits until it is ready.
func Start(t *testing.T) Gateway {
	t.Helper()
	out := Gateway{Bed: meshtest.New(t, func(o *server.Options) { o.MaxPayload = maxPayload })}
	config := filepath.Join(t.TempDir(), "mesh.yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, file, meshtest.Mesh, out.Broker.URL()), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "gateway", "--config", config, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--ops", "127.0.0.1:0")
	// The collector would take the buffers that are kept, whenever it runs, and what is
	// counted would be how often that is. A test's requests need a few hundred megabytes.
	cmd.Env = append(os.Environ(), programVariable+"=1", "GOGC=off", "GOMEMLIMIT=1GiB")
	said := &log{}
	cmd.Stdout, cmd.Stderr = said, said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // by a signal
		if t.Failed() {
			t.Logf("what the gateway said:\n%s", said)
		}
	})
	testbed.Eventually(t, "the gateway is ready", func() bool { return out.find(said.String()) })
	return out
}

var readyLine = regexp.MustCompile(`is ready on http://(\S+) \(.*operations: (http://\S+)\)`)

// find reads the addresses off what the gateway says.
func (g *Gateway) find(said string) bool {
	words := readyLine.FindStringSubmatch(said)
	if words == nil {
		return false
	}
	g.Address, g.Ops = words[1], words[2]
	return true
}

// warmUp is how many requests are not counted: buffers are kept from one to the next.
const warmUp = 5

// Allocated returns the bytes that the gateway allocates for one request of n, which
// are made one after the other.
func (g Gateway) Allocated(t *testing.T, n int, request func()) int64 {
	t.Helper()
	for range warmUp {
		request()
	}
	before := g.total(t)
	for range n {
		request()
	}
	return (g.total(t) - before) / int64(n)
}

// allocatedMetric is all that a process has allocated so far, in bytes.
const allocatedMetric = "go_memstats_alloc_bytes_total "

func (g Gateway) total(t *testing.T) int64 {
	t.Helper()
	lines := bufio.NewScanner(strings.NewReader(g.get(t, "/metrics")))
	for lines.Scan() {
		text, is := strings.CutPrefix(lines.Text(), allocatedMetric)
		if !is {
			continue
		}
		value, err := strconv.ParseFloat(text, 64)
		if err != nil {
			t.Fatal(err)
		}
		return int64(value)
	}
	t.Fatalf("the gateway has no metric %s", allocatedMetric)
	return 0
}

func (g Gateway) get(t *testing.T, path string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, g.Ops+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Close = true
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close() //nolint:errcheck // it was read
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Fatalf("%s: %d, %v", path, answer.StatusCode, err)
	}
	return string(text)
}

// log is what a process says, safe for concurrent use.
type log struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write implements io.Writer.
func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String returns all that was written.
func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
