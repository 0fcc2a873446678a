package fleet

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"mime/multipart"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// What the attacked mesh may take. A tenant's requests have a budget; callers without a token
// have little. The rest is what a process takes that serves so many connections.
const (
	hostileBudget  = 64 << 20
	mostOfTenant   = hostileBudget + 100<<20
	mostOfStage    = 256<<20 + 100<<20
	mostOfStranger = 64 << 20
	// soonEnough is how long other callers may wait while the mesh is attacked.
	soonEnough = 2 * time.Second
	// mostWork is how many times the work of a good request's byte a byte may cost.
	mostWork = 20
)

var tokenA, tokenB = strings.Repeat("a", 32), strings.Repeat("b", 32)

// The ports of a mesh.
const publicPort, grpcPort, stagePort, adminPort, opsPort = "public", "grpc", "stage", "admin", "ops"

// attacked is a mesh in one process, with all of its ports.
type attacked struct {
	*member

	ports map[string]string
	// idleHeap and idleMemory are its live heap and its resident memory before an attack, work is
	// the time that a byte of a good request takes.
	idleHeap, idleMemory, idleRoutines int
	work                               float64
	operator                           *http.Client
}

func newAttacked(t *testing.T) *attacked {
	t.Helper()
	f := &fleet{t: t, folder: t.TempDir()}
	ports, err := testbed.FreePorts(5)
	must(t, err)
	m := &attacked{ports: map[string]string{}, operator: &http.Client{Transport: &http.Transport{DialContext: bystander.DialContext}}}
	for i, name := range []string{publicPort, grpcPort, stagePort, adminPort, opsPort} {
		m.ports[name] = fmt.Sprintf("127.0.0.1:%d", ports[i])
	}
	tokens := filepath.Join(f.folder, "tokens")
	must(t, os.WriteFile(tokens, []byte(tokenA+" a\n"+tokenB+" b\n"), 0o600))
	file, err := json.Marshal(map[string]any{
		"mesh": "hostile",
		"gateway": map[string]any{
			"listen": m.ports[publicPort], "grpc_listen": m.ports[grpcPort], "token_file": tokens, "max_in_flight_bytes": "64MiB",
			"admin": map[string]any{"listen": m.ports[adminPort], "token_file": tokens},
		},
		"ops":       map[string]any{"listen": m.ports[opsPort]},
		"stages":    map[string]any{"echo": map[string]any{"runner": map[string]any{"echo": struct{}{}}, "listen": m.ports[stagePort], "token_file": tokens}},
		"pipelines": map[string]any{"echo": map[string]any{"steps": []any{map[string]any{"name": "echo", "stage": "echo"}}}},
		"jobs": map[string]any{
			"pools":   map[string]any{"main": map[string]any{"target": map[string]any{"pipelines": []string{"echo"}}}},
			"queues":  map[string]any{"nightly": struct{}{}},
			"batches": map[string]any{"queue": "nightly"},
		},
	})
	must(t, err)
	path := filepath.Join(f.folder, "mesh.yaml")
	must(t, os.WriteFile(path, file, 0o600))
	m.member = &member{fleet: f, args: []string{"up", "--config", path}, public: m.ports[publicPort]}
	m.launch()
	m.awaitReady()
	m.ops = m.ports[opsPort]
	return m
}

var nextLine = regexp.MustCompile(`(?m)^# NextGC = (\d+)$`)

// heap returns the live heap, which is half of where the next collection comes: what a collection
// found that was in use, without the garbage that the attack has made since then.
func (m *attacked) heap(t *testing.T) int {
	t.Helper()
	status, page := m.fleet.send(m.operator, http.MethodGet, "http://"+m.ops+"/debug/pprof/heap?gc=1&debug=1")
	words := nextLine.FindStringSubmatch(page)
	if status != http.StatusOK || words == nil {
		t.Fatalf("the profile of the heap: %d: %.200s", status, page)
	}
	n, err := strconv.Atoi(words[1])
	must(t, err)
	return n / 2
}

// metric returns a metric as a number.
func (m *attacked) metric(t *testing.T, name string) float64 {
	t.Helper()
	status, page := m.fleet.send(m.operator, http.MethodGet, "http://"+m.ops+"/metrics")
	words := regexp.MustCompile(`(?m)^` + name + `(?:\{[^}]*\})? (\S+)$`).FindStringSubmatch(page)
	if status != http.StatusOK || words == nil {
		t.Fatalf("metric %s: %d: %.200s", name, status, page)
	}
	n, err := strconv.ParseFloat(words[1], 64)
	must(t, err)
	return n
}

// peak returns the highest resident memory since forgetPeak.
func (m *attacked) peak(t *testing.T) int {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.PID()))
	must(t, err)
	words := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(data)
	n, err := strconv.Atoi(string(words[1]))
	must(t, err)
	return n << 10
}

func (m *attacked) forgetPeak(t *testing.T) {
	t.Helper()
	must(t, os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", m.PID()), []byte("5"), 0))
}

// bystander dials from another address than attackers, who have but one.
var bystander = net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}

// bystanders are a tenant and probes, who call while the mesh is attacked.
type bystanders struct {
	stop func()

	mu     sync.Mutex
	calls  int
	worst  map[string]time.Duration
	failed map[string]string
}

