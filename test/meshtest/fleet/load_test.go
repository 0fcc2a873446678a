package fleet

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stagemesh/stagemesh/internal/testbed"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
)

// loadSpec describes the requests of a client. Each has a text of its own.
type loadSpec struct {
	// pipeline is "echo" if it is empty.
	pipeline string
	// requests is their number; 0 means as many as come until finish.
	requests int
	// inFlight is the number of requests at once, at most.
	inFlight int
	// every is the time from one request to the next; 0 is none. Late requests are sent
	// as soon as fewer than inFlight are in flight.
	every time.Duration
	// prefix begins every text.
	prefix string
	// durable requests are stored, and so are their answers.
	durable bool
	// timeout is each request's, 0 for the gateway's default.
	timeout time.Duration
	// chunks is how many come before each answer; more than 0 asks for streams.
	chunks int
	// keyed requests have an idempotency key: their text. They are sent again until they
	// are answered, and then once more: that answer must be the same.
	keyed    bool
	priority int
	// patience is how long a caller waits before it leaves, 0 for ever.
	patience time.Duration
	// through chooses the gateways.
	through balancer
	// http2 sends many requests over one connection.
	http2 bool
	// models is how many models get the requests in turn, instead of the pipeline, and
	// firstModel the number of the first.
	models, firstModel int
	// gateway gets all requests, if it is set.
	gateway *member
}

// load is a client that sends requests and checks their answers.
type load struct {
	fleet  *fleet
	spec   loadSpec
	client *http.Client
	ready  *readiness
	begin  time.Time
	next   atomic.Int64
	done   chan struct{}

	// sending ends when no more requests are sent, calling when the callers leave.
	sending, calling context.Context
	stop, leave      context.CancelFunc

	mu      sync.Mutex
	results results
	last    time.Time
}

// load starts to send requests.
func (f *fleet) load(s loadSpec) *load {
	s.pipeline = cmp.Or(s.pipeline, "echo")
	s.requests = cmp.Or(s.requests, math.MaxInt)
	now := time.Now()
	l := &load{fleet: f, spec: s, done: make(chan struct{}), ready: &readiness{fleet: f}, begin: now, last: now}
	l.results.refused, l.results.begin = map[string]int{}, now
	l.calling, l.leave = context.WithCancel(f.t.Context())
	l.sending, l.stop = context.WithCancel(l.calling)
	transport := l.transport()
	l.client = &http.Client{Transport: transport}
	if s.through != roundRobin {
		l.ready.poll()
	}
	var senders sync.WaitGroup
	for range s.inFlight {
		senders.Go(l.send)
	}
	go func() {
		defer close(l.done)
		polling, stop := context.WithCancel(f.t.Context())
		var poller sync.WaitGroup
		if s.through != roundRobin {
			poller.Go(func() { l.ready.pollUntil(polling) })
		}
		senders.Wait()
		l.results.elapsed = time.Since(l.begin)
		stop()
		poller.Wait()
		l.leave()
		transport.CloseIdleConnections()
	}()
	return l
}

func (l *load) transport() *http.Transport {
	transport := &http.Transport{MaxIdleConnsPerHost: l.spec.inFlight}
	if l.spec.http2 {
		transport.Protocols = new(http.Protocols)
		transport.Protocols.SetUnencryptedHTTP2(true)
	} else {
		transport.MaxConnsPerHost = l.spec.inFlight
	}
	if l.spec.through == perConnection {
		transport.DialContext = l.ready.dial
		// A draining gateway closes connections that were idle while it served on, and a
		// request over HTTP/1 that is sent at that moment is lost.
		transport.IdleConnTimeout = idleConnection
	}
	return transport
}

// finish stops sending, and returns the results when all requests have ended.
func (l *load) finish() *results {
	l.stop()
	return l.wait()
}

// wait returns the results when all requests have ended.
func (l *load) wait() *results {
	<-l.done
	return &l.results
}

// answerCount returns the number of requests that have ended.
func (l *load) answerCount() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.results.answers) + l.results.left + len(l.results.broken)
}

// rightCount returns the number of right answers.
func (l *load) rightCount() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.results.right
}

