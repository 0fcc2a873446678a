package wire_test

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/mesh/wire"
)

// walk reads a message to its end and returns the tags that it met.
func walk(data []byte) (tags []wire.Tag, err error) {
	m := wire.Read(data)
	for m.Next() {
		tags = append(tags, m.Tag)
	}
	return tags, m.Err()
}

func TestWalkEndsAtBrokenBytes(t *testing.T) {
	t.Parallel()
	group := func(end byte) []byte { return []byte{1<<3 | 3, 2 << 3, 7, end} }
	tests := map[string]struct {
		data []byte
		tags []wire.Tag
		says string // empty: it is whole
	}{
		"nothing":                    {},
		"a number":                   {data: []byte{1 << 3, 5}, tags: []wire.Tag{1 << 3}},
		"bytes":                      {data: []byte{2<<3 | 2, 1, 'x'}, tags: []wire.Tag{2<<3 | wire.Bytes}},
		"a group, which is skipped":  {data: group(1<<3 | 4), tags: []wire.Tag{1<<3 | 3}},
		"eight bytes":                {data: append([]byte{3<<3 | 1}, make([]byte, 8)...), tags: []wire.Tag{3<<3 | wire.Fixed64}},
		"four bytes":                 {data: append([]byte{3<<3 | 5}, make([]byte, 4)...), tags: []wire.Tag{3<<3 | 5}},
		"a tag that is cut off":      {data: []byte{0x80}, says: "EOF"},
		"a number that is cut off":   {data: []byte{1 << 3, 0x80}, says: "field 1"},
		"a number that is too long":  {data: append([]byte{1 << 3}, bytes.Repeat([]byte{0xff}, 11)...), says: "field 1"},
		"bytes that are cut off":     {data: []byte{2<<3 | 2, 2, 'x'}, says: "field 2"},
		"bytes without a length":     {data: []byte{2<<3 | 2}, says: "field 2"},
		"the field of number 0":      {data: []byte{0, 1}, says: "out of range"},
		"a number beyond protobuf's": {data: protowire.AppendVarint(nil, uint64(protowire.MaxValidNumber+1)<<3), says: "out of range"},
		"a type that is none":        {data: []byte{1<<3 | 7}, says: "field 1"},
		"the end of no group":        {data: []byte{1<<3 | 4}, says: "field 1"},
		"the end of another group":   {data: group(2<<3 | 4), says: "field 1"},
		"a group without an end":     {data: group(1 << 3), says: "field 1"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tags, err := walk(test.data)
			if (err == nil) != (test.says == "") || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Fatalf("got %v, want %q", err, test.says)
			}
			if err == nil && !slices.Equal(tags, test.tags) {
				t.Errorf("met %v, want %v", tags, test.tags)
			}
		})
	}
}

func TestFirstErrorEndsTheWalk(t *testing.T) {
	t.Parallel()
	text := []byte{2<<3 | 2, 1, 0xff}
	m := wire.Read(slices.Concat(text, text, []byte{0x80}))
	for m.Next() {
		if got := m.Text(); got != "" {
			t.Errorf("got %q", got)
		}
	}
	if err := m.Err(); err == nil || err.Error() != "field 2: is not UTF-8" || m.Next() {
		t.Errorf("got %v", err)
	}
}

func TestBytesShareTheMessagesMemory(t *testing.T) {
	t.Parallel()
	data := []byte{1<<3 | 2, 2, 'a', 'b', 2<<3 | 2, 0}
	m := wire.Read(data)
	m.Next()
	if got := m.Bytes(); &got[0] != &data[2] || len(got) != 2 || cap(got) != 2 {
		t.Errorf("got %q with room for %d", got, cap(got))
	}
	if m.Next(); m.Bytes() == nil || len(m.Bytes()) != 0 {
		t.Errorf("got %v, want bytes that are there and empty", m.Bytes())
	}
}

func TestTextsOutliveTheMessage(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		// Of all lengths about the size of a piece.
		want := rapid.SliceOfN(rapid.StringN(-1, 300, 700), 0, 40).Draw(t, "texts")
		w := wire.NewWriter(0)
		for _, s := range want {
			w.AnyText(1<<3|wire.Bytes, s)
		}
		data, err := w.Done()
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range []wire.Message{wire.Read(bytes.Clone(data)), wire.Skim(data)} {
			var got []string
			for m.Next() {
				got = append(got, m.Text())
			}
			if m.Err() != nil || !slices.Equal(got, want) {
				t.Fatalf("got %q, %v; want %q", got, m.Err(), want)
			}
		}
		// A reader's texts are its own.
		m := wire.Read(data)
		for i := 0; m.Next(); i++ {
			text := m.Text()
			clear(m.Bytes())
			if text != want[i] {
				t.Fatalf("got %q, want %q", text, want[i])
			}
		}
	})
}

