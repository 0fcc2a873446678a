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

	"github.com/stagemesh/stagemesh/internal/wire"
)

// walk reads a message to its end and returns the numbers of its fields.
func walk(data []byte) (fields []uint32, err error) {
	c := wire.Reader(data)
	for c.Next() {
		fields = append(fields, c.Number())
	}
	return fields, c.Err()
}

func TestWalkEndsAtBrokenBytes(t *testing.T) {
	t.Parallel()
	group := func(end byte) []byte { return []byte{1<<3 | 3, 2 << 3, 7, end} }
	tests := map[string]struct {
		data   []byte
		fields []uint32
		says   string // empty: it is whole
	}{
		"nothing":                    {},
		"a number":                   {data: []byte{1 << 3, 5}, fields: []uint32{1}},
		"bytes":                      {data: []byte{2<<3 | 2, 1, 'x'}, fields: []uint32{2}},
		"a group, which is skipped":  {data: group(1<<3 | 4), fields: []uint32{1}},
		"eight bytes":                {data: append([]byte{3<<3 | 1}, make([]byte, 8)...), fields: []uint32{3}},
		"four bytes":                 {data: append([]byte{3<<3 | 5}, make([]byte, 4)...), fields: []uint32{3}},
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
			fields, err := walk(test.data)
			if (err == nil) != (test.says == "") || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Fatalf("got %v, want %q", err, test.says)
			}
			if err == nil && !slices.Equal(fields, test.fields) {
				t.Errorf("met %v, want %v", fields, test.fields)
			}
		})
	}
}

func TestFirstErrorEndsTheWalk(t *testing.T) {
	t.Parallel()
	text := []byte{2<<3 | 2, 1, 0xff}
	c := wire.Reader(slices.Concat(text, text, []byte{0x80}))
	for c.Next() {
		got := ""
		if c.Text(2, &got); got != "" {
			t.Errorf("got %q", got)
		}
	}
	if err := c.Err(); err == nil || err.Error() != "field 2: is not UTF-8" || c.Next() {
		t.Errorf("got %v", err)
	}
}

func TestBytesShareTheMessagesMemory(t *testing.T) {
	t.Parallel()
	data := []byte{1<<3 | 2, 2, 'a', 'b', 2<<3 | 2, 0}
	var full, empty []byte
	c := wire.Reader(data)
	for c.Next() {
		c.Bytes(1, &full)
		c.Bytes(2, &empty)
	}
	if &full[0] != &data[2] || len(full) != 2 || cap(full) != 2 {
		t.Errorf("got %q with room for %d", full, cap(full))
	}
	if empty == nil || len(empty) != 0 {
		t.Errorf("got %v, want bytes that are there and empty", empty)
	}
}

// readTexts reads the texts of field 1.
func readTexts(data []byte) (texts []string, err error) {
	c := wire.Reader(data)
	for c.Next() {
		c.Texts(1, &texts, math.MaxInt)
	}
	return texts, c.Err()
}

func TestTextsOutliveTheMessage(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		// Of all lengths about the size of a piece.
		want := rapid.SliceOfN(rapid.StringN(-1, 300, 700), 0, 40).Draw(t, "texts")
		w := wire.Writer(0)
		w.Texts(1, &want, 0)
		data, err := w.Done()
		if err != nil {
			t.Fatal(err)
		}
		got, err := readTexts(data)
		clear(data)
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("got %q, %v; want %q", got, err, want)
		}
	})
}

func TestTextsTakeAboutTheirOwnSize(t *testing.T) {
	// Not parallel: it counts what the process allocates.
	w := wire.Writer(0)
	for i := range 30 {
		w.WriteText(1, fmt.Sprintf("text %d", i))
	}
	data, err := w.Done()
	if err != nil {
		t.Fatal(err)
	}
	var kept [30]string
	if n := testing.AllocsPerRun(100, func() {
		c := wire.Reader(data)
		for i := 0; c.Next(); i++ {
			c.Text(1, &kept[i])
		}
	}); n > 1 {
		t.Errorf("30 short texts take %v pieces of memory", n)
	}
}