// watch has bystanders call until stop, each over new connections.
func (m *attacked) watch() *bystanders {
	b := &bystanders{worst: map[string]time.Duration{}, failed: map[string]string{}}
	ctx, cancel := context.WithCancel(m.fleet.t.Context())
	var calling sync.WaitGroup
	b.stop = func() { cancel(); calling.Wait() }
	repeat := func(name string, call func(ctx context.Context) error) {
		calling.Go(func() {
			for ctx.Err() == nil {
				begin := time.Now()
				one, done := context.WithTimeout(ctx, 4*soonEnough)
				err := call(one)
				done()
				if ctx.Err() == nil {
					b.add(name, time.Since(begin), err)
				}
				_ = wait(ctx, 50*time.Millisecond)
			}
		})
	}
	kept := &http.Client{Transport: &http.Transport{DialContext: bystander.DialContext}}
	fresh := &http.Client{Transport: &http.Transport{DialContext: bystander.DialContext, DisableKeepAlives: true}}
	infer := func(client *http.Client) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			r, _ := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+m.ports[publicPort]+"/v1/pipelines/echo:infer", strings.NewReader("hello"))
			r.Header = http.Header{"Authorization": {"Bearer " + tokenB}, "Content-Type": {"text/plain"}}
			return statusOK(client.Do(r))
		}
	}
	repeat("another tenant", infer(kept))
	repeat("another tenant, new connection", infer(fresh))
	for _, port := range []string{publicPort, adminPort, opsPort} {
		repeat(port+" /livez", func(ctx context.Context) error {
			r, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+m.ports[port]+"/livez", http.NoBody)
			return statusOK(fresh.Do(r))
		})
	}
	for _, port := range []string{publicPort, grpcPort, stagePort} {
		repeat(port+" gRPC health", func(ctx context.Context) error {
			conn, err := grpc.NewClient(m.ports[port], grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
				return bystander.DialContext(ctx, "tcp", addr)
			}))
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
			return err
		})
	}
	return b
}

func statusOK(r *http.Response, err error) error {
	if err != nil {
		return err
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err == nil && r.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", r.Status, text)
	}
	return err
}

func (b *bystanders) add(name string, took time.Duration, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls++
	b.worst[name] = max(b.worst[name], took)
	if err != nil {
		b.failed[name] = fmt.Sprintf("after %s: %v", took.Round(time.Millisecond), err)
	}
}

// attackVariable names the order of an attacker, a process of its own.
const attackVariable = "STAGEMESH_TEST_ATTACK"

// order is what an attacker does: rows of the table by their indexes, at the same time.
type order struct {
	Ports map[string]string
	Rows  []int
	Most  time.Duration
}

// report is what an attacker has sent, and how many bytes that is once they are inflated.
type report struct{ Raw, Sent int }

// carryOut has an attacker carry out an order. Its connections stay open until end. It gives way to the
// mesh and to other callers, as if it were on another machine.
func (m *attacked) carryOut(t *testing.T, o order) (out report, end func()) {
	t.Helper()
	o.Ports = m.ports
	text, err := json.Marshal(o)
	must(t, err)
	cmd := exec.CommandContext(t.Context(), "nice", "-n", "19", os.Args[0])
	cmd.Env = append(os.Environ(), attackVariable+"="+string(text))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(t, err)
	from, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	if err := json.NewDecoder(from).Decode(&out); err != nil {
		t.Errorf("the attacker ends early: %v", err)
	}
	return out, func() {
		_ = in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the attacker: %v", err)
		}
	}
}

// attack is the main function of an attacker.
func attack(text string) error {
	var o order
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	all := rows()
	a := &attacker{ports: o.Ports, until: time.Now().Add(o.Most)}
	a.each(len(o.Rows), func(i int) {
		raw := all[o.Rows[i]].run(a)
		a.mu.Lock()
		a.raw += raw
		a.mu.Unlock()
	})
	if err := json.NewEncoder(os.Stdout).Encode(report{a.raw, a.sent}); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, os.Stdin)
	a.end()
	return err
}

// attacker sends what no client does. Its connections end with it.
type attacker struct {
	ports map[string]string
	// until is when it has sent enough.
	until time.Time

	mu        sync.Mutex
	conns     []net.Conn
	raw, sent int
	work      sync.WaitGroup
}

func (a *attacker) goes() bool { return time.Now().Before(a.until) }

// dial opens a connection; nil if there is none to be had.
func (a *attacker) dial(port string) net.Conn {
	conn, err := net.DialTimeout("tcp", a.ports[port], time.Second)
	if err != nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.conns = append(a.conns, conn)
	return conn
}

// write reports whether the peer takes all of the data in time.
func (a *attacker) write(conn net.Conn, data []byte) bool {
	_ = conn.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
	n, err := conn.Write(data)
	a.mu.Lock()
	a.sent += n
	a.mu.Unlock()
	return err == nil
}

func (a *attacker) end() {
	a.mu.Lock()
	for _, conn := range a.conns {
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
		_ = conn.Close()
	}
	a.mu.Unlock()
	a.work.Wait()
}

// each calls f for that many connections at a time, and again while the attack goes on.
func (a *attacker) each(n int, f func(i int)) {
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { f(i) })
	}
	all.Wait()
}

// wire is a connection of HTTP/2, without the care of a client.
type wire struct {
	net.Conn

	attacker *attacker
	id       uint32

	mu      sync.Mutex
	changed sync.Cond
	window  int
	windows map[uint32]int
	ended   map[uint32]bool
	closed  bool
}

const firstWindow = 65535

// http2 opens a connection. A silent one reads nothing.
func (a *attacker) http2(port string, isSilent bool, settings ...http2.Setting) *wire {
	conn := a.dial(port)
	if conn == nil {
		return nil
	}
	if isSilent {
		_ = conn.(*net.TCPConn).SetReadBuffer(4 << 10)
	}
	w := &wire{Conn: conn, attacker: a, id: 1, window: firstWindow, windows: map[uint32]int{}, ended: map[uint32]bool{}}
	w.changed.L = &w.mu
	var begin bytes.Buffer
	begin.WriteString(http2.ClientPreface)
	_ = http2.NewFramer(&begin, nil).WriteSettings(settings...)
	if !a.write(conn, begin.Bytes()) {
		return nil
	}
	if !isSilent {
		a.work.Go(w.read)
	}
	return w
}

