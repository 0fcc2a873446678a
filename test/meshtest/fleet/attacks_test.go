package fleet

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"fmt"
	"maps"
	"math/rand/v2"
	"mime/multipart"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
)

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