// flow waits until that many more requests have ended. The load must not end before.
func (l *load) flow(more int) {
	l.fleet.t.Helper()
	want := l.answerCount() + more
	testbed.Eventually(l.fleet.t, fmt.Sprintf("%d requests end", want), func() bool { return l.answerCount() >= want })
}

// send sends requests, one after the other.
func (l *load) send() {
	for l.sending.Err() == nil {
		i := int(l.next.Add(1) - 1)
		if i >= l.spec.requests || !l.isDue(i) {
			return
		}
		l.request(i)
	}
}

// isDue waits for the time of a request, and reports whether it is to be sent.
func (l *load) isDue(i int) bool {
	early := time.Until(l.begin.Add(time.Duration(i) * l.spec.every))
	if l.spec.every == 0 || early <= 0 {
		return true
	}
	return wait(l.sending, early) == nil
}

func (l *load) request(i int) {
	ctx, cancel := context.WithCancel(l.calling)
	if l.spec.patience > 0 {
		ctx, cancel = context.WithTimeout(l.calling, l.spec.patience)
	}
	defer cancel()
	text, begin := l.spec.prefix+strconv.Itoa(i), time.Now()
	a, err := l.try(ctx, text, i)
	if l.spec.keyed {
		a, err = l.insist(ctx, a, err, i)
	}
	a.at = time.Now()
	a.took = a.at.Sub(begin)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.results.pause = max(l.results.pause, a.at.Sub(l.last))
	l.last = a.at
	l.results.sent = max(l.results.sent, begin.Sub(l.begin))
	if err != nil && ctx.Err() != nil {
		l.results.left++
		return
	}
	l.results.add(a, err)
}

// try sends the request to the gateway whose turn it is.
func (l *load) try(ctx context.Context, text string, turn int) (answer, error) {
	a := answer{text: text}
	if l.spec.models > 0 {
		a.model = modelName(l.spec.firstModel + turn%l.spec.models)
	}
	send := func(addr string) error {
		if l.spec.chunks > 0 {
			return l.stream(ctx, addr, &a)
		}
		return l.infer(ctx, addr, &a)
	}
	if g := l.spec.gateway; g != nil {
		return a, send(g.address())
	}
	err := l.ready.through(l.spec.through, turn, send)
	return a, err
}

// insist sends a request again until it is answered, and then until it is answered once
// more, by another gateway.
func (l *load) insist(ctx context.Context, a answer, err error, turn int) (answer, error) {
	var first answer
	for {
		switch {
		case ctx.Err() != nil:
			return a, err
		case err == nil && a.reason == "" && first.body == "":
			first = a
		case err == nil && a.reason == "":
			if a.body != first.body {
				first.finals++
			}
			return first, nil
		default:
			if werr := wait(ctx, retryEvery); werr != nil {
				return a, cmp.Or(err, werr)
			}
		}
		turn++
		a, err = l.try(ctx, a.text, turn)
	}
}

// retryEvery is the pause of a caller who sends a request again.
const retryEvery = 100 * time.Millisecond

// answer is what one caller receives.
type answer struct {
	// text is the request's, id the gateway's, and model that which is to answer, if any.
	text, id, model string
	// body is the answer; reason is its fault's, if it has one.
	body, reason string
	// finals is the number of ends of the answer: an output or a fault each.
	finals int
	// corrupt is true for a streamed answer with a gap, or with parts of two runs.
	corrupt bool
	// seq is the number of the last message of a streamed answer.
	seq uint64
	// took is how long the caller waited, until at; decision is how long of it a unary
	// request took in the gateway, as it reports.
	took, decision time.Duration
	at             time.Time
}

// isRight reports whether it answers its text, by any run.
func (a answer) isRight() bool {
	if a.model != "" {
		return a.body == a.text+" "+a.model
	}
	got, _, _ := strings.Cut(a.body, " ")
	return got == a.text && !a.corrupt
}