func (w *wire) read() {
	framer := http2.NewFramer(io.Discard, w.Conn)
	defer func() {
		w.mu.Lock()
		w.closed = true
		w.changed.Broadcast()
		w.mu.Unlock()
	}()
	for {
		f, err := framer.ReadFrame()
		if err != nil {
			return
		}
		w.mu.Lock()
		switch f := f.(type) {
		case *http2.WindowUpdateFrame:
			if f.StreamID == 0 {
				w.window += int(f.Increment)
			} else {
				w.windows[f.StreamID] += int(f.Increment)
			}
		case *http2.HeadersFrame:
			if f.StreamEnded() {
				w.ended[f.StreamID] = true
			}
		case *http2.DataFrame:
			if f.StreamEnded() {
				w.ended[f.StreamID] = true
			}
		case *http2.RSTStreamFrame:
			w.ended[f.StreamID] = true
		}
		w.changed.Broadcast()
		w.mu.Unlock()
		switch f := f.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				w.frame(http2.FrameSettings, http2.FlagSettingsAck, 0, nil)
			}
		case *http2.PingFrame:
			if !f.IsAck() {
				w.frame(http2.FramePing, http2.FlagPingAck, 0, f.Data[:])
			}
		}
	}
}

func frameOf(kind http2.FrameType, flags http2.Flags, id uint32, data []byte) []byte {
	out := binary.BigEndian.AppendUint32(nil, uint32(len(data))<<8|uint32(kind))
	out = append(out, byte(flags))
	return append(binary.BigEndian.AppendUint32(out, id), data...)
}

func (w *wire) frame(kind http2.FrameType, flags http2.Flags, id uint32, data []byte) bool {
	return w.attacker.write(w.Conn, frameOf(kind, flags, id, data))
}

// open opens a stream with that header; 0 if the connection takes none.
func (w *wire) open(block []byte, isLast bool) uint32 {
	id := w.id
	w.id += 2
	flags := http2.FlagHeadersEndHeaders
	if isLast {
		flags |= http2.FlagHeadersEndStream
	}
	if !w.frame(http2.FrameHeaders, flags, id, block) {
		return 0
	}
	return id
}

// data sends data on a stream in frames of that size, within the windows.
func (w *wire) data(id uint32, data []byte, size int, isLast bool) bool {
	for len(data) > 0 {
		w.mu.Lock()
		for w.window <= 0 || w.windows[id]+firstWindow <= 0 {
			if w.closed || w.ended[id] || !w.attacker.goes() {
				w.mu.Unlock()
				return false
			}
			timer := time.AfterFunc(100*time.Millisecond, w.changed.Broadcast)
			w.changed.Wait()
			timer.Stop()
		}
		n := min(w.window, w.windows[id]+firstWindow, len(data), max(size, 16<<10))
		w.window -= n
		w.windows[id] -= n
		w.mu.Unlock()
		var out []byte
		for part := data[:n]; len(part) > 0; {
			m := min(size, len(part))
			var flags http2.Flags
			if isLast && m == len(part) && n == len(data) {
				flags = http2.FlagDataEndStream
			}
			out = append(out, frameOf(http2.FrameData, flags, id, part[:m])...)
			part = part[m:]
		}
		if !w.attacker.write(w.Conn, out) {
			return false
		}
		data = data[n:]
	}
	return true
}

// target is what an attack calls.
type target struct {
	name, port, path, contentType string
	// token is sent unless it is empty.
	token string
}

func (g target) isAdmitted() bool { return g.token == tokenA || g.token == tokenB }

const (
	healthCheck = "/grpc.health.v1.Health/Check"
	healthWatch = "/grpc.health.v1.Health/Watch"
	reflects    = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
	inferRPC    = "/stagemesh.inference.v1.InferenceService/Infer"
	stageRPC    = "/stagemesh.stage.v1.StageService/Infer"
	oipRPC      = "/inference.GRPCInferenceService/ModelInfer"
	adminRPC    = "/stagemesh.admin.v1.MeshService/ListHosts"
	inferPath   = "/v1/pipelines/echo:infer"
)

func targets() []target {
	wrong := strings.Repeat("x", 32)
	const kind = "application/grpc"
	out := []target{
		{"REST", publicPort, inferPath, "text/plain", tokenA},
		{"REST", publicPort, inferPath, "text/plain", ""},
		{"Connect", publicPort, inferRPC, "application/proto", tokenA},
		{"Connect", publicPort, inferRPC, "application/json", wrong},
		{"Connect stream", publicPort, inferRPC + "Stream", "application/connect+proto", tokenA},
		{"gRPC-Web", publicPort, inferRPC, "application/grpc-web+proto", tokenA},
		{"readyz", publicPort, "/readyz", "text/plain", ""},
		{"page", publicPort, "/docs", "text/plain", ""},
		{"nothing", publicPort, "/none", "text/plain", tokenA},
		{"admin", adminPort, adminRPC, kind, tokenA},
		{"admin", adminPort, adminRPC, kind, ""},
		{"readyz", adminPort, "/readyz", "text/plain", ""},
	}
	for _, port := range []string{publicPort, grpcPort, stagePort} {
		call := map[string]string{publicPort: inferRPC, grpcPort: oipRPC, stagePort: stageRPC}[port]
		out = append(out,
			target{"health", port, healthCheck, kind, ""}, target{"watch", port, healthWatch, kind, ""}, target{"call", port, call, kind, tokenA},
			target{"call", port, call, kind, wrong}, target{"call", port, call, kind, ""}, target{"reflection", port, reflects, kind, tokenA})
	}
	return out
}

