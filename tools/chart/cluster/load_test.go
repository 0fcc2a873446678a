package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// picture is an image of a digit.
type picture struct {
	name, digit string
	data        []byte
}

// readImages returns the images of the digits example.
func readImages(t *testing.T) []picture {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(repository, "examples/digits/images/*.png"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%d images, %v", len(paths), err)
	}
	var out []picture
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(filepath.Base(path), "-")
		out = append(out, picture{filepath.Base(path), strings.TrimSuffix(rest, ".png"), data})
	}
	return out
}

// answer is an answer of the digits pipeline.
type answer struct {
	labels int
	// activating names the stages whose first host the request waited for.
	activating string
}

// ask asks the mesh for the digit.
func (p picture) ask(ctx context.Context, client *http.Client, gateway string) (answer, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, gateway+"/v1/pipelines/digits:infer", bytes.NewReader(p.data))
	if err != nil {
		return answer{}, err
	}
	request.Header.Set("Content-Type", "image/png")
	response, err := client.Do(request)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return answer{}, err
	}
	var decoded struct {
		Outputs []struct{ Data []any }
	}
	if err := json.Unmarshal(body, &decoded); err != nil || response.StatusCode != http.StatusOK || len(decoded.Outputs) == 0 ||
		len(decoded.Outputs[0].Data) == 0 || decoded.Outputs[0].Data[0] != p.digit {
		return answer{}, fmt.Errorf("%s: %s %s", p.name, response.Status, body)
	}
	return answer{len(decoded.Outputs[0].Data), response.Header.Get("Stagemesh-Activating")}, nil
}

// newClient returns a client that keeps connections, or one with a new connection for each request.
func newClient(reconnects bool) (client *http.Client, disconnect func()) {
	transport := &http.Transport{DisableKeepAlives: reconnects}
	return &http.Client{Transport: transport, Timeout: callerPatience}, transport.CloseIdleConnections
}

// callerPatience is how long callers wait for an answer.
const callerPatience = 10 * time.Second

// load is four callers of one address, the Service or a gateway. Two of them connect anew for each
// request. Each waits a moment between requests, so that the node has time for everything else.
type load struct {
	stop    context.CancelFunc
	callers sync.WaitGroup

	mu      sync.Mutex
	right   int
	wrong   []string
	slowest time.Duration
	// failedAt is when the failed requests began.
	failedAt []time.Time
}

func startLoad(t *testing.T, gateway string) *load {
	t.Helper()
	images := readImages(t)
	ctx, stop := context.WithCancel(t.Context())
	l := &load{stop: stop}
	for caller := range 4 {
		l.callers.Go(func() {
			client, disconnect := newClient(caller%2 == 1)
			defer disconnect()
			pause := time.NewTicker(20 * time.Millisecond)
			defer pause.Stop()
			for i := caller; ctx.Err() == nil; i++ {
				begin := time.Now()
				// A request that began is answered, also at the end.
				_, err := images[i%len(images)].ask(context.WithoutCancel(ctx), client, gateway)
				l.note(begin, err)
				select {
				case <-pause.C:
				case <-ctx.Done():
				}
			}
		})
	}
	t.Cleanup(l.end)
	return l
}

func (l *load) note(begin time.Time, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	took := time.Since(begin)
	l.slowest = max(l.slowest, took)
	if err == nil {
		l.right++
		return
	}
	l.failedAt = append(l.failedAt, begin)
	l.wrong = append(l.wrong, fmt.Sprintf("%s after %s: %v", begin.Format("15:04:05.000"), took.Round(time.Millisecond), err))
}

// awaitMore waits until as many more answers are right.
func (m *mesh) awaitMore(l *load, more int) {
	m.t.Helper()
	l.mu.Lock()
	until := l.right + more
	l.mu.Unlock()
	m.await(fmt.Sprintf("%d more answers", more), func() (bool, error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.right >= until, fmt.Errorf("%d of %d, %d failures: %s", l.right, until, len(l.wrong), strings.Join(l.wrong[:min(3, len(l.wrong))], "\n"))
	})
}

// end stops the callers and waits for them.
func (l *load) end() {
	l.stop()
	l.callers.Wait()
}