func TestListsReadOneElementTooMany(t *testing.T) {
	t.Parallel()
	element, other := []byte{1<<3 | 2, 2, 2 << 3, 7}, []byte{2<<3 | 2, 1, 'b'}
	for name, test := range map[string]struct {
		data []byte
		want int
	}{
		"none":                  {other, 0},
		"one":                   {element, 1},
		"most":                  {bytes.Repeat(element, 5), 5},
		"one more":              {bytes.Repeat(element, 6), 6},
		"many more":             {bytes.Repeat(element, 9), 6},
		"others between":        {slices.Concat(element, other, element), 2},
		"and of another type":   {slices.Concat(element, []byte{1 << 3, 1}), 1},
		"and the same, skipped": {slices.Concat(bytes.Repeat(element, 9), other), 6},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got []uint64
			c := wire.Reader(test.data)
			for c.Next() {
				for i, end := wire.Elements(&c, 1, &got, 5); i < end; i++ {
					for m := c.Message(1, 0); m.More(); {
						wire.Varint(&c, 2, &got[i])
					}
				}
			}
			if c.Err() != nil || len(got) != test.want || slices.ContainsFunc(got, func(v uint64) bool { return v != 7 }) {
				t.Errorf("got %v, %v; want %d", got, c.Err(), test.want)
			}
		})
	}
}

func TestNumbersAreTruncatedAsInProtobuf(t *testing.T) {
	t.Parallel()
	var (
		u64 uint64
		u32 uint32
		i64 int64
		i32 int32
		yes bool
	)
	c := wire.Reader(protowire.AppendVarint([]byte{1 << 3}, math.MaxUint64))
	for c.Next() {
		wire.Varint(&c, 1, &u64)
		wire.Varint(&c, 1, &u32)
		wire.Varint(&c, 1, &i64)
		wire.Varint(&c, 1, &i32)
		c.Bool(1, &yes)
	}
	if u64 != math.MaxUint64 || u32 != math.MaxUint32 || i64 != -1 || i32 != -1 || !yes {
		t.Errorf("got %d, %d, %d, %d, %t", u64, u32, i64, i32, yes)
	}
}

func TestListsOfNumbersMayBePackedOrNot(t *testing.T) {
	t.Parallel()
	want := []int64{1, -1, 300, math.MinInt64}
	packed := want[:2]
	w := wire.Writer(0)
	w.Int64s(1, &packed, 0)
	w.Int64s(1, new([]int64), 0)
	for _, n := range want[2:] {
		wire.Varint(&w, 1, &n)
	}
	data, err := w.Done()
	if err != nil {
		t.Fatal(err)
	}
	var got []int64
	c := wire.Reader(data)
	for c.Next() {
		c.Int64s(1, &got, 4)
	}
	if c.Err() != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v; want %v", got, c.Err(), want)
	}
	broken := wire.Reader([]byte{1<<3 | 2, 2, 5, 0x80})
	for broken.Next() {
		broken.Int64s(1, &got, 5)
	}
	if broken.Err() == nil {
		t.Error("a number that is cut off is accepted")
	}
}

func TestLongListsOfNumbersEndAfterOneMoreThanTheMost(t *testing.T) {
	t.Parallel()
	const most, many = 16, 1 << 20
	packed := append(protowire.AppendVarint([]byte{1<<3 | 2}, many), make([]byte, many)...)
	for name, data := range map[string][]byte{"packed": packed, "not packed": bytes.Repeat([]byte{1 << 3, 0}, many)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got []int64
			c := wire.Reader(data)
			for c.Next() {
				c.Int64s(1, &got, most)
			}
			if len(got) != most+1 || cap(got) > 2*most || c.Err() != nil {
				t.Errorf("%d numbers with room for %d, %v", len(got), cap(got), c.Err())
			}
		})
	}
}

func TestTextMapsRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := rapid.MapOf(rapid.String(), rapid.StringN(-1, 200, -1)).Draw(t, "entries")
		w := wire.Writer(0)
		w.TextMap(1, &want)
		data, err := w.Done()
		if err != nil {
			t.Fatal(err)
		}
		var got map[string]string
		c := wire.Reader(data)
		for c.Next() {
			c.TextMap(1, &got)
		}
		if c.Err() != nil || !maps.Equal(got, want) || (got == nil) != (len(want) == 0) {
			t.Fatalf("got %v, %v; want %v", got, c.Err(), want)
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
