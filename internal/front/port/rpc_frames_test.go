package port_test

import (
	"bytes"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// frames is a client of gRPC that writes a call frame by frame.
type frames struct {
	*http2.Framer

	t       *testing.T
	encoder *hpack.Encoder
	block   bytes.Buffer
	// ends are how streams have ended: their gRPC status, or what else there was of them.
	ends map[uint32]string
}

func dialFrames(t *testing.T, url string) *frames {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(testbed.Patience)); err != nil {
		t.Fatal(err)
	}
	out := &frames{Framer: http2.NewFramer(conn, conn), t: t, ends: map[uint32]string{}}
	out.ReadMetaHeaders, out.encoder = hpack.NewDecoder(4096, nil), hpack.NewEncoder(&out.block)
	_, err = io.WriteString(conn, http2.ClientPreface)
	out.check(err)
	out.check(out.WriteSettings())
	return out
}

func (f *frames) check(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

// header begins a call of Infer, with more fields as name and value.
func (f *frames) header(id uint32, more ...string) {
	f.t.Helper()
	f.block.Reset()
	fields := append([]string{":method", "POST", ":scheme", "http", ":path", "/stagemesh.inference.v1.InferenceService/Infer", ":authority", "127.0.0.1", "content-type", "application/grpc", "te", "trailers"}, more...)
	for i := 0; i < len(fields); i += 2 {
		f.check(f.encoder.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]}))
	}
	f.check(f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: f.block.Bytes(), EndHeaders: true}))
}

// end returns how a stream ends.
func (f *frames) end(id uint32) string {
	f.t.Helper()
	for f.ends[id] == "" {
		frame, err := f.ReadFrame()
		if err != nil {
			return err.Error()
		}
		switch frame := frame.(type) {
		case *http2.MetaHeadersFrame:
			for _, field := range frame.Fields {
				if field.Name == "grpc-status" {
					f.ends[frame.StreamID] = field.Value
				}
			}
			if frame.StreamEnded() && f.ends[frame.StreamID] == "" {
				f.ends[frame.StreamID] = "HTTP " + frame.PseudoValue("status")
			}
		case *http2.RSTStreamFrame:
			if f.ends[frame.StreamID] == "" {
				f.ends[frame.StreamID] = "reset " + frame.ErrCode.String()
			}
		case *http2.GoAwayFrame:
			return "go away " + frame.ErrCode.String()
		}
	}
	return f.ends[id]
}

// frame is a DATA frame, which is padded unless pad is nil.
type frame struct{ data, pad []byte }

// The other call on the connection is answered too, unless that ends.
func TestServersAnswerFramesAlike(t *testing.T) {
	t.Parallel()
	message, pad := fronttest.EncodeMessage(t, blob(3)), make([]byte, 255)
	head, rest := message[:7], message[7:]
	whole := []frame{{message, nil}}
	var bytesPadded []frame
	for i := range message {
		bytesPadded = append(bytesPadded, frame{message[i : i+1], pad})
	}
	cases := map[string]struct {
		field, value string
		frames       []frame
		want         string
	}{
		"one frame":                     {"", "", whole, "0"},
		"a padded frame":                {"", "", []frame{{message, pad[:10]}}, "0"},
		"a frame with padding of 0":     {"", "", []frame{{message, pad[:0]}}, "0"},
		"each byte padded":              {"", "", bytesPadded, "0"},
		"a frame of padding at the end": {"", "", []frame{{message, nil}, {nil, pad}}, "0"},
		"a frame of padding within":     {"", "", []frame{{head, nil}, {nil, pad}, {rest, nil}}, "0"},
		"a frame that is too long":      {"", "", []frame{{make([]byte, 17<<10), nil}}, "go away FRAME_SIZE_ERROR"},
		"no message":                    {"", "", []frame{{}}, "12"},
		"a message that is cut off":     {"", "", []frame{{head, nil}}, "13"},
		"a padded one that is cut off":  {"", "", []frame{{head, pad}}, "13"},
		"half a prefix":                 {"", "", []frame{{message[:2], nil}}, "13"},
		"an unknown flag":               {"", "", []frame{{append([]byte{2}, message[1:]...), nil}}, "13"},
		"a long header":                 {"x-long", strings.Repeat("x", 14000), whole, "0"},
		"no encoding":                   {"grpc-encoding", "identity", whole, "0"},
		"an unknown encoding":           {"grpc-encoding", "br", whole, "12"},
		"bytes that are not gzip":       {"grpc-encoding", "gzip", []frame{{append([]byte{1}, message[1:]...), nil}}, "3"},
		"no time":                       {"grpc-timeout", "0S", whole, "4"},
		"a nanosecond":                  {"grpc-timeout", "1n", whole, "4"},
		"most nanoseconds":              {"grpc-timeout", "99999999n", whole, "0"},
		"eleven thousand years":         {"grpc-timeout", "99999999H", whole, "0"},
	}
	onEachServer(t, port.PublicSettings{}, func(t *testing.T, url string, _ *grpc.ClientConn) {
		for name, test := range cases {
			f := dialFrames(t, url)
			f.header(1)
			f.check(f.WriteData(1, false, head))
			if test.field == "" {
				f.header(3)
			} else {
				f.header(3, test.field, test.value)
			}
			for i, one := range test.frames {
				f.check(f.WriteDataPadded(3, i == len(test.frames)-1, one.data, one.pad))
			}
			if got := f.end(3); got != test.want {
				t.Errorf("%s: %s, not %s", name, got, test.want)
			}
			if strings.HasPrefix(test.want, "go away") {
				continue
			}
			f.check(f.WriteData(1, true, rest))
			if got := f.end(1); got != "0" {
				t.Errorf("%s: the other call: %s", name, got)
			}
		}
	})
}