func (l *load) infer(ctx context.Context, addr string, a *answer) error {
	pipeline := l.spec.pipeline
	if a.model != "" {
		pipeline = "model:" + a.model
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/v1/pipelines/"+pipeline+":infer", strings.NewReader(a.text))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "text/plain")
	if l.spec.durable {
		request.Header.Set("Stagemesh-Durability", "file")
	}
	if l.spec.timeout > 0 {
		request.Header.Set("Stagemesh-Timeout", l.spec.timeout.String())
	}
	if l.spec.keyed {
		request.Header.Set("Idempotency-Key", a.text)
	}
	request.Header.Set("Stagemesh-Priority", strconv.Itoa(l.spec.priority))
	response, err := l.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	a.id, a.body, a.finals = response.Header.Get("Stagemesh-Request-Id"), string(body), 1
	if response.StatusCode != http.StatusOK {
		a.reason = reasonOf(response.StatusCode, body)
	}
	// Without the header the decision counts as an hour.
	a.decision = time.Hour
	var ms float64
	if _, err := fmt.Sscanf(response.Header.Get("Server-Timing"), "total;dur=%g", &ms); err == nil {
		a.decision = time.Duration(ms * float64(time.Millisecond))
	}
	return nil
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

func (l *load) stream(ctx context.Context, addr string, a *answer) error {
	client := inferencev1connect.NewInferenceServiceClient(l.client, "http://"+addr)
	request := &inferencev1.InferRequest{Pipeline: l.spec.pipeline, Inputs: []*inferencev1.Part{{
		Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: "text/plain", Data: []byte(a.text)}},
	}}}
	if l.spec.durable {
		request.Durability = inferencev1.Durability_DURABILITY_FILE
	}
	if l.spec.timeout > 0 {
		request.Timeout = durationpb.New(l.spec.timeout)
	}
	messages, err := client.InferStream(ctx, connect.NewRequest(request))
	if err != nil {
		return err
	}
	defer messages.Close()
	chunks := 0
	for messages.Receive() {
		chunks += a.addMessage(messages.Msg())
	}
	if err := messages.Err(); err != nil {
		if a.reason = reasonIn(err); a.reason == "" {
			return err
		}
		a.finals++
		return nil
	}
	if a.finals == 0 {
		return errors.New("the stream ended without an answer")
	}
	a.corrupt = a.corrupt || chunks != l.spec.chunks
	return nil
}

// addMessage adds a message of a streamed answer, and returns how many chunks it has.
func (a *answer) addMessage(m *inferencev1.InferStreamResponse) (chunks int) {
	a.id = m.GetRequestId()
	a.seq++
	a.corrupt = a.corrupt || m.GetSeq() != a.seq
	outputs := m.GetChunk().GetOutputs()
	if final := m.GetFinal(); final != nil {
		outputs = final.GetOutputs()
		a.finals++
	} else {
		chunks = 1
		a.corrupt = a.corrupt || a.finals > 0
	}
	body := string(outputs[0].GetBlob().GetData())
	a.corrupt = a.corrupt || a.body != "" && a.body != body
	a.body = body
	return chunks
}

func reasonIn(err error) string {
	failure, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return ""
	}
	for _, detail := range failure.Details() {
		value, err := detail.Value()
		if info, is := value.(*errdetails.ErrorInfo); err == nil && is {
			return info.GetReason()
		}
	}
	return ""
}

// results are the results of a load's requests.
type results struct {
	// right and wrong count answers, refused counts faults by reason.
	right, wrong int
	refused      map[string]int
	// duplicates were answered more than once, left given up by their callers.
	duplicates, left int
	// broken got no answer.
	broken []string
	// answers are all of them, in the order in which they came.
	answers []answer
	// begin is when the load began; sent is how long it took to send all, pause the
	// longest time without an answer.
	begin                time.Time
	sent, pause, elapsed time.Duration
}

func (r *results) add(a answer, err error) {
	switch {
	case err != nil:
		r.broken = append(r.broken, fmt.Sprintf("%s: %v", a.text, err))
		return
	case a.reason != "":
		r.refused[a.reason]++
	case a.isRight():
		r.right++
	default:
		r.wrong++
	}
	if a.finals > 1 {
		r.duplicates++
	}
	r.answers = append(r.answers, a)
}

// times returns a time of the answers with one of the reasons, the shortest first; "" is
// that of the right ones.
func (r *results) times(of func(answer) time.Duration, reasons ...string) []time.Duration {
	var out []time.Duration
	for _, a := range r.answers {
		if slices.Contains(reasons, a.reason) {
			out = append(out, of(a))
		}
	}
	slices.Sort(out)
	return out
}

