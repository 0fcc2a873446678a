package fleet

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

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