// header returns the header of a call, and sets the text x in the peer's table of fields, which a
// byte repeats.
func (g target) header(method string, more ...string) []byte {
	var out bytes.Buffer
	encoder := hpack.NewEncoder(&out)
	fields := append([]string{":method", method, ":scheme", "http", ":path", g.path, ":authority", g.mesh(), "content-type", g.contentType}, more...)
	if strings.HasPrefix(g.contentType, "application/grpc") {
		fields = append(fields, "te", "trailers")
	}
	if g.token != "" {
		fields = append(fields, "authorization", "Bearer "+g.token)
	}
	for i := 0; i < len(fields); i += 2 {
		// Sensitive fields are not in the table.
		_ = encoder.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1], Sensitive: true})
	}
	return out.Bytes()
}

func (target) mesh() string { return "127.0.0.1" }

// indexed adds a field to the table, and repeated is that field again.
func indexed(value string) []byte {
	out := append([]byte{0x40, 1, 'a'}, hpack.AppendHuffmanString(nil, "")...)
	out = append(out, 127)
	n := len(value) - 127
	for n >= 128 {
		out = append(out, byte(n&127|128))
		n >>= 7
	}
	return append(append(out, byte(n)), value...)
}

const repeated = 0xbe

// message returns a message of a stream of them.
func message(data []byte, isCompressed bool) []byte {
	out := []byte{0}
	if isCompressed {
		out[0] = 1
	}
	return append(binary.BigEndian.AppendUint32(out, uint32(len(data))), data...)
}