func took(a answer) time.Duration { return a.took }

// quantile returns a quantile of sorted times, 0 of none.
func quantile(times []time.Duration, q float64) time.Duration {
	if len(times) == 0 {
		return 0
	}
	return times[int(q*float64(len(times)-1))]
}

// String is one line.
func (r *results) String() string {
	return fmt.Sprintf("%d right, %d wrong, %d answered twice, %v refused, %d left, %d broken %q, longest pause %s, in %s",
		r.right, r.wrong, r.duplicates, maps.Clone(r.refused), r.left, len(r.broken), r.broken[:min(len(r.broken), 3)],
		r.pause.Round(time.Millisecond), r.elapsed.Round(time.Millisecond))
}

// checkAllRight fails the test unless every request got its own answer, once.
func (r *results) checkAllRight(t *testing.T) {
	t.Helper()
	t.Log(r)
	if r.right == 0 || r.wrong+r.duplicates+len(r.refused)+len(r.broken)+r.left != 0 {
		t.Error("not every request has its answer")
		for _, a := range slices.DeleteFunc(slices.Clone(r.answers), func(a answer) bool { return a.reason == "" }) {
			t.Logf("%s: %s", a.text, a.body)
		}
	}
}

// balancer chooses the gateway of each request.
type balancer int

// The balancers. perRequest and perConnection send only to gateways whose /readyz is ok,
// and go on to the next if a connection is refused.
const (
	// roundRobin sends to all gateways in turn.
	roundRobin balancer = iota
	// perRequest balances requests, as a proxy does.
	perRequest
	// perConnection balances connections, as a virtual address does.
	perConnection
)

// String names it.
func (b balancer) String() string {
	return [...]string{"round robin", "requests", "connections"}[b]
}

const (
	// balanceEvery is how often a balancer polls each gateway.
	balanceEvery = 50 * time.Millisecond
	// idleConnection is how long callers keep an idle connection. The drain delay of a
	// gateway is longer.
	idleConnection = 2 * balanceEvery
	// noticeDelay is a drain delay in which a balancer notices that a gateway leaves, also on a machine with twenty
	// busy processes for each core: there a second was not enough.
	noticeDelay = 3 * time.Second
)

// readiness has the gateways that are ready.
type readiness struct {
	fleet *fleet

	mu    sync.Mutex
	addrs []string
	turn  int
}

func (r *readiness) pollUntil(ctx context.Context) {
	for wait(ctx, balanceEvery) == nil {
		r.poll()
	}
}

func (r *readiness) poll() {
	var ready []string
	for _, addr := range r.fleet.gatewayAddresses() {
		if status, _ := r.fleet.get("http://" + addr + "/readyz"); status == http.StatusOK {
			ready = append(ready, addr)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.addrs = ready
}

// rotation returns the gateways that are ready, with another one first each time.
func (r *readiness) rotation() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for i := range r.addrs {
		out = append(out, r.addrs[(r.turn+i)%len(r.addrs)])
	}
	r.turn++
	return out
}

var errNoGateway = errors.New("no gateway is ready")

// through sends a request to the gateway that the balancer chooses. For perConnection
// dial chooses it.
func (r *readiness) through(b balancer, i int, send func(addr string) error) error {
	switch b {
	case roundRobin:
		addrs := r.fleet.gatewayAddresses()
		return send(addrs[i%len(addrs)])
	case perConnection:
		return send("localhost") // the name is checked
	}
	err := errNoGateway
	for _, addr := range r.rotation() {
		if err = send(addr); !errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
	}
	return err
}

func (r *readiness) dial(ctx context.Context, network, _ string) (net.Conn, error) {
	err := errNoGateway
	for _, addr := range r.rotation() {
		var conn net.Conn
		if conn, err = (&net.Dialer{}).DialContext(ctx, network, addr); !errors.Is(err, syscall.ECONNREFUSED) {
			return conn, err
		}
	}
	return nil, err
}

// knows reports whether the balancer uses all gateways.
func (r *readiness) knows(gateways int) bool { return len(r.rotation()) == gateways }
