package frame_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

const (
	page         = "../../../sdk/PROTOCOL.md"
	bytesHeading = "\n## Bytes\n"
)

// TestPageBytesAreCurrent holds the last section of the protocol's page against
// what this package writes; -update writes it.
func TestPageBytesAreCurrent(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, have, found := strings.Cut(string(text), bytesHeading)
	want := conversation(t)
	if found && have == want {
		return
	}
	if !*update {
		t.Fatalf("the section Bytes of %s is not true; -update writes it", page)
	}
	if err := os.WriteFile(page, []byte(before+bytesHeading+want), 0o600); err != nil {
		t.Fatal(err)
	}
}

// conversation is one batch from the first byte on.
func conversation(t *testing.T) string {
	t.Helper()
	var inputs, outputs frame.Body
	x := func(name string, shape ...int64) []frame.PartSpec {
		return []frame.PartSpec{{Name: name, Datatype: tensor.FP32, Shape: shape}}
	}
	messages := []struct {
		what string
		m    frame.Message
		body *frame.Body
	}{
		{"The worker connects and sends hello:", &frame.Hello{Protocols: []int{1}, Name: "sum", PID: 4711}, nil},
		{"The host answers:", &frame.Welcome{Protocol: 1, Options: json.RawMessage(`{"scale":2}`), MaxSize: 32, MaxFrame: 1 << 26}, nil},
		{"The worker has loaded, and takes one batch at a time:", &frame.Ready{Spec: &frame.Spec{Inputs: x("x", -1, 2), Outputs: x("sum", -1, 1)}}, nil},
		{"The host sends a batch of two items, whose inputs it has joined:", &frame.Predict{
			Batch: 1, Items: []frame.Item{{ID: "a", Timeout: 30_000}, {ID: "b", Timeout: 1500}},
			Parts: []frame.Part{inputs.Tensor("x", -1, fp32([]int64{2, 2}, 1, 2, 3, 4))},
		}, &inputs},
		{"The worker ends the batch, which gives its slot back; the second item has a fault, so its row does not matter:", &frame.Result{
			Batch: 1, Parts: []frame.Part{outputs.Tensor("sum", -1, fp32([]int64{2, 1}, 6, 0))},
			Faults: []frame.Fault{{Item: 1, Reason: "INVALID_INPUT", Message: "too large", Field: "x"}},
		}, &outputs},
	}
	var out strings.Builder
	out.WriteString("\nA whole conversation, byte by byte. `go test ./internal/worker/frame -update` writes this section, and fails where it is not true.\n")
	for _, m := range messages {
		var data bytes.Buffer
		if err := frame.Write(&data, m.m, m.body); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&out, "\n%s\n\n```\n%s```\n", m.what, annotated(data.Bytes()))
	}
	return out.String()
}

// annotated writes a frame as lines of hexadecimal bytes and what they are.
func annotated(data []byte) string {
	var out strings.Builder
	header, body := binary.LittleEndian.Uint32(data[4:]), binary.LittleEndian.Uint64(data[8:])
	line(&out, data[:4], string(data[:4]))
	line(&out, data[4:8], fmt.Sprintf("a header of %d bytes", header))
	line(&out, data[8:16], fmt.Sprintf("a body of %d bytes", body))
	rest := data[16:]
	for _, part := range [][]byte{rest[:header], rest[header:]} {
		for len(part) > 0 {
			n := min(16, len(part))
			line(&out, part[:n], readable(part[:n]))
			part = part[n:]
		}
	}
	return out.String()
}

func line(out *strings.Builder, data []byte, what string) {
	out.WriteString(strings.TrimRight(fmt.Sprintf("%-48s %s", fmt.Sprintf("% x", data), what), " ") + "\n")
}

// readable is the text of bytes, with a dot for each that is not a letter.
func readable(data []byte) string {
	out := []byte(nil)
	for _, c := range data {
		if c < ' ' || c > '~' {
			c = '.'
		}
		out = append(out, c)
	}
	return string(out)
}