func TestTextsTakeAboutTheirOwnSize(t *testing.T) {
	// Not parallel: it counts what the process allocates.
	w := wire.NewWriter(0)
	for i := range 30 {
		w.AnyText(1<<3|wire.Bytes, fmt.Sprintf("text %d", i))
	}
	data, err := w.Done()
	if err != nil {
		t.Fatal(err)
	}
	var kept [30]string
	if n := testing.AllocsPerRun(100, func() {
		m := wire.Read(data)
		for i := 0; m.Next(); i++ {
			kept[i] = m.Text()
		}
	}); n > 2 {
		t.Errorf("30 short texts take %v pieces of memory", n)
	}
}

func TestRunIsConsecutiveFields(t *testing.T) {
	t.Parallel()
	a, b := []byte{1<<3 | 2, 1, 'a'}, []byte{2<<3 | 2, 1, 'b'}
	for name, test := range map[string]struct {
		rest []byte
		want int
	}{
		"alone":                   {nil, 1},
		"three":                   {slices.Concat(a, a), 3},
		"as many as are asked":    {bytes.Repeat(a, 9), 5},
		"then another":            {slices.Concat(a, b, a), 2},
		"then of another type":    {slices.Concat(a, []byte{1 << 3, 1}), 2},
		"then what is broken":     {slices.Concat(a, a[:2]), 2},
		"then the end of a group": {slices.Concat(a, []byte{1<<3 | 4}), 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := wire.Read(slices.Concat(a, test.rest))
			if m.Next(); m.Run(5) != test.want || m.Text() != "a" {
				t.Errorf("got %d and %q, want %d", m.Run(5), m.Text(), test.want)
			}
		})
	}
}

func TestNumbersAreTruncatedAsInProtobuf(t *testing.T) {
	t.Parallel()
	data := protowire.AppendVarint([]byte{1 << 3}, math.MaxUint64)
	m := wire.Read(data)
	m.Next()
	if m.Uint64() != math.MaxUint64 || m.Uint32() != math.MaxUint32 || m.Int64() != -1 || m.Int32() != -1 || !m.Bool() {
		t.Errorf("got %d, %d, %d, %d, %t", m.Uint64(), m.Uint32(), m.Int64(), m.Int32(), m.Bool())
	}
}

func TestListsOfNumbersMayBePackedOrNot(t *testing.T) {
	t.Parallel()
	want := []int64{1, -1, 300, math.MinInt64}
	w := wire.NewWriter(0)
	w.Int64s(1<<3|wire.Bytes, want[:2])
	w.Int64s(1<<3|wire.Bytes, nil)
	for _, n := range want[2:] {
		w.Int(1<<3|wire.Varint, n)
	}
	data, err := w.Done()
	if err != nil {
		t.Fatal(err)
	}
	var got []int64
	m := wire.Read(data)
	for m.Next() {
		got = m.Int64s(got)
	}
	if m.Err() != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v; want %v", got, m.Err(), want)
	}
	broken := wire.Read([]byte{1<<3 | 2, 2, 5, 0x80})
	if broken.Next(); broken.Int64s(nil) == nil || broken.Err() == nil {
		t.Errorf("a number that is cut off: %v", broken.Err())
	}
}

func TestTextMapsRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := rapid.MapOf(rapid.String(), rapid.StringN(-1, 200, -1)).Draw(t, "entries")
		w := wire.NewWriter(0)
		w.TextMap(1<<3|wire.Bytes, want)
		data, err := w.Done()
		if err != nil {
			t.Fatal(err)
		}
		var got map[string]string
		m := wire.Read(data)
		for m.Next() {
			got = m.TextEntry(got)
		}
		if m.Err() != nil || !maps.Equal(got, want) || (got == nil) != (len(want) == 0) {
			t.Fatalf("got %v, %v; want %v", got, m.Err(), want)
		}
	})
}

// FuzzAWalkAgreesWithProtobuf holds the walk's idea of a well-formed message
// against the library's, by a message with no field that could refuse more.
func FuzzAWalkAgreesWithProtobuf(f *testing.F) {
	for _, seed := range [][]byte{nil, {1 << 3, 5}, {1<<3 | 3, 1<<3 | 4}, {1<<3 | 2, 1, 'x'}, {0x80, 0x80, 0x01, 1}, {1<<3 | 4}} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		_, err := walk(data)
		if want := proto.Unmarshal(data, new(emptypb.Empty)); (err == nil) != (want == nil) {
			t.Fatalf("%x: the walk says %v, protobuf %v", data, err, want)
		}
	})
}
