package envelope_test

import (
	"errors"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
)

const seeds = 20

func FuzzDecodeIsStable(f *testing.F) {
	draw := rapid.Custom(drawEnvelope)
	for seed := range seeds {
		add(f, draw.Example(seed))
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		first, err := envelope.Decode(data)
		if err != nil {
			if first != nil || !errors.Is(err, envelope.ErrMalformed) {
				t.Fatalf("got %v, %v", first, err)
			}
			return
		}
		// What the mesh does with every envelope that it could read.
		_, _, _, _ = first.Hop(), first.Last(), first.Class(), first.MsgID()
		once := encoded(t, first, new(meshv1.Envelope))
		second, err := envelope.Decode(once)
		if err != nil {
			t.Fatalf("what was read cannot be read again: %v", err)
		}
		same(t, once, encoded(t, second, new(meshv1.Envelope)), new(meshv1.Envelope), new(meshv1.Envelope))
	})
}

func FuzzDecodeReplyIsStableAndAgreesWithALook(f *testing.F) {
	draw := rapid.Custom(drawReply)
	for seed := range seeds {
		add(f, draw.Example(seed))
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		terminal, peeking := envelope.PeekTerminal(data)
		if peeking != nil && !errors.Is(peeking, envelope.ErrMalformed) {
			t.Fatal(peeking)
		}
		first, err := envelope.DecodeReply(data)
		if err != nil {
			if first != nil || !errors.Is(err, envelope.ErrMalformed) {
				t.Fatalf("got %v, %v", first, err)
			}
			return
		}
		if peeking != nil || terminal != first.Terminal() {
			t.Fatalf("a look says terminal = %t, %v; decoding %t", terminal, peeking, first.Terminal())
		}
		once := encoded(t, first, new(meshv1.Reply))
		second, err := envelope.DecodeReply(once)
		if err != nil {
			t.Fatalf("what was read cannot be read again: %v", err)
		}
		// A fault that came from elsewhere is cut to its bounds once.
		same(t, once, encoded(t, second, new(meshv1.Reply)), new(meshv1.Reply), new(meshv1.Reply))
	})
}

func FuzzDecodeCancelIsStable(f *testing.F) {
	add(f, &envelope.Cancel{Mesh: "test", RequestID: "0190a000-0000-7000-8000-000000000001", Deadline: time.Unix(1000, 0)})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		first, err := envelope.DecodeCancel(data)
		if err != nil {
			if first != nil || !errors.Is(err, envelope.ErrMalformed) {
				t.Fatalf("got %v, %v", first, err)
			}
			return
		}
		once := encoded(t, first, new(meshv1.Cancel))
		if second, err := envelope.DecodeCancel(once); err != nil || *second != *first {
			t.Fatalf("changed from %+v to %+v, %v", first, second, err)
		}
	})
}

func FuzzDecodeResultIsStable(f *testing.F) {
	draw := rapid.Custom(drawResult)
	for seed := range seeds {
		add(f, draw.Example(seed))
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		first, err := envelope.DecodeResult(data)
		if err != nil {
			if first != nil || !errors.Is(err, envelope.ErrMalformed) {
				t.Fatalf("got %v, %v", first, err)
			}
			return
		}
		once := encoded(t, first, new(meshv1.Result))
		second, err := envelope.DecodeResult(once)
		if err != nil {
			t.Fatalf("what was read cannot be read again: %v", err)
		}
		same(t, once, encoded(t, second, new(meshv1.Result)), new(meshv1.Result), new(meshv1.Result))
	})
}

func FuzzDecodeDeadLetterIsStable(f *testing.F) {
	draw := rapid.Custom(drawDeadLetter)
	for seed := range seeds {
		add(f, draw.Example(seed))
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		first, err := envelope.DecodeDeadLetter(data)
		if err != nil {
			if first != nil || !errors.Is(err, envelope.ErrMalformed) {
				t.Fatalf("got %v, %v", first, err)
			}
			return
		}
		once := encoded(t, first, new(meshv1.DeadLetter))
		second, err := envelope.DecodeDeadLetter(once)
		if err != nil {
			t.Fatalf("what was read cannot be read again: %v", err)
		}
		same(t, once, encoded(t, second, new(meshv1.DeadLetter)), new(meshv1.DeadLetter), new(meshv1.DeadLetter))
	})
}

func FuzzDecodeClaimIsStable(f *testing.F) {
	draw := rapid.Custom(drawClaim)
	for seed := range seeds {
		add(f, draw.Example(seed))
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		first, err := envelope.DecodeClaim(data)
		if err != nil {
			if first != nil || !errors.Is(err, envelope.ErrMalformed) {
				t.Fatalf("got %v, %v", first, err)
			}
			return
		}
		once := encoded(t, first, new(meshv1.IdempotencyRecord))
		if second, err := envelope.DecodeClaim(once); err != nil || *second != *first {
			t.Fatalf("changed from %+v to %+v, %v", first, second, err)
		}
	})
}

type encoder interface{ Encode() ([]byte, error) }

func add(f *testing.F, e encoder) {
	f.Helper()
	data, err := e.Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
}

func encoded(t *testing.T, e encoder, as proto.Message) []byte {
	t.Helper()
	data, err := e.Encode()
	if err != nil {
		t.Fatalf("what was read cannot be written: %v", err)
	}
	if err := proto.Unmarshal(data, as); err != nil {
		t.Fatal(err)
	}
	return data
}

// same holds two messages against each other as what they say: the order of a
// map's entries differs.
func same(t *testing.T, a, b []byte, first, second proto.Message) {
	t.Helper()
	if err := errors.Join(proto.Unmarshal(a, first), proto.Unmarshal(b, second)); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(first, second) {
		t.Fatalf("changed from %v to %v", first, second)
	}
}
