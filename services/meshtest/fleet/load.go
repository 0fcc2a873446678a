package fleet

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// LoadSpec says what a client sends.
type LoadSpec struct {
	Pipeline string
	Requests int
	// InFlight requests are under way at once.
	InFlight int
	// Durable requests are stored, and so are their answers.
	Durable bool
}

// Load is a client that sends requests, each with a text of its own, to all
// gateways in turn, and knows what comes back.
type Load struct {
	fleet  *Fleet
	spec   LoadSpec
	client *http.Client
	next   atomic.Int64
	done   chan struct{}

	mu    sync.Mutex
	tally Tally
	last  time.Time
}

// Tally is what became of a load's requests.
type Tally struct {
	// Right and Wrong answers came.
	Right, Wrong int
	// Refused were answered with a fault, by reason.
	Refused map[string]int
	// Broken got no answer: the connection to the gateway ended.
	Broken []string
	// Times are how long the right answers took.
	Times []time.Duration
	// Stall is the longest time without any answer.
	Stall time.Duration
	// Elapsed is how long all of it took.
	Elapsed time.Duration
}

// Over returns the times of the answers that took longer, the shortest first.
func (t Tally) Over(d time.Duration) []time.Duration {
	times := slices.Clone(t.Times)
	slices.Sort(times)
	at, _ := slices.BinarySearch(times, d)
	return times[at:]
}

// String says it in a line.
func (t Tally) String() string {
	return fmt.Sprintf("%d right, %d wrong, %v refused, %d broken, longest stall %s, in %s",
		t.Right, t.Wrong, t.Refused, len(t.Broken), t.Stall.Round(time.Millisecond), t.Elapsed.Round(time.Millisecond))
}

// Load starts to send.
func (f *Fleet) Load(s LoadSpec) *Load {
	transport := &http.Transport{MaxIdleConnsPerHost: s.InFlight, MaxConnsPerHost: s.InFlight}
	l := &Load{
		fleet: f, spec: s, client: &http.Client{Transport: transport}, done: make(chan struct{}),
		tally: Tally{Refused: map[string]int{}}, last: time.Now(),
	}
	begin := time.Now()
	var senders sync.WaitGroup
	for range s.InFlight {
		senders.Go(l.send)
	}
	go func() {
		defer close(l.done)
		senders.Wait()
		l.tally.Elapsed = time.Since(begin)
		transport.CloseIdleConnections()
	}()
	return l
}

// Done is closed when every request has its answer.
func (l *Load) Done() <-chan struct{} { return l.done }

// Answered returns how many requests have an answer so far.
func (l *Load) Answered() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.tally.answers()
}

func (t Tally) answers() int {
	n := t.Right + t.Wrong + len(t.Broken)
	for _, refused := range t.Refused {
		n += refused
	}
	return n
}

// Wait returns what became of all requests.
func (l *Load) Wait() Tally {
	<-l.done
	return l.tally
}

func (l *Load) send() {
	for {
		i := int(l.next.Add(1)) - 1
		if i >= l.spec.Requests {
			return
		}
		l.one(i)
	}
}

func (l *Load) one(i int) {
	text := strconv.Itoa(i)
	addrs := l.fleet.gatewayAddrs()
	begin := time.Now()
	got, reason, err := l.ask(addrs[i%len(addrs)], text)
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tally.Stall = max(l.tally.Stall, now.Sub(l.last))
	l.last = now
	switch {
	case err != nil:
		l.tally.Broken = append(l.tally.Broken, fmt.Sprintf("%s: %v", text, err))
	case reason != "":
		l.tally.Refused[reason]++
	case got != text:
		l.tally.Wrong++
	default:
		l.tally.Right++
		l.tally.Times = append(l.tally.Times, now.Sub(begin))
	}
}

// ask returns the answer's text, or the reason of a refusal.
func (l *Load) ask(addr, text string) (got, reason string, err error) {
	request, err := http.NewRequestWithContext(l.fleet.t.Context(), http.MethodPost, "http://"+addr+"/v1/pipelines/"+l.spec.Pipeline+":infer", strings.NewReader(text))
	if err != nil {
		return "", "", err
	}
	request.Header.Set("Content-Type", "text/plain")
	if l.spec.Durable {
		request.Header.Set("Stagemesh-Durability", "file")
	}
	response, err := l.client.Do(request)
	if err != nil {
		return "", "", err
	}
	defer response.Body.Close() //nolint:errcheck // it was read to its end
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return "", "", err
	}
	if response.StatusCode == http.StatusOK {
		return string(body), "", nil
	}
	return "", reasonOf(response.StatusCode, body), nil
}

func reasonOf(status int, body []byte) string {
	var problem struct {
		Error struct {
			Reason string `json:"reason"`
		} `json:"error"`
	}
	if json.Unmarshal(bytes.TrimSpace(body), &problem) != nil || problem.Error.Reason == "" {
		return fmt.Sprintf("untyped %d: %.200s", status, body)
	}
	return problem.Error.Reason
}