// shapes are what an attacker does to a target by HTTP/2, and by HTTP/1.
func http2Shapes() map[string]func(a *attacker, g target) {
	return map[string]func(a *attacker, g target){
		"many streams of headers only": func(a *attacker, g target) {
			a.each(64, func(int) {
				w := a.http2(g.port, false)
				if w == nil {
					return
				}
				block := append(g.header("POST"), indexed(strings.Repeat("v", 1000))...)
				w.open(append(block, bytes.Repeat([]byte{repeated}, 11)...), false)
				block = append(g.header("POST"), bytes.Repeat([]byte{repeated}, 14)...)
				for a.goes() && w.open(block, false) != 0 {
				}
			})
		},
		"messages that do not end": func(a *attacker, g target) {
			size := 60 << 10
			if g.isAdmitted() {
				size = 4 << 20
			}
			text := message(bytes.Repeat([]byte{0xff}, size), false)
			a.each(64, func(int) {
				w := a.http2(g.port, false)
				for w != nil && a.goes() {
					if id := w.open(g.header("POST"), false); id == 0 || !w.data(id, text[:len(text)-1], 16<<10, false) {
						return
					}
				}
			})
		},
		"frames of one byte": func(a *attacker, g target) {
			size := 60 << 10
			if g.isAdmitted() {
				size = 1 << 20
			}
			text := message(bytes.Repeat([]byte{0xff}, size), false)
			a.each(8, func(int) {
				w := a.http2(g.port, false)
				for w != nil && a.goes() {
					if id := w.open(g.header("POST"), false); id == 0 || !w.data(id, text[:len(text)-1], 1, false) {
						return
					}
				}
			})
		},
		"lengths that never come": func(a *attacker, g target) {
			a.each(64, func(int) {
				w := a.http2(g.port, false)
				for w != nil && a.goes() {
					if id := w.open(g.header("POST"), false); id == 0 || !w.data(id, []byte{0, 0, 0, 0xf0, 0}, 5, false) {
						return
					}
				}
			})
		},
		"frames that are cut off": func(a *attacker, g target) {
			a.each(32, func(i int) {
				for n := 0; a.goes(); n++ {
					w := a.http2(g.port, false)
					if w == nil {
						return
					}
					if id := w.open(g.header("POST"), false); id != 0 {
						cut := frameOf(http2.FrameData, 0, id, message([]byte("abc"), false))
						a.write(w.Conn, cut[:1+(i+n)%(len(cut)-1)])
					}
					_ = w.Close()
				}
			})
		},
		"answers without a window": func(a *attacker, g target) {
			a.each(100, func(int) {
				w := a.http2(g.port, false, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
				for n := 0; w != nil && a.goes() && n < 250; n++ {
					method := "POST"
					if !strings.HasPrefix(g.contentType, "application/") {
						method = "GET"
					}
					id := w.open(g.header(method, "x", strings.Repeat("v", 8000)), method == "GET")
					if id == 0 || method == "POST" && !w.data(id, message(nil, false), 5, true) {
						return
					}
				}
			})
		},
		"answers that nobody reads": func(a *attacker, g target) {
			a.each(16, func(int) {
				w := a.http2(g.port, true)
				if w == nil {
					return
				}
				block := append(g.header("POST"), indexed(strings.Repeat("v", 1000))...)
				w.open(append(block, bytes.Repeat([]byte{repeated}, 11)...), true)
				block = append(g.header("POST"), bytes.Repeat([]byte{repeated}, 14)...)
				for a.goes() && w.open(block, true) != 0 {
				}
			})
		},
		"streams that are reset": func(a *attacker, g target) {
			a.each(8, func(i int) {
				w := a.http2(g.port, i%2 == 0)
				for w != nil && a.goes() {
					var out []byte
					for range 100 {
						out = append(out, frameOf(http2.FrameHeaders, http2.FlagHeadersEndHeaders, w.id, g.header("POST"))...)
						out = append(out, frameOf(http2.FrameRSTStream, 0, w.id, []byte{0, 0, 0, 8})...)
						w.id += 2
					}
					if !a.write(w.Conn, out) {
						return
					}
				}
			})
		},
		"bodies that nobody wants": func(a *attacker, g target) {
			text := make([]byte, 1<<20)
			a.each(400, func(int) {
				w := a.http2(g.port, false)
				if w == nil {
					return
				}
				for range 2 {
					if id := w.open(g.header("GET"), false); id != 0 {
						w.data(id, text, 16<<10, false)
					}
				}
			})
		},
	}
}

// floods are what an attacker does to a port before it calls anything.
func floods() map[string]func(a *attacker, port string) {
	repeat := func(n int, block func(w *wire) []byte) func(a *attacker, port string) {
		return func(a *attacker, port string) {
			a.each(n, func(i int) {
				w := a.http2(port, i%2 == 0)
				for w != nil && a.goes() && a.write(w.Conn, bytes.Repeat(block(w), 200)) {
				}
			})
		}
	}
	connections := func(text string) func(a *attacker, port string) {
		return func(a *attacker, port string) {
			for n := 0; a.goes() && n < 4000; n++ {
				if conn := a.dial(port); conn != nil {
					a.write(conn, []byte(text))
				}
			}
		}
	}
	return map[string]func(a *attacker, port string){
		"PING":          repeat(8, func(*wire) []byte { return frameOf(http2.FramePing, 0, 0, make([]byte, 8)) }),
		"SETTINGS":      repeat(8, func(*wire) []byte { return frameOf(http2.FrameSettings, 0, 0, []byte{0, 4, 0, 1, 0, 0}) }),
		"WINDOW_UPDATE": repeat(8, func(*wire) []byte { return frameOf(http2.FrameWindowUpdate, 0, 0, []byte{0, 0, 0, 1}) }),
		"PRIORITY":      repeat(8, func(w *wire) []byte { w.id += 2; return frameOf(http2.FramePriority, 0, w.id, make([]byte, 5)) }),
		"CONTINUATION": func(a *attacker, port string) {
			a.each(100, func(int) {
				w := a.http2(port, false)
				if w == nil || !w.frame(http2.FrameHeaders, 0, 1, nil) {
					return
				}
				part := frameOf(http2.FrameContinuation, 0, 1, append([]byte{0, 1, 'a', 127, 0x80, 0x7f}, bytes.Repeat([]byte("v"), 16000)...))
				for a.goes() && a.write(w.Conn, part) {
				}
			})
		},
		"huge frames": func(a *attacker, port string) {
			a.each(200, func(int) {
				w := a.http2(port, false)
				if w == nil {
					return
				}
				out := frameOf(http2.FrameHeaders, 4, 1, make([]byte, 1<<20))
				for a.goes() && a.write(w.Conn, out) {
				}
			})
		},
		"connections that send nothing":     connections(""),
		"connections with half a header":    connections("POST /v1/pipelines/echo:infer HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + strings.Repeat("v", 15000)),
		"connections with half a preface":   connections(http2.ClientPreface[:20]),
		"connections with half HTTP/2":      connections(http2.ClientPreface + string(frameOf(http2.FrameSettings, 0, 0, nil)) + string(frameOf(http2.FrameHeaders, 4, 1, make([]byte, 16000))[:15000])),
		"connections that are HTTP/2, idle": connections(http2.ClientPreface + string(frameOf(http2.FrameSettings, 0, 0, nil))),
	}
}

// http1Shapes are the same over HTTP/1.
func http1Shapes() map[string]func(a *attacker, g target) {
	head := func(g target, method, more string) string {
		out := method + " " + g.path + " HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: " + g.contentType + "\r\n" + more
		if g.token != "" {
			out += "Authorization: Bearer " + g.token + "\r\n"
		}
		return out + "\r\n"
	}
	flood := func(n int, first, then func(g target) string) func(a *attacker, g target) {
		return func(a *attacker, g target) {
			a.each(n, func(int) {
				conn := a.dial(g.port)
				if conn == nil || !a.write(conn, []byte(first(g))) || then == nil {
					return
				}
				part := []byte(then(g))
				for a.goes() && a.write(conn, part) {
				}
			})
		}
	}
	text := func(s string) func(target) string { return func(target) string { return s } }
	return map[string]func(a *attacker, g target){
		"a body that never comes":   flood(300, func(g target) string { return head(g, "POST", "Content-Length: 15000000\r\n") + "x" }, nil),
		"pipelined, unread":         flood(50, text(""), func(g target) string { return strings.Repeat(head(g, "GET", ""), 50) }),
		"extensions without an end": flood(50, func(g target) string { return head(g, "POST", "Transfer-Encoding: chunked\r\n") + "1;" }, text(strings.Repeat("x", 16<<10))),
		"chunks of a byte":          flood(50, func(g target) string { return head(g, "POST", "Transfer-Encoding: chunked\r\n") }, text(strings.Repeat("1;"+strings.Repeat("x", 14)+"\r\nx\r\n", 1000))),
		"trailers without an end":   flood(50, func(g target) string { return head(g, "POST", "Transfer-Encoding: chunked\r\n") + "0\r\n" }, text(strings.Repeat("a: b\r\n", 3000))),
		"a GET with a body":         flood(200, func(g target) string { return head(g, "GET", "Content-Length: 100000000\r\n") }, text(strings.Repeat("x", 64<<10))),
		"a huge query": flood(200, func(g target) string {
			g.path += "?" + strings.Repeat("a&", 7000)
			return head(g, "POST", "Content-Length: 10\r\n")
		}, nil),
	}
}

// body is a message that costs more than it looks.
type body struct {
	name string
	make func() []byte
}

func packed(text []byte) []byte {
	var out bytes.Buffer
	w, _ := gzip.NewWriterLevel(&out, gzip.BestCompression)
	_, _ = w.Write(text)
	_ = w.Close()
	return out.Bytes()
}

func field(n protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, n, protowire.BytesType), value)
}

