package wire_test

import (
	"bytes"
	"errors"
	"math"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/internal/wire"
)

func TestNestedMessageHasItsLength(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.SampledFrom([]int{0, 1, 100, 124, 125, 126, 127, 128, 129, 1000, 16380, 16384, 70000}).Draw(t, "size")
		// Not always the bound that it should be.
		atLeast := rapid.SampledFrom([]int{0, size, size / 2, size * 2, 200}).Draw(t, "at least")
		text := bytes.Repeat([]byte{'x'}, size)
		w := wire.Writer(rapid.SampledFrom([]int{0, 64, size}).Draw(t, "room"))
		w.WriteUint(1, 1)
		for outer := w.Message(2, atLeast); outer.More(); {
			for inner := w.Message(3, atLeast); inner.More(); {
				w.Bytes(4, &text)
			}
			w.WriteUint(5, 5)
		}
		w.WriteUint(6, 6)
		got, err := w.Done()

		field := func(b []byte, number protowire.Number, value []byte) []byte {
			return protowire.AppendBytes(protowire.AppendTag(b, number, protowire.BytesType), value)
		}
		var content []byte
		if size > 0 {
			content = field(nil, 4, text)
		}
		want := field([]byte{1 << 3, 1}, 2, append(field(nil, 3, content), 5<<3, 5))
		want = append(want, 6<<3, 6)
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("got %.40x, %v; want %.40x", got, err, want)
		}
	})
}

func TestZeroValuesAreLeftOut(t *testing.T) {
	t.Parallel()
	w := wire.Writer(0)
	wire.Varint(&w, 1, new(uint64))
	wire.Varint(&w, 2, new(int64))
	w.Bool(3, new(bool))
	w.Text(4, new(string))
	w.Bytes(5, &[]byte{})
	w.TextMap(6, new(map[string]string))
	w.Int64s(7, new([]int64), 0)
	w.Time(8, new(wire.Time))
	if got, err := w.Done(); len(got) != 0 || err != nil {
		t.Errorf("got %x, %v", got, err)
	}
	w.WriteUint(1, 0)
	w.WriteText(2, "")
	w.WriteFixed64(3, 0)
	if got, err := w.Done(); len(got) != 2+2+9 || err != nil {
		t.Errorf("got %x, %v", got, err)
	}
}

func TestWriterKeepsItsFirstError(t *testing.T) {
	t.Parallel()
	w := wire.Writer(0)
	w.Stop(nil)
	w.WriteText(2, "half a \xe6\x97")
	w.Stop(errors.New("another"))
	if got, err := w.Done(); got != nil || err == nil || err.Error() != "field 2: is not UTF-8" {
		t.Errorf("got %x, %v", got, err)
	}
}

func TestGrowAllocatesOnce(t *testing.T) {
	// Not parallel: it counts what the process allocates.
	text := make([]byte, 1000)
	if n := testing.AllocsPerRun(100, func() {
		w := wire.Writer(1100)
		for m := w.Message(1, 10); m.More(); {
			w.Bytes(1, &text)
		}
		_, _ = w.Done()
	}); n > 1 {
		t.Errorf("it takes %v pieces of memory", n)
	}
}

// read returns the time of the message that holds nothing else.
func read(t interface{ Fatal(...any) }, data []byte) (out wire.Time) {
	c := wire.Reader(data)
	for c.Next() {
		c.Time(1, &out)
	}
	if c.Err() != nil {
		t.Fatal(c.Err())
	}
	return out
}

// holding returns a message that holds another one.
func holding(t interface{ Fatal(...any) }, m proto.Message) []byte {
	data, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return protowire.AppendBytes([]byte{1<<3 | 2}, data)
}

func TestTimesMatchProtobuf(t *testing.T) {
	t.Parallel()
	edges := []int64{0, 1, -1, -62135596800, -62135596801, 253402300799, 253402300800, math.MaxInt64, math.MinInt64, 9223372036, -9223372037}
	nanos := []int32{0, 1, -1, 999_999_999, 1_000_000_000, math.MinInt32, math.MaxInt32}
	rapid.Check(t, func(t *rapid.T) {
		seconds := rapid.OneOf(rapid.SampledFrom(edges), rapid.Int64()).Draw(t, "seconds")
		ns := rapid.OneOf(rapid.SampledFrom(nanos), rapid.Int32()).Draw(t, "nanos")
		at := &timestamppb.Timestamp{Seconds: seconds, Nanos: ns}
		got, valid := read(t, holding(t, at)), at.CheckValid()
		if err := got.CheckTimestamp(); (err == nil) != (valid == nil) || err != nil && err.Error() != valid.Error() {
			t.Fatalf("got %v, want %v", err, valid)
		}
		if got.AsTime() != at.AsTime() {
			t.Fatalf("got %v, want %v", got.AsTime(), at.AsTime())
		}
		if want := (&durationpb.Duration{Seconds: seconds, Nanos: ns}).AsDuration(); got.AsDuration() != want {
			t.Fatalf("got %v, want %v", got.AsDuration(), want)
		}
	})
}

func TestTimesRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		at := time.Unix(rapid.Int64Range(-62135596800, 253402300799).Draw(t, "seconds"), rapid.Int64Range(0, 999_999_999).Draw(t, "ns"))
		d := time.Duration(rapid.Int64().Draw(t, "duration"))
		w, written := wire.Writer(0), wire.Timestamp(at)
		w.Time(1, &written)
		stamp, err := w.Done()
		if err != nil || !bytes.Equal(stamp, holding(t, timestamppb.New(at))) {
			t.Fatalf("got %x, %v", stamp, err)
		}
		w = wire.Writer(0)
		w.Duration(1, &d)
		span, err := w.Done()
		if err != nil || !bytes.Equal(span, holding(t, durationpb.New(d))) {
			t.Fatalf("got %x, %v", span, err)
		}
		first, second := read(t, stamp), read(t, span)
		if !first.AsTime().Equal(at) || second.AsDuration() != d {
			t.Fatalf("got %v and %v", first, second)
		}
	})
}

func TestAbsentTimeIsZero(t *testing.T) {
	t.Parallel()
	var absent wire.Time
	if absent.CheckTimestamp() == nil || absent.AsDuration() != 0 || !absent.AsTime().Equal(time.Unix(0, 0)) {
		t.Errorf("got %v, %v, %v", absent.CheckTimestamp(), absent.AsDuration(), absent.AsTime())
	}
	empty := read(t, []byte{1<<3 | 2, 0})
	if err := empty.CheckTimestamp(); err != nil {
		t.Error(err)
	}
	c := wire.Reader([]byte{1<<3 | 2, 1, 1 << 3})
	for c.Next() {
		c.Time(1, &empty)
	}
	if c.Err() == nil {
		t.Error("a time that is cut off is taken")
	}
}
