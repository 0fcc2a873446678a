package frame_test

import (
	"bytes"
	"testing"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

func TestJoinedTensorsAreOnePart(t *testing.T) {
	t.Parallel()
	row := func(n int64, raw ...byte) tensor.Tensor {
		return tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{n, 2}, Raw: raw}
	}
	first := row(1, 1, 2)
	var body frame.Body
	parts := []frame.Part{
		body.Blob("text", 0, "text/plain", []byte("abc")),
		body.Joined("x", []tensor.Tensor{first, row(0), row(2, 3, 4, 5, 6)}),
		body.Blob("more", 0, "text/plain", []byte("d")),
	}
	head, err := frame.Encode(&frame.Predict{Batch: 1, Items: []frame.Item{{ID: "a", Rows: 3}}, Parts: parts}, body.Len())
	if err != nil {
		t.Fatal(err)
	}
	var wire bytes.Buffer
	for range 2 { // the same frame may be sent more than once
		wire.Reset()
		buffers := body.Buffers(head)
		if _, err := buffers.WriteTo(&wire); err != nil {
			t.Fatal(err)
		}
	}
	m, data, err := frame.Read(&wire, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	got := m.(*frame.Predict).Parts
	x, err := got[1].Tensor(data)
	if err != nil || got[1].Item != nil || x.Rows() != 3 || !bytes.Equal(x.Raw, []byte{1, 2, 3, 4, 5, 6}) || got[1].At%frame.Alignment != 0 {
		t.Errorf("got %+v, %v", got[1], err)
	}
	if last, err := got[2].Bytes(data); err != nil || string(last) != "d" || got[2].At%frame.Alignment != 0 {
		t.Errorf("got %+v, %v", got[2], err)
	}
	if first.Shape[0] != 1 {
		t.Error("the first tensor has changed")
	}
}

func TestFrameWithoutBodyIsItsHead(t *testing.T) {
	t.Parallel()
	var none *frame.Body
	if got := none.Buffers([]byte("head")); len(got) != 1 || string(got[0]) != "head" {
		t.Errorf("got %q", got)
	}
}