const mostBody = 16<<20 - 64

// many returns a text again and again between two others, as large as a message may be.
func many(before, text, after string) func() []byte {
	return func() []byte {
		return []byte(before + strings.Repeat(text, (mostBody-len(before)-len(after)-8)/len(text)) + after)
	}
}

// binaryBodies are of protobuf, for a message whose inputs have that number.
func binaryBodies(inputs protowire.Number) []body {
	shape := func(number string) func() []byte {
		return func() []byte {
			numbers := many("", number, "")()
			if len(number) == 1 {
				numbers = field(2, numbers)
			}
			return field(inputs, field(3, numbers))
		}
	}
	return []body{
		{"an unknown field", func() []byte { return field(1000, make([]byte, mostBody-16)) }},
		{"packed numbers", shape("\x01")},
		{"unpacked numbers", shape("\x10\x01")},
		{"empty messages", many("", string(field(inputs, nil)), "")},
		{"unknown groups", many("", "\xfb\x3e\xfc\x3e", "")},
		{"unknown numbers", many("", "\xf8\x3e\x01", "")},
	}
}

func jsonBodies() []body {
	const tensor = `{"inputs": [{"name": "x", "datatype": "FP32", "shape": [`
	return []body{
		{"nested lists", many(`{"inputs": `, "[", "")},
		{"nested objects", many(``, `{"a":`, "")},
		{"a list of numbers", many(tensor+`4], "data": [`, "1,", `1]}]}`)},
		{"a shape of numbers", many(tensor, "1,", `1], "data": [1]}]}`)},
		{"a number of many digits", many(tensor+`4], "data": [`, "1", `]}]}`)},
		{"empty objects", many(`{"inputs": [`, "{},", `{}]}`)},
		{"empty lists", many(`{"inputs": [`, "[],", `[]]}`)},
		{"escaped text", many(`{"inputs": [{"name": "`, `\u0041`, `"}]}`)},
		{"unknown keys", many(`{`, `"a":1,`, `"b":1}`)},
	}
}

func msgpackBodies() []body {
	const list = "\x81\xa1x\xdd\x00\xff\xff\x00"
	return []body{
		{"nested lists", many("", "\x91", "")},
		{"nested maps", many("", "\x81\xa0", "")},
		{"a packed list of numbers", many(list, "\x01", "")},
		{"a list that never comes", many("\xdd\xff\xff\xff\xff", "\xc0", "")},
		{"empty maps", many(list, "\x80", "")},
	}
}

func gzipBodies() []body {
	empty := string(packed(nil))
	return []body{{"empty gzip members", many("", empty, "")}, {"garbage behind gzip", many(empty, "\x00", "")}}
}

const formBoundary = "boundary"

func formBody(parts int, name string) []byte {
	var out bytes.Buffer
	form := multipart.NewWriter(&out)
	_ = form.SetBoundary(formBoundary)
	for i := range parts {
		part, _ := form.CreateFormFile(name+strconv.Itoa(i), "f")
		_, _ = part.Write([]byte("x"))
	}
	_ = form.Close()
	return out.Bytes()
}

// hostileCall is a body that a protocol carries to a target.
type hostileCall struct {
	target
	name     string
	encoding string
	make     func() []byte
	// isPacked is true where that is gzip already.
	isPacked bool
}

// calls returns all bodies on all protocols that take them.
func calls() (out []hostileCall) {
	add := func(g target, encoding string, b body) {
		out = append(out, hostileCall{g, b.name, encoding, b.make, false})
	}
	binaryTargets := map[protowire.Number][]target{
		2: {
			{"Connect", publicPort, inferRPC, "application/proto", tokenA},
			{"Connect stream", publicPort, inferRPC + "Stream", "application/connect+proto", tokenA},
			{"gRPC", publicPort, inferRPC, "application/grpc", tokenA},
			{"gRPC-Web", publicPort, inferRPC, "application/grpc-web+proto", tokenA},
			{"gRPC", grpcPort, inferRPC, "application/grpc", tokenA},
			{"health", grpcPort, healthCheck, "application/grpc", ""},
			{"health", publicPort, healthCheck, "application/grpc", ""},
			{"health", stagePort, healthCheck, "application/grpc", ""},
			{"Connect, no token", publicPort, inferRPC, "application/proto", ""},
			{"gRPC, no token", grpcPort, inferRPC, "application/grpc", ""},
			{"reflection", grpcPort, reflects, "application/grpc", tokenA},
			{"admin", adminPort, "/stagemesh.admin.v1.PipelineService/PlanPipelines", "application/proto", tokenA},
		},
		1: {{"stage", stagePort, stageRPC, "application/grpc", tokenA}, {"stage, no token", stagePort, stageRPC, "application/grpc", ""}},
		5: {{"OIP gRPC", grpcPort, oipRPC, "application/grpc", tokenA}, {"OIP gRPC", publicPort, oipRPC, "application/grpc", tokenA}},
	}
	for _, inputs := range slices.Sorted(maps.Keys(binaryTargets)) {
		for _, b := range binaryBodies(inputs) {
			for _, g := range binaryTargets[inputs] {
				add(g, "", b)
				add(g, "gzip", b)
			}
		}
	}
	for _, b := range gzipBodies() {
		for _, g := range binaryTargets[2] {
			out = append(out, hostileCall{g, b.name, "gzip", b.make, true})
		}
	}
	for _, b := range jsonBodies() {
		for _, g := range []target{{"REST", publicPort, inferPath, "application/json", tokenA}, {"OIP REST", publicPort, "/v2/models/echo/infer", "application/json", tokenA}, {"generate", publicPort, "/v2/models/echo/generate", "application/json", tokenA}, {"jobs", publicPort, "/v1/jobs", "application/json", tokenA}, {"NDJSON", publicPort, "/v1/queues/nightly/jobs", "application/x-ndjson", tokenA}, {"batches", publicPort, "/v1/batches", "application/json", tokenA}} {
			add(g, "", b)
		}
		for _, g := range []target{{"Connect", publicPort, inferRPC, "application/json", tokenA}, {"Connect stream", publicPort, inferRPC + "Stream", "application/connect+json", tokenA}, {"gRPC", grpcPort, inferRPC, "application/grpc+json", tokenA}} {
			add(g, "", b)
			add(g, "gzip", b)
		}
	}
	for _, b := range msgpackBodies() {
		add(target{"MessagePack", publicPort, inferPath, "application/msgpack", tokenA}, "", b)
	}
	add(target{"NDJSON", publicPort, "/v1/queues/nightly/jobs", "application/x-ndjson", tokenA}, "", body{"empty lines", many("", "\n", "")})
	add(target{"NDJSON", publicPort, "/v1/queues/nightly/jobs", "application/x-ndjson", tokenA}, "", body{"lines of nothing", many("", "{}\n", "")})
	for _, path := range []string{inferPath, "/v1/files"} {
		for _, name := range []string{"x", strings.Repeat("x", 4000)} {
			text := func() []byte { return formBody(mostBody/(200+len(name)), name) }
			add(target{"form", publicPort, path, "multipart/form-data; boundary=" + formBoundary, tokenA}, "", body{fmt.Sprintf("parts with names of %d", len(name)), text})
		}
	}
	return out
}

