package worker_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/sdk/go/worker"
)

// patience bounds what a test waits for.
const patience = 20 * time.Second

// host is a small host that reads and writes frames.
type host struct {
	t        testing.TB
	listener *net.UnixListener
	conn     net.Conn
	in       *bufio.Reader
}

// listen opens a socket in a folder of its own, whose path is short enough.
func listen(t testing.TB) *host {
	t.Helper()
	folder, err := os.MkdirTemp("", "smw") //nolint:usetesting // a socket's path has a hundred bytes; t.TempDir has the test's name
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(folder, "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, listener: l}
	t.Cleanup(h.close)
	return h
}

func (h *host) close() {
	h.listener.Close()
	if h.conn != nil {
		h.conn.Close()
	}
}

func (h *host) socket() string { return h.listener.Addr().String() }

func (h *host) accept() {
	h.t.Helper()
	_ = h.listener.SetDeadline(time.Now().Add(patience))
	conn, err := h.listener.Accept()
	if err != nil {
		h.t.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(patience))
	h.conn, h.in = conn, bufio.NewReaderSize(conn, 64<<10)
}

func (h *host) send(m frame.Message, body *frame.Body) {
	h.t.Helper()
	if err := frame.Write(h.conn, m, body); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) receive() (frame.Message, []byte) {
	h.t.Helper()
	m, body, err := frame.Read(h.in, 1<<26)
	if err != nil {
		h.t.Fatal(err)
	}
	return m, body
}

// receiveAs returns the next message, which is of one type.
func receiveAs[M frame.Message](h *host) (M, []byte) {
	h.t.Helper()
	m, body := h.receive()
	out, ok := m.(M)
	if !ok {
		h.t.Fatalf("%s comes: %+v", frame.Kind(m), m)
	}
	return out, body
}

// ended checks that the worker has hung up.
func (h *host) ended() {
	h.t.Helper()
	if m, _, err := frame.Read(h.in, 1<<26); err == nil {
		h.t.Fatalf("%s comes: %+v", frame.Kind(m), m)
	}
}

func (h *host) welcome() *frame.Hello {
	h.t.Helper()
	h.accept()
	hello, _ := receiveAs[*frame.Hello](h)
	h.send(&frame.Welcome{
		Protocol: 1, Slots: 4, MaxSize: 32, MaxFrame: 1 << 24, Options: json.RawMessage(`{"scale":2}`),
		Capabilities: []string{frame.Stream},
	}, nil)
	return hello
}

// ready greets the worker and waits until it is ready.
func (h *host) ready() (*frame.Ready, []byte) {
	h.t.Helper()
	h.welcome()
	return receiveAs[*frame.Ready](h)
}

// batch is n items of one row of x each, joined.
func batch(number uint64, n int) (*frame.Predict, *frame.Body) {
	body := &frame.Body{}
	values := make([]float32, 2*n)
	for i := range values {
		values[i] = float32(i)
	}
	return &frame.Predict{
		Batch: number, Items: items(n),
		Parts: []frame.Part{body.Tensor("x", -1, fp32([]int64{int64(n), 2}, values...))},
	}, body
}

func items(n int) []frame.Item {
	out := make([]frame.Item, n)
	for i := range out {
		out[i] = frame.Item{ID: fmt.Sprint("item-", i)}
	}
	return out
}

func fp32(shape []int64, values ...float32) tensor.Tensor {
	t, err := tensor.FromFP32(shape, values)
	if err != nil {
		panic(err)
	}
	return t
}

func texts(values ...string) tensor.Tensor {
	var elements [][]byte
	for _, v := range values {
		elements = append(elements, []byte(v))
	}
	t, err := tensor.FromBytes([]int64{int64(len(values))}, elements)
	if err != nil {
		panic(err)
	}
	return t
}

func (h *host) predict(number uint64, n int) {
	h.t.Helper()
	h.send(batch(number, n))
}

// ask sends shutdown and waits for the worker to exit.
func (h *host) ask(served <-chan error) {
	h.t.Helper()
	h.send(&frame.Stop{Timeout: 5000}, nil)
	if m, _ := receiveAs[*frame.State](h); m.State != frame.Shutdown {
		h.t.Fatalf("%+v", m)
	}
	h.ended()
	if err := outcome(h.t, served); err != nil {
		h.t.Fatal(err)
	}
}

func outcome(t testing.TB, served <-chan error) error {
	t.Helper()
	select {
	case err := <-served:
		return err
	case <-time.After(patience):
		t.Fatal("Serve goes on")
		return nil
	}
}

// variables are the environment of a worker of this host.
func (h *host) variables(more ...string) map[string]string {
	out := map[string]string{"STAGEMESH_SOCKET": h.socket(), "STAGEMESH_STAGE": "sum", "STAGEMESH_WORKER": "3", "STAGEMESH_INCARNATION": "2"}
	for i := 0; i < len(more); i += 2 {
		out[more[i]] = more[i+1]
	}
	return out
}

// serve runs a worker in this process.
func (h *host) serve(ctx context.Context, s worker.Settings, more ...string) <-chan error {
	variables := h.variables(more...)
	s.Getenv = func(name string) string { return variables[name] }
	if s.Name == "" {
		s.Name = "test"
	}
	served := make(chan error, 1)
	go func() { served <- worker.Serve(ctx, s) }()
	return served
}

// double answers x by its sum with itself.
func double(_ context.Context, b *worker.Batch) (worker.Outputs, error) {
	x, err := b.Tensor("x")
	if err != nil {
		return nil, err
	}
	values, err := x.FP32Values()
	if err != nil {
		return nil, err
	}
	for i := range values {
		values[i] *= 2
	}
	return worker.Outputs{"y": worker.Joined(fp32(x.Shape, values...))}, nil
}

// values returns the only part of a result.
func values(t testing.TB, m *frame.Result, body []byte) []float32 {
	t.Helper()
	if len(m.Parts) != 1 {
		t.Fatalf("%d parts", len(m.Parts))
	}
	x, err := m.Parts[0].Tensor(body)
	if err != nil {
		t.Fatal(err)
	}
	out, err := x.FP32Values()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func equal(t testing.TB, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}
