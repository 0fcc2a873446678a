package main

import (
	"bufio"
	"encoding/json"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/sdk/go/worker"
)

// TestExampleAnswersHost plays the host: one batch, in which one item is bad.
func TestExampleAnswersHost(t *testing.T) {
	t.Parallel()
	folder, err := os.MkdirTemp("", "smw") //nolint:usetesting // a socket's path has a hundred bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	socket := filepath.Join(folder, "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	s := (&mean{}).settings()
	s.Getenv = func(name string) string { return map[string]string{"STAGEMESH_SOCKET": socket}[name] }
	served := make(chan error, 1)
	go func() { served <- worker.Serve(t.Context(), s) }()

	conn, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	in := bufio.NewReader(conn)
	receive := func() (frame.Message, []byte) {
		m, body, err := frame.Read(in, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		return m, body
	}
	send := func(m frame.Message, body *frame.Body) {
		if err := frame.Write(conn, m, body); err != nil {
			t.Fatal(err)
		}
	}
	receive() // hello
	send(&frame.Welcome{Protocol: 1, Options: json.RawMessage(`{"scale":2}`), MaxSize: 8, MaxFrame: 1 << 20}, nil)
	receive() // ready

	nan := float32(math.NaN())
	x, err := tensor.FromFP32([]int64{3, 4}, []float32{1, 2, 3, 4, nan, 0, 0, 0, 5, 5, 5, 5})
	if err != nil {
		t.Fatal(err)
	}
	var body frame.Body
	send(&frame.Predict{
		Batch: 1, Items: []frame.Item{{ID: "a"}, {ID: "b"}, {ID: "c"}}, Parts: []frame.Part{body.Tensor("x", -1, x)},
	}, &body)
	m, data := receive()
	result, ok := m.(*frame.Result)
	if !ok || len(result.Faults) != 1 || result.Faults[0].Item != 1 || len(result.Parts) != 1 {
		t.Fatalf("%+v", m)
	}
	out, err := result.Parts[0].Tensor(data)
	if err != nil {
		t.Fatal(err)
	}
	means, err := out.FP32Values()
	if err != nil || !slices.Equal([]float32{means[0], means[2]}, []float32{5, 10}) {
		t.Errorf("%v, %v", means, err)
	}

	send(&frame.Stop{Timeout: 5000}, nil)
	receive() // state SHUTDOWN
	if err := <-served; err != nil {
		t.Error(err)
	}
}