// send sends the call that many times at once, and returns how many bytes that is once they are
// inflated.
func (c hostileCall) send(a *attacker, times int) (raw int) {
	isStream := strings.HasPrefix(c.contentType, "application/grpc") || strings.HasPrefix(c.contentType, "application/connect+")
	text := c.make()
	raw = times * len(text)
	if c.encoding != "" && !c.isPacked {
		text = packed(text)
	}
	var more []string
	if isStream {
		if text = message(text, c.encoding == "gzip"); c.encoding != "" {
			more = []string{"grpc-encoding", c.encoding, "connect-content-encoding", c.encoding}
		}
	} else if c.encoding != "" {
		more = []string{"content-encoding", c.encoding}
	}
	a.each(times, func(int) {
		w := a.http2(c.port, false)
		if w == nil {
			return
		}
		id := w.open(c.header("POST", more...), false)
		if id == 0 || !w.data(id, text, 16<<10, true) {
			return
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		for !w.ended[id] && !w.closed && a.goes() {
			timer := time.AfterFunc(100*time.Millisecond, w.changed.Broadcast)
			w.changed.Wait()
			timer.Stop()
		}
	})
	return raw
}

// outcome is what an attack has cost.
type outcome struct {
	report

	heap, peak int
	work       float64
	worst      time.Duration
}

// attack runs an attack, and fails the test where the mesh takes more than it may, or others are
// not served.
func (m *attacked) attack(t *testing.T, one row, most time.Duration) outcome {
	t.Helper()
	mostHeap, soon := one.bound(), soonEnough
	if len(one.attacks) > 1 {
		soon *= 2 // they take turns on the processors
	}
	for range 2 { // pools keep what they have for two collections
		_ = m.heap(t)
	}
	m.forgetPeak(t)
	resident := max(m.idleMemory, m.memory())
	others := m.watch()
	before := m.metric(t, "process_cpu_seconds_total")
	done, end := m.carryOut(t, order{Rows: one.attacks, Most: most})
	_ = wait(t.Context(), 100*time.Millisecond) // what was sent is read
	out := outcome{report: done, work: m.metric(t, "process_cpu_seconds_total") - before, heap: min(m.heap(t), m.heap(t)) - m.idleHeap}
	others.stop()
	end()
	out.peak = m.peak(t) - resident
	if out.heap > mostHeap {
		t.Errorf("the live heap grew by %d MiB, more than %d", out.heap>>20, mostHeap>>20)
	}
	if out.peak > 2*mostHeap {
		t.Errorf("resident memory grew by %d MiB, more than %d", out.peak>>20, 2*mostHeap>>20)
	}
	for name, why := range others.failed {
		t.Errorf("%s failed %s", name, why)
	}
	for name, took := range others.worst {
		out.worst = max(out.worst, took)
		if took > soon {
			t.Errorf("%s took %s", name, took)
		}
	}
	for end := time.Now().Add(10 * time.Second); ; {
		held := m.metric(t, "stagemesh_gateway_request_bytes")
		if held == 0 {
			return out
		}
		if time.Now().After(end) {
			t.Errorf("%.0f bytes stay held", held)
			return out
		}
		_ = wait(t.Context(), 20*time.Millisecond)
	}
}

func (o outcome) String() string {
	return fmt.Sprintf("heap +%d MiB, resident +%d MiB, %d KiB sent, %.2f s of CPU, others wait %s", o.heap>>20, o.peak>>20, o.Sent>>10, o.work, o.worst.Round(time.Millisecond))
}

// goodCalls return calls without harm: of a text in gzip, and of numbers in JSON.
func goodCalls() []hostileCall {
	part := &inferencev1.Part{Name: "x", Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: "text/plain", Data: bytes.Repeat([]byte("good "), 3<<20/5)}}}
	text := func() []byte {
		out, _ := proto.Marshal(&inferencev1.InferRequest{Pipeline: "echo", Inputs: []*inferencev1.Part{part}}) // it is valid
		return out
	}
	const n = 200_000
	numbers := func() []byte {
		return fmt.Appendf(nil, `{"inputs": [{"name": "x", "datatype": "FP32", "shape": [%d], "data": [%s1]}]}`, n, strings.Repeat("1.5,", n-1))
	}
	return []hostileCall{
		{target{"good", publicPort, inferRPC, "application/grpc", tokenA}, "good", "gzip", text, false},
		{target{"good", publicPort, "/v2/models/echo/infer", "application/json", tokenA}, "good", "", numbers, false},
	}
}

