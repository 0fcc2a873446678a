package fleet

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// OfferSpec says what a load sends: so many requests a second, whatever becomes
// of those before.
type OfferSpec struct {
	Pipeline string
	// Rate is in requests a second; all are sent within Length.
	Rate   int
	Length time.Duration
	// Timeout is what each has.
	Timeout time.Duration
}

// Offered is what became of a load's requests.
type Offered struct {
	Spec OfferSpec
	// Sent requests were sent; Right answers came in time, and Late ones after it.
	Sent, Right, Late int
	// Wrong answers came, and Broken requests got none.
	Wrong, Broken int
	// Refused were answered with a fault, by reason; Refusals are how long those
	// took that were refused for want of room, and Decisions how long of that the
	// gateway took.
	Refused             map[string]int
	Refusals, Decisions []time.Duration
	// Sending is until the last was sent, Elapsed until the last right answer.
	Sending, Elapsed time.Duration
}

// Goodput is how many answers a second came in time.
func (o Offered) Goodput() float64 { return float64(o.Right) / max(o.Sending, o.Elapsed).Seconds() }

// Quantile returns a quantile of sorted times; 0 of none.
func Quantile(times []time.Duration, q float64) time.Duration {
	if len(times) == 0 {
		return 0
	}
	return times[int(q*float64(len(times)-1))]
}

// String says it in a line.
func (o Offered) String() string {
	return fmt.Sprintf("%d/s offered, %.0f/s sent: %.0f/s answered in time, %d late, %d wrong, %d broken, refused %v, refusals p50 %s p99 %s, of which the gateway's p99 %s",
		o.Spec.Rate, float64(o.Sent)/o.Sending.Seconds(), o.Goodput(), o.Late, o.Wrong, o.Broken, o.Refused, brief(o.Refusals, .5), brief(o.Refusals, .99), brief(o.Decisions, .99))
}

func brief(times []time.Duration, q float64) time.Duration {
	return Quantile(times, q).Round(10 * time.Microsecond)
}

// pace is how often a load looks how many of its requests are due.
const pace = 2 * time.Millisecond

// Offer sends requests to all gateways in turn, and returns when all have ended.
func (f *Fleet) Offer(s OfferSpec) Offered {
	f.t.Helper()
	transport := &http.Transport{MaxIdleConnsPerHost: s.Rate}
	defer transport.CloseIdleConnections()
	c := &load{fleet: f, client: &http.Client{Transport: transport}, addrs: f.gatewayAddrs(), out: Offered{Spec: s, Refused: map[string]int{}}}
	ctx, cancel := context.WithTimeout(f.t.Context(), s.Length)
	defer cancel()
	c.begin = time.Now()
	tick := time.NewTicker(pace)
	defer tick.Stop()
	var requests sync.WaitGroup
	for ctx.Err() == nil {
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
		for due := int(time.Since(c.begin).Seconds() * float64(s.Rate)); c.out.Sent < due; c.out.Sent++ {
			i := c.out.Sent
			requests.Go(func() { c.one(i) })
		}
	}
	c.out.Sending = time.Since(c.begin)
	requests.Wait()
	slices.Sort(c.out.Refusals)
	slices.Sort(c.out.Decisions)
	return c.out
}

// load is the senders of one offer. Its goroutine alone counts what was sent.
type load struct {
	fleet  *Fleet
	client *http.Client
	addrs  []string
	begin  time.Time

	mu  sync.Mutex
	out Offered
}

func (c *load) one(i int) {
	text := strconv.Itoa(i)
	begin := time.Now()
	status, header, body, err := c.ask(c.addrs[i%len(c.addrs)], text)
	took := time.Since(begin)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err != nil:
		c.out.Broken++
	case status != http.StatusOK:
		c.out.Refused[reasonOf(status, body)]++
		if status == http.StatusTooManyRequests {
			c.out.Refusals = append(c.out.Refusals, took)
			c.out.Decisions = append(c.out.Decisions, totalOf(header))
		}
	case heard{body: string(body)}.wrong(text):
		c.out.Wrong++
	case took > c.out.Spec.Timeout:
		c.out.Late++
	default:
		c.out.Right++
		c.out.Elapsed = time.Since(c.begin)
	}
}

// totalOf is what a gateway says that an answer took it; an hour where it does
// not say.
func totalOf(header http.Header) time.Duration {
	var ms float64
	if _, err := fmt.Sscanf(header.Get("Server-Timing"), "total;dur=%g", &ms); err != nil {
		return time.Hour
	}
	return time.Duration(ms * float64(time.Millisecond))
}

func (c *load) ask(addr, text string) (status int, header http.Header, body []byte, err error) {
	s := c.out.Spec
	request, err := http.NewRequestWithContext(c.fleet.t.Context(), http.MethodPost, "http://"+addr+"/v1/pipelines/"+s.Pipeline+":infer", strings.NewReader(text))
	if err != nil {
		return 0, nil, nil, err
	}
	request.Header.Set("Content-Type", "text/plain")
	request.Header.Set("Stagemesh-Timeout", s.Timeout.String())
	response, err := c.client.Do(request)
	if err != nil {
		return 0, nil, nil, err
	}
	defer response.Body.Close() //nolint:errcheck // it was read to its end
	body, err = io.ReadAll(response.Body)
	return response.StatusCode, response.Header, body, err
}

// Memory returns how many bytes of memory the member's process has resident.
func (m *Member) Memory() int {
	m.fleet.t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", m.cmd.Process.Pid))
	if err != nil {
		m.fleet.t.Fatal(err)
	}
	pages := 0
	if _, err := fmt.Sscanf(string(data), "%d %d", new(int), &pages); err != nil {
		m.fleet.t.Fatal(err)
	}
	return pages * os.Getpagesize()
}