// row is an attack of the table, which returns how many bytes it sends once they are inflated; 0
// where it does not matter what one of them takes.
type row struct {
	kind, name, port string
	isAdmitted       bool
	run              func(a *attacker) (raw int)
	// attacks are the indexes in the table of what is run at the same time: this row, or two others.
	attacks []int
}

// bound returns what the live heap may grow by.
func (r row) bound() int {
	switch {
	case len(r.attacks) > 1:
		return mostOfTenant + mostOfStage
	case !r.isAdmitted:
		return mostOfStranger
	case r.port == stagePort:
		return mostOfStage
	}
	return mostOfTenant
}

// rows returns all of the table, each kind in order.
func rows() (out []row) {
	add := func(kind string, g target, run func(a *attacker) int) {
		who := map[string]string{tokenA: "a tenant", "": "nobody"}[g.token]
		name := strings.Join([]string{kind, g.port, g.name, cmp.Or(who, "a wrong token")}, "/")
		out = append(out, row{kind, name, g.port, g.isAdmitted(), run, []int{len(out)}})
	}
	for name, shape := range sorted(floods()) {
		for _, port := range []string{publicPort, grpcPort, stagePort, adminPort, opsPort} {
			add("flood of "+name, target{port: port}, func(a *attacker) int { shape(a, port); return 0 })
		}
	}
	for name, shape := range sorted(http2Shapes()) {
		for _, g := range targets() {
			add(name, g, func(a *attacker) int { shape(a, g); return 0 })
		}
	}
	for name, shape := range sorted(http1Shapes()) {
		for _, g := range append(targets(), target{"livez", opsPort, "/livez", "text/plain", ""}, target{"metrics", opsPort, "/metrics", "text/plain", ""}) {
			if g.port != grpcPort && g.port != stagePort {
				add(name, g, func(a *attacker) int { shape(a, g); return 0 })
			}
		}
	}
	const times = 4
	for _, c := range calls() {
		g := c.target
		g.name += cmp.Or(" "+c.encoding, "")
		add(c.name, g, func(a *attacker) int {
			a.until = a.until.Add(10 * time.Second)
			raw := c.send(a, times)
			if strings.HasSuffix(c.contentType, "ndjson") {
				raw = 0 // a good line is a job, which takes far more than any byte here
			}
			return raw
		})
	}
	return out
}

// sorted yields the entries of a map by name.
func sorted[V any](of map[string]V) func(yield func(string, V) bool) {
	return func(yield func(string, V) bool) {
		for _, name := range slices.Sorted(maps.Keys(of)) {
			if !yield(name, of[name]) {
				return
			}
		}
	}
}

// chosen returns all rows and random pairs of them for the long form, and for the short one of
// each kind a row with a token and one without, of another target for each kind.
func chosen(all []row) (out []row) {
	if *soak {
		out = all
		for range 100 {
			one, other := all[rand.IntN(len(all))], all[rand.IntN(len(all))]
			out = append(out, row{name: one.name + " and " + other.name, attacks: append(one.attacks[:1:1], other.attacks...)})
		}
		return out
	}
	byKind, kinds := map[string][]row{}, []string{}
	for _, r := range all {
		key := fmt.Sprint(r.kind, r.isAdmitted)
		if byKind[key] == nil {
			kinds = append(kinds, key)
		}
		byKind[key] = append(byKind[key], r)
	}
	for i, key := range kinds {
		of := byKind[key]
		out = append(out, of[i%len(of)])
	}
	return out
}

// Each attack alone; `make soak` has all of them, the short form one for each shape and port.
func TestNoAttackTakesMoreThanItsShare(t *testing.T) {
	m := newAttacked(t)
	most := time.Duration(pick(100, 2000)) * time.Millisecond
	a := &attacker{ports: m.ports, until: time.Now().Add(10 * time.Second)}
	for _, good := range goodCalls() {
		good.send(a, 4)
		before, raw := m.metric(t, "process_cpu_seconds_total"), 0
		for range 16 { // one after the other: the memory has no room for all, and a refusal costs little
			raw += good.send(a, 1)
		}
		m.work = max(m.work, (m.metric(t, "process_cpu_seconds_total")-before)/float64(raw))
	}
	a.end()
	_ = m.heap(t) // pools keep what they have for a while
	m.idleHeap, m.idleMemory, m.idleRoutines = m.heap(t), m.memory(), int(m.metric(t, "go_goroutines"))
	t.Logf("idle: heap %d MiB, resident %d MiB, %d goroutines; a good byte takes %.1f ns", m.idleHeap>>20, m.idleMemory>>20, m.idleRoutines, m.work*1e9)
	sent := 0
	for _, one := range chosen(rows()) {
		t.Run(one.name, func(t *testing.T) {
			out := m.attack(t, one, most)
			sent += out.Sent
			t.Log(out)
			if per := out.work / float64(max(out.Raw, 1)); len(one.attacks) == 1 && out.Raw > 1<<20 && per > mostWork*m.work {
				t.Errorf("a byte takes %.0f ns, %.0f times a good one's", per*1e9, per/m.work)
			}
		})
	}
	if sent < 100<<20 {
		t.Errorf("all attacks sent %d MiB", sent>>20)
	}
	testbed.Eventually(t, "its goroutines return", func() bool { return int(m.metric(t, "go_goroutines")) < m.idleRoutines+100 })
}
